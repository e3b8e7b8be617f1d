"""`streamrl parity`: the same tokens through engine and learner, and how far they disagree.

    parity sample    the engine samples prompts of the run, once for each precision asked for
    parity score     the learner scores those very tokens, as a training step does
    here             the table, parity.json, the verdict

Engine and learner run one after the other in processes of their own, so that one GPU suffices.

    0  below the thresholds, or there are none      1  above one: the sentence says which and why
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from streamrl.cli.parity.gaps import complaints, tables
from streamrl.cli.processes.command import call
from streamrl.config import RunConfig, to_yaml
from streamrl.config.arguments import configuration
from streamrl.errors import StreamRLError
from streamrl.types import ParityReport

REPORT_FILE = "parity.json"


def main(arguments: argparse.Namespace) -> int:
    arguments.overrides += [
        f"parity.{name}={value}"
        for name in ("num_prompts", "max_mean_gap", "max_gap")
        if (value := getattr(arguments, name)) is not None
    ]
    config = configuration(arguments).config
    dtypes = (arguments.dtypes or config.generator.dtype).split(",")
    folder = Path(arguments.out or config.run.path)
    console = Console(soft_wrap=True)
    reports = measure(config, dtypes, folder)
    for table in tables(reports):
        console.print(table)
    console.print(f"{folder / REPORT_FILE}: all gaps in nats", highlight=False)
    _refuse(config, reports)
    return 0


def require_parity(config: RunConfig, console: Console) -> None:
    """Measure before a launch, with the weights of `model.path`, also where the run resumes from a
    checkpoint: what differs is the code that runs them.

    Raises:
        StreamRLError: a gap is above its threshold; the run must not start.
    """
    console.print("comparing engine and learner (streamrl parity)")
    reports = measure(config, [config.generator.dtype], config.run.path)
    _refuse(config, reports)
    overall = reports[0].overall
    console.print(f"they agree: mean gap {overall.mean:.2g} nats, largest {overall.max:.2g}")


def measure(config: RunConfig, dtypes: Sequence[str], folder: Path) -> tuple[ParityReport, ...]:
    """One report for each precision of the engine; also written to parity.json in the folder."""
    scratch = folder / "parity"
    scratch.mkdir(parents=True, exist_ok=True)
    file = scratch / "config.yaml"
    file.write_text(to_yaml(config))
    given = ("--config", str(file))
    if config.model.recipe is not None and not Path(config.model.path).exists():
        call("make-model", *given)
    samples = [str(scratch / f"{config.generator.engine}-{dtype}.samples") for dtype in dtypes]
    for dtype, path in zip(dtypes, samples, strict=True):
        call("parity", "sample", *given, "--set", f"generator.dtype={dtype}", "--samples", path)
    report = folder / REPORT_FILE
    call("parity", "score", *given, "--samples", *samples, "--out", str(report))
    return msgspec.json.decode(report.read_bytes(), type=_Reports).reports


def _refuse(config: RunConfig, reports: Sequence[ParityReport]) -> None:
    if sentences := list(complaints(config, reports)):
        raise StreamRLError("; ".join(sentences))


class _Reports(msgspec.Struct, frozen=True):
    unit: str
    reports: tuple[ParityReport, ...]
