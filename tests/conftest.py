"""What every test shares: one thread per process, so that tests beside each other don't spin.

Where STREAMRL_TESTS_END is set (by `.ci/run`, which has a time to keep), a test that has not begun
by that time, in seconds since 1970, is skipped with this reason. Which files come last in a call of
pytest then differs from run to run, so that it is not always the same ones that are not run.

With `--dist loadgroup`, all of `tests/deploy` stay in one process, since they share what a machine
has once (containers, Slurm, systemd), and so does a file whose fixtures take longer than its tests;
those of `tests/system` each start what they need.
"""

import gc
import os
import signal
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()
# What a shell starts in the background ignores Ctrl-C, what nohup starts ignores a terminal that
# closes, and so would every process of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long a machine takes to draw inputs, or with one, says nothing about the code under test.
settings.register_profile("streamrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("streamrl")


DEPLOY = Path(__file__).parent / "deploy"
SYSTEM = Path(__file__).parent / "system"
END_S = int(os.environ.get("STREAMRL_TESTS_END", 0))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(DEPLOY):
            item.add_marker(pytest.mark.deploy)
            item.add_marker(pytest.mark.xdist_group("deploy"))
        elif not item.path.is_relative_to(SYSTEM):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    # Servers that are started once for all who ask are to end before others start.
    if END_S and ENGINES == ("HfEngines",):
        rotate(items)


def rotate(items: list[pytest.Item]) -> None:
    """Another file first in each run; those of `tests/deploy`, one after the other, before all."""
    files = list(dict.fromkeys(item.path for item in items))
    first = END_S % max(1, len(files))
    place = {path: (place - first) % len(files) for place, path in enumerate(files)}
    items.sort(key=lambda item: (not item.path.is_relative_to(DEPLOY), place[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if END_S and time.time() > END_S:
        pytest.skip("the time for this run of the tests is over")


@pytest.fixture
def torch_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """`streamrl check` in this process, without the seconds in which another one imports torch."""
    from streamrl.cli.check import packages

    monkeypatch.setattr(packages, "ask_torch", lambda: packages.TorchFacts("2.13.0"))


def pytest_collection_finish() -> None:
    """All is imported that stays: full collections of it took a fifth of the time to get here."""
    gc.freeze()
    gc.enable()


ON_VLLM = ("VllmEngines", "VllmUrlEngines")
ON_SGLANG = ("SglangEngines",)
ENGINES = ON_VLLM if find_spec("vllm") else ON_SGLANG if find_spec("sglang") else ("HfEngines",)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=ENGINES)
async def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Any]:
    """A class of `tests.engines`; what takes long to start is started once for all who ask."""
    from tests import engines

    opened = getattr(engines, request.param)(tmp_path_factory.mktemp("engines"))
    yield opened
    await opened.close()
