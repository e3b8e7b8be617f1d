"""Whether a setting that was given can act in this run: nothing else tells that it does not."""

from collections.abc import Iterator

from streamrl.cli.preflight.findings import Finding, problem
from streamrl.config import RunConfig
from streamrl.user_code import is_user_code


def check_effects(config: RunConfig) -> Iterator[Finding]:
    """Settings that nothing reads beside the others of this configuration."""
    generator, reward = config.generator, config.algorithm.reward
    if generator.device != "auto" and generator.engine != "hf" and not generator.vllm.url:
        yield problem(
            f"generator.device: was {generator.device!r}, and {generator.engine} takes the devices "
            "that it finds; CUDA_VISIBLE_DEVICES limits them"
        )
    if reward.format_penalty and not is_user_code(generator.environment):
        yield problem(
            f"algorithm.reward.format_penalty: was {reward.format_penalty:g}, and "
            f"generator.environment {generator.environment} counts no invalid turns; one of your "
            "own that returns the metric num_invalid_turns does"
        )
    if reward.agentic is not None and reward.agentic.grouping == "inductive":
        yield problem(
            "algorithm.reward.agentic.grouping: was 'inductive', which compares the episodes of "
            "one environment, and a run has one: batch does the same"
        )
