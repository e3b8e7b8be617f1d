"""Whether a setting that was given can act in this run: nothing else tells that it does not."""

from collections.abc import Iterator

from streamrl.cli.preflight.findings import Finding, problem
from streamrl.config import RunConfig


def check_effects(config: RunConfig) -> Iterator[Finding]:
    """Settings that nothing reads beside the others of this configuration."""
    generator, reward = config.generator, config.algorithm.reward
    if generator.device != "auto" and generator.engine != "hf" and not generator.vllm.url:
        yield problem(
            f"generator.device: was {generator.device!r}, and {generator.engine} takes the devices "
            "that it finds; CUDA_VISIBLE_DEVICES limits them"
        )
    environments = {entry.environment for entry in config.entries}
    if reward.format_penalty and environments == {"single_turn"}:
        yield problem(
            f"algorithm.reward.format_penalty: was {reward.format_penalty:g}, and environment "
            "single_turn has no form that a turn could break, so it counts no invalid turns; the "
            "others do"
        )
    is_alone = len(config.entries) == 1
    if is_alone and reward.agentic is not None and reward.agentic.grouping == "inductive":
        yield problem(
            "algorithm.reward.agentic.grouping: was 'inductive', which compares the episodes of "
            "one environment, and this run has one: batch does the same"
        )
