"""A real vLLM as a teacher: what it answers is what the learner computes with its model."""

import sys
from collections.abc import Iterator

import pytest

from actors.engines.served.process import ServerProcess
from actors.engines.vllm.arguments import IN_ONE_PROCESS
from streamrl.errors import ConfigError
from tests.engines import ENVIRONMENT, make_model
from tests.ports import free_port
from tests.teaching import (
    TOP_K,
    require_likeliest_of_model,
    require_logprobs_of_model,
    scored,
    wait_until_served,
)
from tests.tiny_model import make_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


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
        wait_until_served(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.close()


def test_what_vllm_answers_is_what_its_model_computes(url: str):
    require_logprobs_of_model(scored(make_tokenizer(), url=url))


def test_the_likeliest_that_vllm_answers_are_those_of_its_model(url: str):
    require_likeliest_of_model(scored(make_tokenizer(), TOP_K, url=url))


def test_its_tokenizer_is_told_from_another_one(url: str):
    other = make_tokenizer()
    vocabulary = other.backend_tokenizer.to_str().replace('"w7"', '"x7"')
    other._tokenizer = type(other.backend_tokenizer).from_str(vocabulary)
    with pytest.raises(ConfigError, match="has another tokenizer than the policy"):
        scored(other, url=url)
