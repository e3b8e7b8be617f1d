"""The table of an ablation of two axes: final reward by row and column, and its share of the first.

The first cell is the reference, such as no correction at lag 0, which is on policy.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev

from streamrl.cli.ablation.variants import Axis


def grid(axes: Sequence[Axis], rewards: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """The lines of the table; `rewards` are those of each seed, by the name of the combination."""
    rows, columns = axes
    reference = fmean(rewards[name_of(rows.variants[0].name, columns.variants[0].name)])
    names = [column.name for column in columns.variants]
    yield f"| final reward (spread), % of the first | {' | '.join(names)} |"
    yield "|---" * (1 + len(names)) + "|"
    for row in rows.variants:
        cells = (_cell(rewards[name_of(row.name, name)], reference) for name in names)
        yield f"| {row.name} | {' | '.join(cells)} |"


def name_of(*names: str) -> str:
    """Of a combination."""
    return ", ".join(names)


def _cell(rewards: Sequence[float], reference: float) -> str:
    spread = stdev(rewards) if len(rewards) > 1 else 0.0
    share = f"{100 * fmean(rewards) / reference:.0f} %" if reference else "-"
    return f"{fmean(rewards):.3f} ({spread:.3f}), {share}"
