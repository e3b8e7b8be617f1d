"""Why a run does not go on: from a reading of it to sentences that name the cause.

Pure: no clock, no input or output. The learner logs a diagnosis when a step waits longer than
`run.stall_s`; `streamrl status` prints one at any time.

Invariant: no finding means that nothing is wrong, or not for long enough to say so. A new cause is
a function of a reading and a line in `streamrl.diagnosis.causes.CAUSES`.
"""

from msgspec import Struct

from streamrl.diagnosis.causes import CAUSES
from streamrl.diagnosis.reading import Reading

__all__ = ["Finding", "Reading", "diagnose"]


class Finding(Struct, frozen=True):
    """`cause` is a name in `CAUSES`, for programs; `sentence` is for people."""

    cause: str
    sentence: str


def diagnose(reading: Reading) -> tuple[Finding, ...]:
    """What is wrong, in the order of `CAUSES`; () if nothing is."""
    return tuple(
        Finding(cause, sentence) for cause, find in CAUSES.items() for sentence in find(reading)
    )
