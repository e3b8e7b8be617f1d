"""One real SGLang for the tests of its client: a server takes half a minute to start."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from actors.engines import make_engine
from actors.engines.served.engine import ServedEngine
from actors.engines.served.process import ServerProcess
from actors.engines.sglang.server import launch_command
from tests.engines import ENVIRONMENT, make_model, run_config
from tests.ports import free_port
from tests.system.conftest import launch, model

__all__ = ["launch", "model"]


@dataclass
class SglangServer:
    url: str
    model: Path

    def open(self, *, is_shared: bool = False, **sglang: object) -> ServedEngine:
        settings = {"url": self.url, "start_timeout_s": 240.0, "retry_timeout_s": 5.0, **sglang}
        config = run_config(
            self.model, engine="sglang", max_num_seqs=4, max_model_len=1000, sglang=settings
        )
        engine = make_engine(config, seed=0, is_shared=is_shared)
        assert isinstance(engine, ServedEngine)
        return engine


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """Without the overlap scheduler, so that every pause_mode is exact on it."""
    folder, port = tmp_path_factory.mktemp("sglang"), free_port()
    make_model().save_pretrained(folder)
    settings = {"recompute_kv": False}
    config = run_config(folder, max_num_seqs=4, max_model_len=1000, sglang=settings)
    words = launch_command(config, host="127.0.0.1", port=port, seed=0)
    process = ServerProcess(words, folder / "log", ENVIRONMENT)
    yield SglangServer(f"http://127.0.0.1:{port}", folder)
    process.close()
