"""Why a run does not proceed: turns a reading of the run into sentences that name the cause.

Pure: no clock, no input or output. The learner logs a diagnosis when a step waits longer than
`run.stall_s`; `streamrl status` prints one at any time.

Invariant: no finding means that nothing is wrong, or not for long enough to say so. `pending` lists
what the run needs and does not have yet; a run with neither is healthy. A new cause is a function
of a reading and a line in `streamrl.diagnosis.causes.CAUSES`.
"""

from streamrl.diagnosis.causes import found_in, lasting_wait
from streamrl.diagnosis.reading import Reading as Reading
from streamrl.findings import Finding, Severity

_ABSENCES = ("no_generator", "generator_silent", "nothing_leased", "left_out")


def diagnose(reading: Reading) -> tuple[Finding, ...]:
    """Return what is wrong, in the order of `CAUSES`; () if nothing is."""
    return tuple(one for one in found_in(reading) if one.severity is Severity.PROBLEM)


def pending(reading: Reading) -> tuple[Finding, ...]:
    """Return what the run needs and lacks, if that is because a process is starting or a person
    asked for it; () if nothing is missing."""
    return tuple(one for one in found_in(reading) if one.severity is Severity.WARNING)


def waits_for(reading: Reading) -> str:
    """Return what the learner waits for, as a sentence: what is absent, or else the group that is
    due (or its generator's missing weights); "" if it only waits for groups being sampled."""
    if reading.stats is None or reading.is_over:
        return ""
    found = pending(reading) + diagnose(reading)
    absent = (one.sentence for one in found if one.cause in _ABSENCES)
    return next(absent, "") or lasting_wait(reading.stats)
