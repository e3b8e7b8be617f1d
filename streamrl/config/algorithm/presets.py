"""`algorithm.preset`: settings of an algorithm that were measured together, by name.

Invariant: what is given beside a preset goes before it, so a preset and its settings written out
are one configuration; one beside which all of it is given otherwise is refused.
"""

from collections.abc import Mapping
from typing import Any, Final

ALGORITHM_PRESETS: dict[str, Mapping[str, Any]] = {
    "stream": {
        "advantage": "opob",
        "loss": "vespo",
        "proximal": "behavior",
        "rollout_is": {"scale_lr": True},
    }
}
"""By name, fields of the section `algorithm`; docs/importance-sampling.md has what they keep."""
DEFAULT_PRESET: Final = "stream"
CHOICES: Final = ("advantage", "advantage_config", "loss", "loss_config", "proximal", "rollout_is")
"""What a preset stands for."""


def with_preset(section: object) -> object:
    """The fields of a section with those of its preset under them.

    Without one it is the default, unless one of CHOICES is given.

    Raises:
        ValueError: nothing of the preset is left.
    """
    if not isinstance(section, Mapping):
        return section
    preset = section.get("preset", DEFAULT_PRESET)
    if not isinstance(preset, str) or preset not in ALGORITHM_PRESETS:
        return section
    if "preset" not in section and any(name in section for name in CHOICES):
        return {"preset": None, **section}
    ours = ALGORITHM_PRESETS[preset]
    if all(name in section and _is_replaced(ours[name], section[name]) for name in ours):
        raise ValueError(
            f"algorithm.preset: was {preset}, and {', '.join(ours)} are all set to something else, "
            "so it cannot act; leave them out, or set it to null"
        )
    return {**ours, **{name: _within(ours.get(name), value) for name, value in section.items()}}


def _within(ours: Any, given: Any) -> Any:
    """What is given for a setting; of a record, with the preset's other keys."""
    both = isinstance(ours, Mapping) and isinstance(given, Mapping)
    return {**ours, **given} if both else given


def _is_replaced(ours: Any, given: Any) -> bool:
    """Whether nothing of the preset's value is left beside what is given."""
    if isinstance(ours, Mapping) and isinstance(given, Mapping):
        return all(key in given and given[key] != value for key, value in ours.items())
    return bool(given != ours)
