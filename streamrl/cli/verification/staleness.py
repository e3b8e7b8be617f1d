"""How far the tokens that a step trained were from its version, by the lines of trained.jsonl.

Step s trains version s - 1. Each line has the oldest and the newest version of the step's tokens,
and the bound that held for it: a run may be resumed with another one. Lines of a release that wrote
no versions are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamrl.types import OverduePolicy


def staleness_faults(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each step with a token that the bound excludes."""
    for line in _known(lines):
        version, bound = line["step"] - 1, line["max_staleness"]
        oldest, newest = line["oldest_version"], line["newest_version"]
        of = f"step {line['step']} trained version {version} with tokens of version"
        if version - oldest > bound and line["overdue"] != OverduePolicy.TRAIN:
            yield f"{of} {oldest}, {version - oldest} behind; buffer.max_staleness was {bound}"
        if newest - version > bound:
            yield f"{of} {newest}, {newest - version} ahead; buffer.max_staleness was {bound}"


def staleness_finding(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The furthest tokens of all steps, either way, in a line; none without versions."""
    known = list(_known(lines))
    if not known:
        return
    behind = max(line["step"] - 1 - line["oldest_version"] for line in known)
    ahead = max(line["newest_version"] - line["step"] + 1 for line in known)
    bounds = ", ".join(str(bound) for bound in sorted({line["max_staleness"] for line in known}))
    yield (
        f"tokens were at most {max(0, behind)} versions behind the one that trained them and "
        f"{max(0, ahead)} ahead of it, in {len(known)} steps; buffer.max_staleness {bounds}"
    )


def _known(lines: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (line for line in lines if "newest_version" in line)
