"""The mathematics of StreamRL: importance sampling, advantages, losses, KL, rewards.

Everything works on flat response tokens `[R]` and a `Sequences` of lengths; nothing is padded, and
no formula has a mask. The modules, in the order a step uses them:

    rewards      shape trajectory rewards, put them on tokens
    advantages   ADVANTAGES: gae, grpo, dr_grpo, rloo, reinforce_plus_plus, remax, opo, ...
    proximal     the policy that ratios are taken to: recompute, behavior, loglinear or linear
    rollout_is   weights for stale or mismatched generation, and the metrics of the mismatch
    losses       POLICY_LOSSES: ppo, gspo, cispo, clip_cov, geo_mean, sapo, vespo, ...; aggregate;
                 LOSS_SETTINGS and ADVANTAGE_SETTINGS name the record of numbers of each
    objective    policy loss + KL + entropy + SFT, as the `algorithm:` section asks
    logprobs, kl log-probabilities, entropy and exact KL without the logits of a whole batch

Which rollout-IS preset to take (`algorithm: {rollout_is: <preset>}`) where the default, which is
`algorithm: {preset: stream}`, is not wanted:

    token_is        for little lag: every token's ratio, capped at 2; keeps all data, little bias
    token_is_veto   the same, and drops sequences with a token the learner finds all but impossible:
                    for quantized or otherwise mismatched engines
    sequence_is     the whole sequence's ratio, capped: less bias, more variance; short responses
    sequence_clip   drops sequences outside [1/2, 2]: for long staleness, when truncation drifts
    geometric_clip  drops sequences whose mean ratio per token leaves [1/1.01, 1.01]: strict, for
                    long responses, where a product of ratios over- or underflows
    icepop          zeroes tokens outside [0.5, 5]: for mixture-of-experts models, whose routers
                    differ between engine and learner
    m2po            masks the harmful tokens with the largest ratios until the batch's second moment
                    is small; no other bound: for lag of many versions
    vcpo            the whole sequence's ratio, capped at 8, and a learning rate that falls with the
                    effective sample size; advantage opob belongs to it
    metrics_only    changes nothing and reports everything: run it before you choose
    off             no weights, no metrics

What to watch (all under `mismatch/`), and what to do about it:

    rollout_is_eff_sample_size           above 0.8; below, raise the threshold or cut max_staleness
    rollout_is_mean                      near 1; drifting away means the engines disagree
    rollout_is_veto_fraction             below 0.05, rollout_is_catastrophic_token_fraction below
                                         0.01; above, look for a wrong temperature, template, dtype
    rollout_is_applied_eff_sample_size   what is left after bound and veto: how much data counts
    staleness_0/kl                       what the engine costs; the other buckets: what lag costs
    nonfinite_sequence_fraction          must be 0

The behavior log-probabilities must be those of the distribution sampled from: with temperature,
top-p or top-k the learner must apply the same temperature, and cannot undo a truncation.

Global denominators: a loss of one micro-batch divides by `BatchTotals` of the whole step, and a
metric is its share of the whole, so both add up over micro-batches and ranks.
"""
