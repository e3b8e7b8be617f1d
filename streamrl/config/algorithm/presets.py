"""`algorithm.preset`: settings of an algorithm that were measured together, by name.

Invariant: what is given beside a preset goes before it, so a preset and its settings written out
are one configuration.
"""

from collections.abc import Mapping
from typing import Any

ALGORITHM_PRESETS: dict[str, Mapping[str, Any]] = {
    "stream": {
        "advantage": "opob",
        "loss": "vespo",
        "proximal": "behavior",
        "rollout_is": {"scale_lr": True},
    }
}
"""By name, fields of the section `algorithm`; docs/importance-sampling.md has the measurements."""


def with_preset(section: object) -> object:
    """The fields of a section with those of its preset under them."""
    if not isinstance(section, Mapping):
        return section
    preset = section.get("preset")
    known = ALGORITHM_PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    return {**known, **section}
