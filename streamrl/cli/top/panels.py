"""A snapshot in a terminal: two columns of panels where there is room for them, one where not.

Pure: nothing is read here. What is not known is left out, and the last lines say why.
"""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from streamrl.cli.display.generators import generator_table
from streamrl.cli.display.numbers import duration, short, sparkline
from streamrl.cli.top.snapshot import RunSnapshot, StepTime
from streamrl.samples.record import printable

WIDE = 120
_NARROW_BAR, _MAX_FINDINGS, _FEW_GENERATORS = 24, 4, 6
_LEFT = ("reward", "groups", "staleness")
_STYLES = {"wait": "yellow", "forward": "green", "backward": "cyan", "update": "blue"}


def render(snapshot: RunSnapshot, width: int, sample: RenderableType | None = None) -> Group:
    """The whole screen, most important first; lines beyond the screen's height are cut off."""
    table = generator_table(snapshot.generators, is_narrow=width < WIDE)
    generators = [_panel("generators", table)] if snapshot.generators else []
    panels = list(_panels(snapshot, width))
    shown = [_in_two_columns(panels)] if width >= WIDE else panels
    # Many of them would leave no lines for the rest.
    few = len(snapshot.generators) <= _FEW_GENERATORS
    parts: list[RenderableType] = [*_head(snapshot)]
    parts += [*generators, *shown] if few else [*shown, *generators]
    if sample is not None:
        parts.append(sample)
    parts += [Text(f"not known: {sentence}", style="dim") for sentence in snapshot.unknown]
    return Group(*parts)


def _head(snapshot: RunSnapshot) -> Iterator[RenderableType]:
    eta = "" if snapshot.eta_s is None else f", ETA {duration(snapshot.eta_s)}"
    speed = "" if snapshot.steps_per_s is None else f", {short(snapshot.steps_per_s)} steps/s"
    yield Text(f"{snapshot.headline}{speed}{eta}", style="bold")
    for finding in snapshot.findings[:_MAX_FINDINGS]:
        yield Text(printable(f"! {finding.sentence}"), style="red")
    if rest := snapshot.findings[_MAX_FINDINGS:]:
        yield Text(f"! {len(rest)} other findings: streamrl status", style="red")
    waiting = "starting" if snapshot.state == "starting" else "waiting"
    for absence in snapshot.pending:
        yield Text(printable(f"{waiting}: {absence.sentence}"), style="yellow")
    if not (snapshot.findings or snapshot.pending):
        healthy = snapshot.outcome or ("healthy" if snapshot.state == "running" else snapshot.state)
        doing = f"; the learner {snapshot.learner}" if snapshot.learner else ""
        yield Text(healthy + ("" if snapshot.outcome else doing), style="green")
    for note in snapshot.notes:
        yield Text(printable(note))


def _panels(snapshot: RunSnapshot, width: int) -> Iterator[Panel]:
    inside = (width // 2 if width >= WIDE else width) - 4
    if snapshot.rewards:
        yield _panel("reward", _reward(snapshot, inside))
    if snapshot.step_time is not None:
        yield _panel(f"step time, {snapshot.num_steps} steps", _step_time(snapshot.step_time))
    if snapshot.books is not None:
        yield _panel("groups", _books(snapshot))
    if snapshot.staleness is not None:
        yield _panel(f"staleness, {snapshot.num_steps} steps", _staleness(snapshot))
    if snapshot.mismatch:
        numbers = (f"{name} {short(value)}" for name, value in snapshot.mismatch.items())
        yield _panel("importance sampling", Text(", ".join(numbers)))
    if any(rate is not None for rate in _rates(snapshot).values()) or snapshot.scaling:
        yield _panel("throughput", Text("\n".join(_throughput(snapshot))))


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", padding=(0, 1))


def _in_two_columns(panels: Sequence[Panel]) -> Table:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    left = [panel for panel in panels if str(panel.title).startswith(_LEFT)]
    grid.add_row(Group(*left), Group(*(panel for panel in panels if panel not in left)))
    return grid


def _reward(snapshot: RunSnapshot, width: int) -> RenderableType:
    mean = "" if snapshot.reward is None else f"{snapshot.reward:.3f} in {snapshot.num_steps} steps"
    return Group(Text(mean), Text(sparkline(snapshot.rewards, max(8, width)), no_wrap=True))


def _step_time(time: StepTime) -> RenderableType:
    table = _bars()
    for part, seconds in sorted(time.parts.items(), key=lambda item: -item[1]):
        share = seconds / time.step_s
        due = f", {time.wait_due_s:.2f} s for due groups"
        due = due if part == "wait" and time.wait_due_s >= 0.005 else ""
        table.add_row(part, _bar(share, _STYLES.get(part, "white")), f"{seconds:.3f} s{due}")
    return Group(Text(f"{time.step_s:.3f} s a step"), table)


def _books(snapshot: RunSnapshot) -> RenderableType:
    books = snapshot.books
    assert books is not None, "it is shown where there are books"
    in_flight = books.leased + books.buffered + books.taken
    most = "" if books.capacity is None else f" of {books.capacity} at most"
    dropped = ", ".join(f"{count} {reason}" for reason, count in books.dropped.items() if count)
    return Group(
        Text(
            f"{in_flight} in flight{most}: {books.leased} leased, {books.buffered} buffered, "
            f"{books.taken} taken"
        ),
        Text(f"{books.trained + books.acknowledged} trained, {dropped or 'none'} dropped"),
        Text("the books close") if books.balanced else Text("THE BOOKS DO NOT CLOSE", style="red"),
    )


def _staleness(snapshot: RunSnapshot) -> RenderableType:
    staleness = snapshot.staleness
    assert staleness is not None, "it is shown where there is some"
    counts = staleness.num_groups
    filled = [i for i, count in enumerate(counts.values()) if count]
    table = _bars()
    total = max(1, sum(counts.values()))
    for name, count in list(counts.items())[: max(filled, default=-1) + 1]:
        label = name.replace("_plus", "+").replace("_", "-")
        table.add_row(label, _bar(count / total, "magenta"), f"{count} groups")
    mean = "" if staleness.mean is None else f"mean {staleness.mean:.2f}, "
    return Group(Text(f"{mean}largest {staleness.max:g} versions"), table)


def _bars() -> Table:
    table = Table.grid(padding=(0, 1))
    for _ in range(2):
        table.add_column(no_wrap=True)
    return table


def _bar(share: float, style: str) -> Text:
    num_full = round(min(1.0, max(0.0, share)) * _NARROW_BAR)
    return Text(f"{'█' * num_full:<{_NARROW_BAR}} {100 * share:3.0f} %", style=style)


def _rates(snapshot: RunSnapshot) -> dict[str, float | None]:
    return {
        "generated": snapshot.generated_tokens_per_s,
        "trained": snapshot.trained_tokens_per_s,
    }


def _throughput(snapshot: RunSnapshot) -> Iterator[str]:
    rates = {name: rate for name, rate in _rates(snapshot).items() if rate is not None}
    if rates:
        yield ", ".join(f"{short(rate)} tokens/s {name}" for name, rate in rates.items())
    if snapshot.scaling is not None:
        yield snapshot.scaling.sentence
