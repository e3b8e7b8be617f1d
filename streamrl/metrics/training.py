"""Rows of the learner's step: rewards, lengths, loss, updates, episodes, and the time of it all."""

from streamrl.metrics.metric import Merge, Metric, Unit, Writer


def _of_batch(name: str, unit: Unit, merge: Merge, meaning: str) -> Metric:
    return Metric(name, unit, merge, meaning, Writer.BATCH)


def _of_update(
    name: str, unit: Unit, merge: Merge, meaning: str, writer: Writer = Writer.POLICY
) -> Metric:
    return Metric(name, unit, merge, meaning, writer)


def _of_learner(name: str, unit: Unit, meaning: str) -> Metric:
    return Metric(name, unit, Merge.LAST, meaning, Writer.LEARNER)


_REWARD = (
    _of_batch("reward/mean", "reward", Merge.EPISODES, "Training reward of the step."),
    _of_batch("reward/std", "reward", Merge.WHOLE, "Standard deviation of the training reward."),
    _of_batch("reward/min", "reward", Merge.MIN, "Smallest training reward."),
    _of_batch("reward/max", "reward", Merge.MAX, "Largest training reward."),
    _of_batch(
        "reward/groups_alike_frac", "fraction", Merge.WHOLE, "Groups whose rewards are all alike."
    ),
    _of_batch(
        "reward/clipped_frac", "fraction", Merge.EPISODES, "Rewards that `reward.clip` bounds."
    ),
    _of_batch(
        "reward/overlong_penalty", "reward", Merge.EPISODES, "What `reward.length` subtracts."
    ),
    _of_batch("reward/kl", "nats", Merge.WHOLE, "KL to the reference in the reward, of a token."),
    _of_batch(
        "reward/teacher_kl",
        "nats",
        Merge.EPISODES,
        "KL to the teachers of `algorithm.distillation`, of a token of an episode.",
    ),
    _of_batch("reward/kl_coef", "", Merge.WHOLE, "What that KL is multiplied by."),
    Metric(
        "reward/{reward}/num_failures",
        "groups",
        Merge.SUM,
        "Groups that this reward did not score, in the generators that report.",
        Writer.GENERATOR,
    ),
    Metric(
        "reward/{reward}/{name}",
        "any",
        Merge.EPISODES,
        "What this reward measures beside its score.",
        Writer.GENERATOR,
    ),
    Metric("reward/{reward}", "reward", Merge.EPISODES, "Score of this reward.", Writer.GENERATOR),
)

_LENGTH = (
    _of_batch("response_length/mean", "tokens", Merge.EPISODES, "Length of a response."),
    _of_batch("response_length/max", "tokens", Merge.MAX, "Length of the longest response."),
    _of_batch("response_length/min", "tokens", Merge.MIN, "Length of the shortest response."),
    _of_batch(
        "response_length/clip_ratio", "fraction", Merge.EPISODES, "Responses that a limit cut."
    ),
    _of_batch(
        "response_length/deadline_ratio",
        "fraction",
        Merge.EPISODES,
        "Responses that a deadline cut.",
    ),
)

_ADVANTAGE = (
    _of_batch("advantage/mean", "advantage", Merge.TOKENS, "Advantage."),
    _of_batch("advantage/abs_mean", "advantage", Merge.TOKENS, "Magnitude of the advantage."),
)

_ACTOR = (
    _of_update("actor/loss", "", Merge.LOSS, "The whole objective."),
    _of_update("actor/pg_loss", "", Merge.LOSS, "The policy loss."),
    _of_update("actor/kl_loss", "nats", Merge.LOSS, "KL to the reference, without its factor."),
    _of_update("actor/entropy_bonus", "nats", Merge.LOSS, "Entropy, without its factor."),
    _of_update("actor/sft_loss", "nats", Merge.LOSS, "SFT on positives, without its factor."),
    _of_update("actor/entropy", "nats", Merge.TOKENS, "Entropy of the policy."),
    _of_update(
        "actor/ppo_kl", "nats", Merge.TOKENS, "KL of the policy from the proximal policy, by k1."
    ),
    _of_update("actor/pg_clipfrac", "fraction", Merge.TOKENS, "Tokens that the loss clips."),
    _of_update(
        "actor/pg_clipfrac_lower",
        "fraction",
        Merge.TOKENS,
        "Tokens that the second clip of a dual-clip loss changes.",
    ),
    _of_update(
        "actor/trained_token_frac",
        "fraction",
        Merge.TOKENS,
        "Part of the tokens that the loss counts which contribute to it.",
    ),
    _of_update(
        "actor/sampling_masked_token_frac",
        "fraction",
        Merge.TOKENS,
        "Tokens that were sampled among fewer than all, as `generator.keep_sampling_mask` records.",
    ),
    _of_update(
        "actor/sampling_mask_size",
        "candidates",
        Merge.TOKENS,
        "Candidates that a token was sampled among, 0 for one without a mask.",
    ),
)


_ROUTER = (
    _of_update(
        "router/mismatch_frac",
        "fraction",
        Merge.WHOLE,
        "Experts that the learner's routers take and the engine did not, of the tokens whose "
        "experts `algorithm.router_replay` records.",
    ),
    _of_update(
        "router/busiest_expert_share",
        "fraction",
        Merge.WHOLE,
        "Share of these tokens' choices that the busiest expert of a layer got, mean over layers; "
        "1 / experts if all get as many.",
    ),
    _of_update(
        "router/load_entropy",
        "fraction",
        Merge.WHOLE,
        "Entropy of the shares that a layer's experts got, over that of equal ones; mean over "
        "layers.",
    ),
)


def _of_optimizer(network: str, writer: Writer) -> tuple[Metric, ...]:
    return (
        _of_update(
            f"{network}/grad_norm",
            "",
            Merge.WHOLE,
            "Norm of the gradient before it is clipped; -1 if it was not finite.",
            writer,
        ),
        _of_update(f"{network}/lr", "", Merge.WHOLE, "Learning rate.", writer),
        _of_update(
            f"{network}/skipped_update",
            "updates",
            Merge.SUM,
            "Updates that changed nothing because the gradient was not finite.",
            writer,
        ),
    )


_CRITIC = (
    _of_update("critic/vf_loss", "", Merge.LOSS, "The value loss.", Writer.CRITIC),
    _of_update(
        "critic/vf_clipfrac",
        "fraction",
        Merge.TOKENS,
        "Values that the value loss clips.",
        Writer.CRITIC,
    ),
    *_of_optimizer("critic", Writer.CRITIC),
)

_UPDATES = (
    *_of_optimizer("learner", Writer.POLICY),
    _of_update(
        "learner/loss_scale",
        "",
        Merge.WHOLE,
        "What losses were multiplied by before their backward pass, with `learner.dtype: float16`.",
    ),
    _of_update(
        "learner/num_nonfinite_sequences",
        "sequences",
        Merge.SUM,
        "Trajectories that left the batch because a number of theirs was not finite.",
    ),
    _of_update(
        "learner/num_micro_batches", "micro-batches", Merge.SUM, "Micro-batches of one rank."
    ),
    _of_update(
        "learner/num_masked_updates",
        "updates",
        Merge.SUM,
        "Updates that were not made: masks, rejection and veto left no token to train.",
    ),
    _of_batch(
        "learner/num_updates",
        "updates",
        Merge.SUM,
        "Updates that were made, of `learner.epochs` times `learner.updates_per_batch`.",
    ),
)

_WORK = (
    _of_batch("learner/num_tokens", "tokens", Merge.SUM, "Tokens trained, prompts included."),
    _of_batch(
        "learner/tokens_per_s",
        "tokens/s",
        Merge.WHOLE,
        "Tokens trained in a second of computing, of all ranks.",
    ),
    _of_batch(
        "learner/num_long_trajectories",
        "sequences",
        Merge.SUM,
        "Trajectories above `learner.max_tokens_per_micro_batch`, in micro-batches of their own.",
    ),
    _of_batch("learner/num_parts", "parts", Merge.SUM, "Parts in which the batch was trained."),
    _of_batch("learner/train_s", "s", Merge.SUM, "Computing, without waits between parts."),
    _of_batch("learner/plan_s", "s", Merge.SUM, "Part of train_s: packing, of one rank."),
    _of_batch(
        "learner/score_s",
        "s",
        Merge.SUM,
        "Part of train_s: passes without gradient (reference, proximal policy, values).",
    ),
    _of_batch("learner/forward_s", "s", Merge.SUM, "Part of train_s: passes with gradient."),
    _of_batch("learner/backward_s", "s", Merge.SUM, "Part of train_s: backward passes."),
    _of_batch("learner/update_s", "s", Merge.SUM, "Part of train_s: the optimizer."),
    _of_batch(
        "learner/tflops_per_s",
        "10^12/s",
        Merge.WHOLE,
        "Operations of one rank by the model's own count.",
    ),
    _of_batch(
        "learner/mfu",
        "fraction",
        Merge.WHOLE,
        "Part of what the device computes at most, where that is known.",
    ),
)

_LOOP = (
    _of_learner(
        "learner/wait_s", "s", "Time that the learner waited for groups: long if they are too few."
    ),
    _of_learner("learner/wait_frac", "fraction", "Share of the step that the learner waited."),
    _of_learner(
        "learner/wait_due_s",
        "s",
        "Part of wait_s in which enough groups were finished, but not those that were due.",
    ),
    _of_learner("learner/step_s", "s", "From the end of one step to that of the next."),
    _of_learner(
        "learner/snapshot_s", "s", "Copying the weights that are published, since the last line."
    ),
    _of_learner(
        "learner/save_s", "s", "Copying the state for the checkpoint after the step before."
    ),
    _of_learner("learner/policy_version", "versions", "The version that this step made."),
    _of_learner("learner/stalls", "stalls", "Waits of `run.stall_s` or longer, so far."),
    _of_learner("learner/num_unsaved_steps", "steps", "Steps since the newest checkpoint."),
    _of_learner(
        "learner/num_passes",
        "",
        "Passes over the rows of all sources together; not a number unless all prompts are rows.",
    ),
    _of_learner("time_s", "s", "Unix time at the end of the step."),
    _of_learner("scaling/steps_per_s", "1/s", "Speed that was measured."),
    _of_learner(
        "scaling/steps_per_s_generator_added", "1/s", "Speed expected with one more generator."
    ),
    _of_learner(
        "scaling/steps_per_s_rank_added", "1/s", "Speed expected with one more learner rank."
    ),
    _of_learner(
        "scaling/num_generators_wanted",
        "generators",
        "Fewest from which on one more gains less than 3 %; twice as many as there are at most.",
    ),
    _of_learner(
        "scaling/free_cores",
        "",
        "Cores of the learner's machine beside one for each process of its launch that computes; "
        "not a number where GPUs compute.",
    ),
    _of_learner(
        "scaling/rest_frac",
        "fraction",
        "Share of the time in which neither generators nor learner are fully used: groups wait for "
        "rewards or environments, and no more are admitted.",
    ),
)


def _of_episode(name: str, unit: Unit, meaning: str) -> Metric:
    full_name = f"episode/{{environment}}/{name}"
    return Metric(full_name, unit, Merge.EPISODES, meaning, Writer.GENERATOR)


_EPISODE = (
    _of_episode("num_turns", "turns", "Completions of an episode."),
    _of_episode("num_tool_calls", "calls", "Sum of `Transition.num_tool_calls`."),
    _of_episode("num_segments", "contexts", "Contexts of an episode."),
    _of_episode(
        "num_observation_tokens", "tokens", "Tokens that an episode read, the prompt included."
    ),
    _of_episode("environment_wait_s", "s", "Time of an episode in `start` and `step`."),
    _of_episode(
        "num_invalid_turns", "turns", "Turns with `is_valid: false`, of episodes that have one."
    ),
    _of_episode(
        "greedy_reward", "reward", "Reward of the greedy response that a baseline asks for."
    ),
    _of_episode("tool/{tool}/num_calls", "calls", "Calls of this tool."),
    _of_episode("tool/{tool}/num_errors", "calls", "Calls of this tool that failed."),
    _of_episode("tool/{tool}/time_s", "s", "Time that calls of this tool took."),
    _of_episode("tool/num_unknown", "calls", "Calls of a tool that there is not."),
    _of_episode(
        "{name}", "any", "NAME of `Transition.metrics` or of a reward, of episodes that have it."
    ),
)

TRAINING = (
    *(*_REWARD, *_LENGTH, *_ADVANTAGE, *_ACTOR, *_ROUTER, *_CRITIC),
    *(*_UPDATES, *_WORK, *_LOOP, *_EPISODE),
)
