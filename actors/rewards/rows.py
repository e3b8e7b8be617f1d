"""Whether a built-in reward can score a row at all; `streamrl check` asks it of the first ones."""

from actors.rewards.builtin import number_to_match
from actors.rewards.checks import checked
from actors.rewards.gold import expression_to_match, text_to_match
from streamrl.config.data import RewardSettings
from streamrl.interfaces import Prompt


def check_row(settings: RewardSettings, prompt: Prompt, kwargs_field: str) -> None:
    """Asks what the reward itself asks before it scores.

    Args:
        kwargs_field: the setting that has its arguments.

    Raises:
        RolloutError: whatever a response is, its group would fail.
        ConfigError: the arguments are not those of the reward.
    """
    match settings.reward:
        case "exact_match":
            text_to_match(prompt)
        case "numeric_answer":
            number_to_match(prompt)
        case "math":
            expression_to_match(prompt)
        case "code" | "sandbox_fusion":
            # Not above: other rewards do without a sandbox.
            from actors.rewards.code.reward import Code, SandboxFusion, check_tests

            is_local = settings.reward == "code"
            section = Code.Settings if is_local else SandboxFusion.Settings
            arguments = checked(kwargs_field, section, settings.kwargs)
            check_tests(arguments, prompt, is_local=is_local)
