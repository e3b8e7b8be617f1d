"""The learner daemon begins a run on a blank buffer, and on that of a run only if it is told to."""

from pathlib import Path
from typing import Any

import pytest

from buffers.ledger.ledger import Ledger
from buffers.ledger.state import BufferState
from buffers.memory import MemoryBuffer
from learners import daemon
from streamrl.errors import ConfigError
from streamrl.run_folder import LEARNER_FILE
from streamrl.shutdown import Shutdown
from streamrl.types import BufferStats
from tests.ports import free_port
from tests.tiny_model import make_tokenizer, save_llama
from tests.training import make_config


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> MemoryBuffer:
    """The one that the daemon connects to."""
    ledger = Ledger(groups_per_step=2, max_staleness=1)
    made: MemoryBuffer = MemoryBuffer(BufferState(ledger, lease_ttl_s=60.0))
    monkeypatch.setattr(daemon, "connect", lambda _: made)
    return made


async def start(folder: Path, resume: str, buffer: MemoryBuffer) -> Path:
    """A learner that is told to end once it has attached; the run's folder."""
    model = folder / "model"
    if not model.exists():
        save_llama(model)
        make_tokenizer().save_pretrained(model)
    config = make_config(
        model={"path": str(model)},
        run={"folder": folder, "name": "run", "resume": resume},
        learner={"groups_per_step": 2, "device": "cpu"},
        buffer={"max_staleness": 1},
        weights={"address": f"tcp://127.0.0.1:{free_port()}"},
    )
    config.run.path.mkdir(exist_ok=True)
    shutdown = Shutdown()

    async def attach_and_stop(*given: Any) -> BufferStats:
        stats = await MemoryBuffer.attach(buffer, *given)
        shutdown.requested.set()
        return stats

    buffer.attach = attach_and_stop
    await daemon.train(config, shutdown)
    return config.run.path


@pytest.mark.parametrize("resume", ["never", "auto"])
async def test_a_blank_buffer_takes_a_learner_that_is_to_resume_or_not(tmp_path, buffer, resume):
    run = await start(tmp_path, resume, buffer)
    assert (await buffer.stats()).books.learner_term == 1
    assert (run / LEARNER_FILE).exists()


async def test_the_buffer_of_a_run_takes_only_one_that_is_to_resume(tmp_path, buffer):
    await buffer.attach(0, None)
    with pytest.raises(ConfigError, match="the buffer holds a run run at version 0 already"):
        await start(tmp_path, "never", buffer)
    assert (await buffer.stats()).books.learner_term == 1
    assert not any((tmp_path / "run").iterdir())
    await start(tmp_path, "auto", buffer)
    assert (await buffer.stats()).books.learner_term == 2


async def test_a_learner_whose_model_is_still_to_be_made_says_so(tmp_path):
    config = make_config(
        model={"path": str(tmp_path / "none"), "recipe": {}},
        weights={"address": f"tcp://127.0.0.1:{free_port()}"},
    )
    with pytest.raises(ConfigError, match=r"there is no .*none; `streamrl get-model --config CONF"):
        await daemon.train(config, Shutdown())
