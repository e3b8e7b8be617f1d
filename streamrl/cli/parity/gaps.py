"""What measured gaps between engine and learner mean: the refusals, their causes, the tables."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from streamrl.config import RunConfig
from streamrl.types import GapStatistics, ParityReport

# A mean gap in nats that no precision explains.
_OTHER_MODEL = 0.5
_GROWS = 4.0


def complaints(config: RunConfig, reports: Sequence[ParityReport]) -> Iterator[str]:
    """A sentence for each gap above its threshold."""
    for report in reports:
        for name, limit, measured in (
            ("max_mean_gap", config.parity.max_mean_gap, report.overall.mean),
            ("max_gap", config.parity.max_gap, report.overall.max),
        ):
            # Not `measured > limit`: NaN is above every threshold.
            if limit is not None and not measured <= limit:
                yield (
                    f"parity.{name} is {limit:g} nats, and {measured:.3g} were measured over "
                    f"{report.overall.num_tokens} tokens between engine {report.engine} in "
                    f"{report.engine_dtype} and the learner in {report.learner_dtype}; likely: "
                    + ", or ".join(likely_causes(config, report))
                )


def likely_causes(config: RunConfig, report: ParityReport) -> Iterator[str]:
    """The causes that the configuration and the shape of the gap suggest."""
    generator, (first, *_, last) = config.generator, (*report.by_position, report.by_position[-1])
    if not report.overall.mean <= _OTHER_MODEL:
        yield "engine and learner do not have the same weights or the same tokens (model.path)"
    for setting in generator.truncations:
        yield f"{setting} cuts off the sampled distribution (set generator.keep_sampling_mask)"
    if report.engine_dtype != report.learner_dtype:
        yield (f"generator.dtype {report.engine_dtype} is not learner.dtype {report.learner_dtype}")
    if generator.engine_kwargs:
        yield f"generator.engine_kwargs ({', '.join(generator.engine_kwargs)})"
    if last.mean > _GROWS * first.mean:
        yield "positions (the gap grows with them: rotary scaling, precision of the KV cache)"
    yield "other kernels than the learner's (attention, LM head)"


def tables(reports: Sequence[ParityReport]) -> Iterator[Table]:
    """One table over all positions, a row a precision; then one a precision, by position."""
    yield _table(
        "engine and learner",
        ("engine", "learner"),
        [((f"{r.engine} {r.engine_dtype}", r.learner_dtype), r.overall) for r in reports],
    )
    for report in reports:
        yield _table(
            f"{report.engine} {report.engine_dtype}, by position in the response",
            ("positions",),
            [((f"{bin.first}-{bin.last}",), bin) for bin in report.by_position],
        )


def _table(
    title: str,
    names: Sequence[str],
    rows: Sequence[tuple[Sequence[str], GapStatistics]],
) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in names:
        table.add_column(name)
    for name in ("tokens", "mean gap", "p99", "max", "ratio error", "k3 KL"):
        table.add_column(name, justify="right")
    for labels, gaps in rows:
        numbers = (gaps.mean, gaps.p99, gaps.max, gaps.ratio_error, gaps.k3_kl)
        table.add_row(*labels, str(gaps.num_tokens), *(f"{number:.2e}" for number in numbers))
    return table
