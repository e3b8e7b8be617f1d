"""`streamrl parity`: runs the same tokens through engine and learner, and measures how far they
disagree.

    --sample    the engine samples prompts of the run, once for each precision asked for
    --score     the learner scores those very tokens, as a training step does
    here        the table, parity.json, the verdict

Engine and learner run one after the other in separate processes, so one GPU suffices. The halves
can be run separately, for an engine in an environment without the learner, and for tokens of any
origin (`--model`, see `streamrl.cli.parity.score`).

    0  below the thresholds, or there are none      1  above one: the sentence says which and why
"""

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from streamrl import wire
from streamrl.cli.main import import_command
from streamrl.cli.processes.command import call
from streamrl.config import RunConfig, to_yaml
from streamrl.config.loading.load import configuration
from streamrl.errors import ConfigError, StreamRLError
from streamrl.types import GapStatistics, ParityReport

# A mean gap in nats that no precision explains.
_OTHER_MODEL = 0.5
_GROWS = 4.0


def complaints(config: RunConfig, reports: Sequence[ParityReport]) -> Iterator[str]:
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
    """Yield the causes that the configuration and the shape of the gap suggest."""
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
    """Yield a table over all positions with a row for each precision; then one by position for each
    precision."""
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
    title: str, names: Sequence[str], rows: Sequence[tuple[Sequence[str], GapStatistics]]
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


REPORT_FILE = "parity.json"


def main(arguments: argparse.Namespace) -> int:
    _require_together(arguments)
    if arguments.model is not None:
        import_command("streamrl.cli.parity.score").score_sequences(arguments)
        return 0
    config = configuration(arguments).config
    if arguments.sample is not None:
        samples = asyncio.run(import_command("actors.parity").sample(config))
        file = Path(arguments.sample)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(wire.encode(samples))
        return 0
    if arguments.score is not None:
        score = import_command("streamrl.cli.parity.score")
        score.score_samples(config, arguments.score, Path(arguments.out))
        return 0
    dtypes = (arguments.dtypes or config.generator.dtype).split(",")
    folder = Path(arguments.out or config.run.path)
    console = Console(soft_wrap=True)
    reports = measure(config, dtypes, folder)
    for table in tables(reports):
        console.print(table)
    console.print(f"{folder / REPORT_FILE}: all gaps in nats", highlight=False)
    _refuse(config, reports)
    return 0


def _require_together(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an option without the others that it needs, or with ones that it
    excludes."""
    if arguments.score is not None and arguments.out is None:
        raise ConfigError("--score: needs --out, the file to write")
    if arguments.model is None:
        return
    if arguments.score is None or len(arguments.score) != 1:
        raise ConfigError("--model: needs --score with one file, the sequences to score")
    if arguments.file is not None or arguments.config is not None or arguments.overrides:
        raise ConfigError("--model: takes the place of CONFIG and --set")


def require_parity(config: RunConfig, console: Console) -> None:
    """Measure before a launch, with the weights of `model.path` even if the run resumes from a
    checkpoint: it is the code that differs, not the weights.

    Raises:
        StreamRLError: a gap exceeds its threshold; the run must not start.
    """
    console.print("comparing engine and learner (streamrl parity)")
    reports = measure(config, [config.generator.dtype], config.run.path)
    _refuse(config, reports)
    overall = reports[0].overall
    console.print(f"they agree: mean gap {overall.mean:.2g} nats, largest {overall.max:.2g}")


def measure(config: RunConfig, dtypes: Sequence[str], folder: Path) -> tuple[ParityReport, ...]:
    """Measure: one report for each precision of the engine, also written to parity.json in the
    folder."""
    scratch = folder / "parity"
    scratch.mkdir(parents=True, exist_ok=True)
    file = scratch / "config.yaml"
    file.write_text(to_yaml(config))
    given = ("--config", str(file))
    if config.model.missing is not None:
        call("get-model", *given)
    samples = [str(scratch / f"{config.generator.engine}-{dtype}.samples") for dtype in dtypes]
    for dtype, path in zip(dtypes, samples, strict=True):
        call("parity", *given, "--set", f"generator.dtype={dtype}", "--sample", path)
    report = folder / REPORT_FILE
    call("parity", *given, "--score", *samples, "--out", str(report))
    reports = msgspec.json.decode(report.read_bytes())["reports"]
    return msgspec.convert(reports, tuple[ParityReport, ...])


def _refuse(config: RunConfig, reports: Sequence[ParityReport]) -> None:
    if sentences := list(complaints(config, reports)):
        raise StreamRLError("; ".join(sentences))
