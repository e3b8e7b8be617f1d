"""The mathematics of StreamRL: importance sampling, advantages, losses, KL, rewards.

Everything works on flat response tokens `[R]` and a `Sequences` of lengths, without padding or
masks. The modules, in the order in which a step uses them:

    reward_shaping  shape trajectory rewards, put them on tokens
    advantages      ADVANTAGES: gae, grpo, dr_grpo, rloo, reinforce_plus_plus, remax, opo, ...
    rollout_is      weights for stale or mismatched generation, and the metrics of the mismatch
    losses          POLICY_LOSSES: ppo, gspo, cispo, clip_cov, geo_mean, sapo, ...; aggregate
    objective       policy loss + KL + entropy + SFT, as the `algorithm:` section says, and the
                    proximal policy of the ratios
    logprobs, kl    log-probabilities, entropy and exact KL without the logits of a whole batch

docs/importance-sampling.md says which preset of `rollout_is` to choose and what to watch.
"""
