"""`algorithm.preset`: settings of an algorithm that were measured together, by name.

Invariant: what is given beside a preset goes before it, so a preset and its settings written out
are one configuration.
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
"""By name, fields of the section `algorithm`; docs/importance-sampling.md has the measurements."""
DEFAULT_PRESET: Final = "stream"
_CHOICES = ("advantage", "advantage_config", "loss", "loss_config", "proximal", "rollout_is")


def with_preset(section: object) -> object:
    """The fields of a section with those of its preset under them.

    Without one it is the default, unless one of _CHOICES is given.
    """
    if not isinstance(section, Mapping):
        return section
    preset = section.get("preset", DEFAULT_PRESET)
    if not isinstance(preset, str) or preset not in ALGORITHM_PRESETS:
        return section
    if "preset" not in section and any(name in section for name in _CHOICES):
        return {"preset": None, **section}
    ours = ALGORITHM_PRESETS[preset]
    return {**ours, **{name: _within(ours.get(name), value) for name, value in section.items()}}


def _within(ours: Any, given: Any) -> Any:
    """What is given for a setting; of a record, with the preset's other keys."""
    both = isinstance(ours, Mapping) and isinstance(given, Mapping)
    return {**ours, **given} if both else given
