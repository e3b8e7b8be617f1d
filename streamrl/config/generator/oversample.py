"""`generator.oversample`: more siblings than are trained."""

from typing import Literal

from streamrl.config.numbers import NotNegative
from streamrl.config.section import Section


class OversampleSettings(Section):
    """Siblings that are sampled beyond `group_size`, and which of them all are kept."""

    num_siblings: NotNegative = 0
    """Siblings beyond `group_size`; 0 is none."""
    keep: Literal["each_reward", "first_finished"] = "each_reward"
    """`each_reward` waits for all and keeps the first of each reward, then the second of each, in
    the order in which they were begun, which says nothing about their lengths. `first_finished`
    cancels the others, which are the long ones."""
