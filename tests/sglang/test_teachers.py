"""A real SGLang as a teacher: what it answers is what the learner computes with its model."""

from tests.sglang.conftest import SglangServer
from tests.teaching import TOP_K, require_likeliest_of_model, require_logprobs_of_model, scored
from tests.tiny_model import make_tokenizer


def test_what_sglang_answers_is_what_its_model_computes(server: SglangServer):
    require_logprobs_of_model(scored(make_tokenizer(), url=server.url, engine="sglang"))


def test_the_likeliest_that_sglang_answers_are_those_of_its_model(server: SglangServer):
    require_likeliest_of_model(scored(make_tokenizer(), TOP_K, url=server.url, engine="sglang"))
