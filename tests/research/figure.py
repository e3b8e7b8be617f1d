"""A figure of panels that becomes a PNG; matplotlib is loaded when one is drawn, with no screen."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def drawn(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """The figure and its axes [rows * columns], saved when the block ends; `size` in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, sharex=True)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    yield figure, list(axes.flat)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
