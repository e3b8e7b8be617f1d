"""Runs of an ablation in processes that are forked from one which has imported what they need.

Imports take longer than a short run. Invariant: each run has a process of its own, which has done
nothing but import before, and which ends with the ablation, however that ends. `--lag` of
an ablation calls this from a thread for each run at a time.
"""

import multiprocessing
import os
import threading
from collections.abc import Sequence

from tests.research.lag import Lag

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.research.exact_lag"])


def exit_code_of(lag: Lag, source: str, overrides: Sequence[str]) -> int:
    """Of a run of the configuration file `source`, after its end. It says on stderr what fails."""
    process = _CONTEXT.Process(target=_run, args=(lag, source, overrides))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(lag: Lag, source: str, overrides: Sequence[str]) -> None:
    from tests.research.exact_lag import main

    threading.Thread(target=_end_with_the_ablation, daemon=True).start()
    main(lag, source, overrides)


def _end_with_the_ablation() -> None:
    """Waits for the end of the ablation. The process that this one is forked from outlives it."""
    ablation = multiprocessing.parent_process()
    assert ablation is not None, "a run is a process that the ablation has started"
    ablation.join()
    os._exit(1)
