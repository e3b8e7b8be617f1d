"""Why a run does not go on: from a reading of it to sentences that name the cause.

Pure: no clock, no input or output. The learner logs a diagnosis when a step waits longer than
`run.stall_s`; `streamrl status` prints one at any time.

Invariant: no finding means that nothing is wrong, or not for long enough to say so; what the run
needs and has not yet is `pending`, and it is healthy if there is neither. A new cause is a function
of a reading and a line in `streamrl.diagnosis.causes.CAUSES`.
"""

from streamrl.diagnosis.causes import found_in, lasting_wait
from streamrl.diagnosis.reading import Reading as Reading
from streamrl.findings import Finding, Severity

_ABSENCES = ("no_generator", "generator_silent", "nothing_leased", "left_out")


def diagnose(reading: Reading) -> tuple[Finding, ...]:
    """What is wrong, in the order of `CAUSES`, which name the causes; () if nothing is."""
    return tuple(one for one in found_in(reading) if one.severity is Severity.PROBLEM)


def pending(reading: Reading) -> tuple[Finding, ...]:
    """What the run needs and has not, for no longer than a start takes or since a person has said
    so; () if all is there."""
    return tuple(one for one in found_in(reading) if one.severity is Severity.WARNING)


def waits_for(reading: Reading) -> str:
    """What a learner waits for, as a sentence: what is absent, or a generator without weights, or
    else the group that is due; "" if it is groups that are being sampled."""
    if reading.stats is None or reading.is_over:
        return ""
    found = pending(reading) + diagnose(reading)
    absent = (one.sentence for one in found if one.cause in _ABSENCES)
    return next(absent, "") or lasting_wait(reading.stats)
