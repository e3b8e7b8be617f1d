"""A real vLLM as a teacher: what it answers is what the learner computes with its model."""

import asyncio
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from msgspec import structs

from actors.engines.served.process import ServerProcess
from actors.engines.vllm.arguments import IN_ONE_PROCESS
from actors.rendering.renderer import ChatRenderer
from actors.rewards.remote.http import Service, ServiceSettings
from actors.rewards.remote.teachers import RemoteTeachers
from streamrl.config.algorithm.distillation import DistillationSettings
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.types import TrajectoryGroup
from tests.engines import ENVIRONMENT, make_model
from tests.ports import free_port
from tests.tiny_model import make_tokenizer
from tests.training import make_groups

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
START_S = 400.0
GROUP = structs.replace(make_groups(num_groups=1, group_size=3)[0], teacher="", teacher_prompt=None)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("teacher"), free_port()
    make_model().save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    where = ["--model", str(folder / "model"), "--host", "127.0.0.1", "--port", str(port)]
    sizes = ["--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "4"]
    sizes += ["--kv-cache-memory-bytes", str(64 * 2**20)]
    words = [*program, *where, *sizes, "--distributed-executor-backend", IN_ONE_PROCESS]
    server = ServerProcess(words, folder / "vllm.log", ENVIRONMENT)
    try:
        asyncio.run(_until_served(f"http://127.0.0.1:{port}"))
        yield f"http://127.0.0.1:{port}"
    finally:
        server.close()


async def _until_served(url: str) -> None:
    """Waits for the server, at most START_S."""
    service = Service(ServiceSettings(url=url))
    async with asyncio.timeout(START_S):
        while True:
            try:
                await service.post("/detokenize", {"tokens": [3]}, dict)
            except RolloutError:
                await asyncio.sleep(1.0)
            else:
                return


def scored(url: str, renderer: ChatRenderer) -> TrajectoryGroup:
    settings = DistillationSettings.model_validate({"teachers": [{"url": url}], "retries": 0})
    return asyncio.run(RemoteTeachers(settings, renderer).score(GROUP))


def renderer_of(tokenizer: object) -> ChatRenderer:
    return ChatRenderer(tokenizer, DataSettings(source="addition", max_prompt_length=10))


def test_what_vllm_answers_is_what_its_model_computes(url: str):
    model = make_model()
    group = scored(url, renderer_of(make_tokenizer()))
    for t in group.trajectories:
        ids = torch.from_numpy(t.token_ids).long()
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        own = np.array([0.0, *logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist()])
        assert t.teacher_logprobs is not None
        np.testing.assert_allclose(t.teacher_logprobs, own * t.response_mask, atol=2e-4)


def test_its_tokenizer_is_told_from_another_one(url: str):
    other = make_tokenizer()
    vocabulary = other.backend_tokenizer.to_str().replace('"w7"', '"x7"')
    other._tokenizer = type(other.backend_tokenizer).from_str(vocabulary)
    with pytest.raises(ExceptionGroup) as caught:
        scored(url, renderer_of(other))
    assert isinstance(caught.value.exceptions[0], ConfigError)
    assert "has another tokenizer than the policy" in str(caught.value.exceptions[0])
