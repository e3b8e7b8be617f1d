"""A real SGLang as a teacher: what it answers is what the learner computes with its model."""

import pytest

from tests.sglang.conftest import SglangServer
from tests.teaching import (
    TOP_K,
    require_likeliest_of_model,
    require_logprobs_of_model,
    scored,
    wait_until_served,
)
from tests.tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def url(server: SglangServer) -> str:
    wait_until_served(server.url)
    return server.url


def test_what_sglang_answers_is_what_its_model_computes(url: str):
    require_logprobs_of_model(scored(make_tokenizer(), url=url, engine="sglang"))


def test_the_likeliest_that_sglang_answers_are_those_of_its_model(url: str):
    require_likeliest_of_model(scored(make_tokenizer(), TOP_K, url=url, engine="sglang"))
