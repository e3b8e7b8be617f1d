"""Rows of rollout importance sampling: the weights, and how far apart the two policies are.

Behavior policy: the one that a token was sampled from. Training policy: the one that it is compared
with. The names are those of verl. Values are before bound and veto, but those with `applied`.
"""

from streamrl.metrics.metric import Merge, Metric, Unit, Writer


def _row(name: str, unit: Unit, merge: Merge, meaning: str, absent: float | None = None) -> Metric:
    return Metric(name, unit, merge, meaning, Writer.POLICY, absent)


_DISTANCE = (
    _row(
        "mismatch/mismatch_kl",
        "nats",
        Merge.TOKENS,
        "KL of behavior and training policy by the estimator k1.",
    ),
    _row(
        "mismatch/mismatch_k3_kl",
        "nats",
        Merge.TOKENS,
        "KL of behavior and training policy by k3, which is never below 0.",
    ),
    _row(
        "mismatch/chi2_token", "", Merge.TOKENS, "Chi-squared divergence by the ratios of tokens."
    ),
    _row(
        "mismatch/chi2_seq",
        "",
        Merge.SEQUENCES,
        "Chi-squared divergence by the ratios of whole sequences.",
    ),
    _row(
        "mismatch/mismatch_training_ppl",
        "",
        Merge.SEQUENCES,
        "Perplexity under the training policy.",
    ),
    _row(
        "mismatch/mismatch_training_log_ppl",
        "nats",
        Merge.SEQUENCES,
        "Logarithm of the perplexity under the training policy.",
    ),
    _row(
        "mismatch/mismatch_rollout_ppl",
        "",
        Merge.SEQUENCES,
        "Perplexity under the behavior policy.",
    ),
    _row(
        "mismatch/mismatch_rollout_log_ppl",
        "nats",
        Merge.SEQUENCES,
        "Logarithm of the perplexity under the behavior policy.",
    ),
    _row(
        "mismatch/mismatch_log_ppl_diff",
        "nats",
        Merge.SEQUENCES,
        "Log-perplexity under the training policy less that under the behavior policy.",
    ),
    _row(
        "mismatch/mismatch_log_ppl_abs_diff",
        "nats",
        Merge.SEQUENCES,
        "Magnitude of a sequence's difference in log-perplexity.",
    ),
    _row(
        "mismatch/mismatch_log_ppl_diff_max",
        "nats",
        Merge.MAX,
        "The largest difference in log-perplexity of a sequence.",
    ),
    _row(
        "mismatch/mismatch_log_ppl_diff_min",
        "nats",
        Merge.MIN,
        "The smallest difference in log-perplexity of a sequence.",
    ),
    _row(
        "mismatch/mismatch_ppl_ratio",
        "",
        Merge.SEQUENCES,
        "Perplexity under the training policy divided by that under the other.",
    ),
    _row(
        "mismatch/nonfinite_sequence_fraction",
        "fraction",
        Merge.WHOLE,
        "Sequences with a log-probability that is not finite, which left the batch.",
    ),
    _row(
        "mismatch/sequence_eff_sample_size",
        "fraction",
        Merge.WHOLE,
        "ESS / B of the ratios of the B whole sequences, not bounded.",
    ),
)

WEIGHTS = (
    _row("mismatch/rollout_is_mean", "weight", Merge.TOKENS, "Mean weight."),
    _row(
        "mismatch/rollout_is_std",
        "weight",
        Merge.WHOLE,
        "Standard deviation of the weights within their bounds.",
    ),
    _row("mismatch/rollout_is_min", "weight", Merge.MIN, "The smallest weight."),
    _row("mismatch/rollout_is_max", "weight", Merge.MAX, "The largest weight."),
    _row(
        "mismatch/rollout_is_{percentile}",
        "weight",
        Merge.WHOLE,
        "Percentile of the weights, to half a percent if it is of several shards.",
    ),
    _row(
        "mismatch/rollout_is_eff_sample_size",
        "fraction",
        Merge.WHOLE,
        "1 / mean((w / mean w)^2): the share of the batch that effectively counts.",
    ),
    _row(
        "mismatch/rollout_is_applied_mean",
        "weight",
        Merge.WHOLE,
        "Mean weight after bound and veto.",
    ),
    _row(
        "mismatch/rollout_is_applied_eff_sample_size",
        "fraction",
        Merge.WHOLE,
        "Effective sample size after bound and veto.",
    ),
    _row(
        "mismatch/rollout_is_applied_zero_fraction",
        "fraction",
        Merge.TOKENS,
        "Tokens whose weight became 0.",
    ),
    _row(
        "mismatch/rollout_is_clipped_fraction",
        "fraction",
        Merge.TOKENS,
        "Tokens whose weight is outside its bounds.",
    ),
    _row(
        "mismatch/rollout_is_seq_clipped_fraction",
        "fraction",
        Merge.SEQUENCES,
        "Sequences with a token whose weight is outside its bounds.",
    ),
    _row(
        "mismatch/rollout_is_ratio_fraction_high",
        "fraction",
        Merge.LEVEL,
        "Weights above the upper bound.",
    ),
    _row(
        "mismatch/rollout_is_ratio_fraction_low",
        "fraction",
        Merge.LEVEL,
        "Weights below the lower bound.",
    ),
    _row(
        "mismatch/rollout_is_seq_mean",
        "weight",
        Merge.WHOLE,
        "Mean over the sequences of their mean weights.",
    ),
    _row(
        "mismatch/rollout_is_seq_std",
        "weight",
        Merge.WHOLE,
        "Standard deviation over the sequences of their mean weights.",
    ),
    _row(
        "mismatch/rollout_is_seq_max", "weight", Merge.MAX, "The largest mean weight of a sequence."
    ),
    _row(
        "mismatch/rollout_is_seq_min",
        "weight",
        Merge.MIN,
        "The smallest mean weight of a sequence.",
    ),
    _row(
        "mismatch/rollout_is_seq_max_deviation",
        "weight",
        Merge.MAX,
        "The largest distance of a sequence's mean weight from 1.",
    ),
    _row(
        "mismatch/rollout_is_seq_fraction_high",
        "fraction",
        Merge.SEQUENCES,
        "Sequences whose mean weight is above the upper bound.",
    ),
    _row(
        "mismatch/rollout_is_seq_fraction_low",
        "fraction",
        Merge.SEQUENCES,
        "Sequences whose mean weight is below the lower bound.",
    ),
    _row(
        "mismatch/rollout_is_catastrophic_token_fraction",
        "fraction",
        Merge.TOKENS,
        "Tokens whose ratio is below the veto threshold.",
    ),
    _row(
        "mismatch/rollout_is_veto_fraction",
        "fraction",
        Merge.SEQUENCES,
        "Sequences with a token below the veto threshold.",
    ),
    _row(
        "mismatch/rollout_is_batch_norm_factor",
        "weight",
        Merge.WHOLE,
        "What `batch_normalize` divides the weights by.",
    ),
)
"""Those that are left out where there are no weights."""

_REJECTION = (
    _row(
        "mismatch/rollout_rs_{rule}_mean",
        "",
        Merge.TOKENS,
        "Mean of the statistic that the rule tests.",
    ),
    _row(
        "mismatch/rollout_rs_{rule}_max",
        "",
        Merge.MAX,
        "The largest value of the statistic that the rule tests.",
    ),
    _row(
        "mismatch/rollout_rs_{rule}_min",
        "",
        Merge.MIN,
        "The smallest value of the statistic that the rule tests.",
    ),
    _row(
        "mismatch/rollout_rs_{token_rule}_fraction_high",
        "fraction",
        Merge.TOKENS,
        "Tokens above the rule's upper bound.",
    ),
    _row(
        "mismatch/rollout_rs_{token_rule}_fraction_low",
        "fraction",
        Merge.TOKENS,
        "Tokens below the rule's lower bound.",
    ),
    _row(
        "mismatch/rollout_rs_{sequence_rule}_fraction_high",
        "fraction",
        Merge.SEQUENCES,
        "Sequences above the rule's upper bound.",
    ),
    _row(
        "mismatch/rollout_rs_{sequence_rule}_fraction_low",
        "fraction",
        Merge.SEQUENCES,
        "Sequences below the rule's lower bound.",
    ),
    _row(
        "mismatch/rollout_rs_{rule}_masked_fraction",
        "fraction",
        Merge.TOKENS,
        "Tokens that the rule takes out.",
    ),
    _row(
        "mismatch/rollout_rs_{rule}_seq_masked_fraction",
        "fraction",
        Merge.SEQUENCES,
        "Sequences with a token that the rule takes out.",
    ),
    _row(
        "mismatch/rollout_rs_masked_fraction",
        "fraction",
        Merge.TOKENS,
        "Tokens that any rule takes out.",
    ),
    _row(
        "mismatch/rollout_rs_seq_masked_fraction",
        "fraction",
        Merge.SEQUENCES,
        "Sequences with a token that any rule takes out.",
    ),
    _row(
        "mismatch/second_moment",
        "nats^2",
        Merge.WHOLE,
        "Mean of d^2 over harmful tokens before any is masked.",
    ),
    _row(
        "mismatch/second_moment_masked_fraction",
        "fraction",
        Merge.WHOLE,
        "Tokens that `second_moment` masks.",
    ),
)

_BY_STALENESS = (
    _row(
        "mismatch/staleness_{staleness}/token_fraction",
        "fraction",
        Merge.WHOLE,
        "Share of the tokens that are of this staleness.",
        absent=0.0,
    ),
    _row(
        "mismatch/staleness_{staleness}/eff_sample_size",
        "fraction",
        Merge.WHOLE,
        "Effective sample size of the tokens of this staleness.",
    ),
    _row(
        "mismatch/staleness_{staleness}/kl",
        "nats",
        Merge.WHOLE,
        "KL by k1 of the tokens of this staleness.",
    ),
    _row(
        "mismatch/staleness_{staleness}/clipped_fraction",
        "fraction",
        Merge.WHOLE,
        "Of the tokens of this staleness those whose weight is outside its bounds.",
    ),
)


def _of_factor(factor: str, meaning: str) -> tuple[Metric, ...]:
    name = f"mismatch/{factor}"
    return (
        _row(f"{name}_kl", "nats", Merge.RESCORED, f"{meaning}, by k1."),
        _row(f"{name}_k3_kl", "nats", Merge.RESCORED, f"{meaning}, by k3, never below 0."),
        _row(
            f"{name}_bounded_fraction",
            "fraction",
            Merge.RESCORED,
            f"Tokens that `rollout_is.{factor}_threshold` bounds.",
        ),
    )


_SPLIT = (
    _row(
        "mismatch/rescored_frac",
        "fraction",
        Merge.TOKENS,
        "Tokens with a log-probability under the learner's weights of their sampling version.",
    ),
    *_of_factor("engine", "KL of engine and learner with the weights of the sampling version"),
    *_of_factor("lag", "KL of the learner at the sampling version and now"),
)

MISMATCH = (*_DISTANCE, *WEIGHTS, *_REJECTION, *_BY_STALENESS, *_SPLIT)
