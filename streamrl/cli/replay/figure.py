"""The picture of a replay: what each policy made of the same steps."""

from pathlib import Path
from typing import Any

from learners.replay.replay import Measured, Report
from streamrl.cli.display.figure import drawn

_PANELS = (
    ("Loss", "loss"),
    ("Effective sample size of the weights", "rollout_is_ess"),
    ("Norm of the gradient", "grad_norm"),
)


def draw(report: Report, path: Path) -> None:
    with drawn(path, 2, 3, (14, 7)) as (_, axes):
        for axis, (title, name) in zip(axes, _PANELS, strict=False):
            _lines(axis, report, title, lambda step, name=name: step.metrics.get(name))
        _lines(axes[3], report, "Estimated reward of the policy", lambda s: s.estimated_reward)
        _line(axes[4], report, "Cosine of the two updates", "cosine")
        _line(axes[5], report, "Distance of the two policies", "distance")
        axes[0].legend(fontsize=8)


def _lines(axis: Any, report: Report, title: str, value: Any) -> None:
    for label, steps in _policies(report):
        axis.plot([n for n, _ in steps], [value(step) for _, step in steps], label=label)
    _name(axis, title)


def _line(axis: Any, report: Report, title: str, name: str) -> None:
    found = [(s.step, getattr(s, name)) for s in report.steps if getattr(s, name) is not None]
    axis.plot([n for n, _ in found], [value for _, value in found], color="C1")
    _name(axis, title)


def _policies(report: Report) -> list[tuple[str, list[tuple[int, Measured]]]]:
    recorded = [(s.step, s.recorded) for s in report.steps]
    changed = [(s.step, s.changed) for s in report.steps if s.changed is not None]
    named = ("as recorded", recorded), (", ".join(report.settings), changed)
    return [(label, steps) for label, steps in named if steps]


def _name(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("step")
