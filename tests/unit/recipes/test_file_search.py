"""`configs/recipes/file_search`: the calls, the answer, and its reward."""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actors.environments import UserEnvironment, make_environment
from streamrl.errors import ConfigError
from streamrl.interfaces import EnvironmentContext, Message, Prompt
from streamrl.types import Completion, FinishReason
from tests.documents import ROOT
from tests.unit.environments.test_games import entry

ENVIRONMENT = f"{ROOT}/configs/recipes/file_search/file_search.py:FileSearch"


class CallRenderer:
    """Completions are JSON, one character per token: a call, or the text of an answer."""

    has_chat_template = True
    prefill = ""

    def messages(self, prompt: Prompt) -> tuple[Message, ...]:
        return ({"role": "user", "content": prompt.content},)

    def parse(self, token_ids: Sequence[int], tools: Sequence[Any] = ()) -> Message:
        said = json.loads("".join(map(chr, token_ids)))
        if isinstance(said, str):
            return {"role": "assistant", "content": said}
        return {"role": "assistant", "content": "", "tool_calls": [{"function": said}]}


async def step(environment: UserEnvironment, said: object):
    ids = np.array([*map(ord, json.dumps(said))], np.int32)
    completion = Completion(
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        policy_versions=np.zeros(len(ids), np.int32),
        finish_reason=FinishReason.STOP,
    )
    return await environment.step(completion)


async def call(environment: UserEnvironment, name: str, **arguments: str) -> str:
    transition = await step(environment, {"name": name, "arguments": arguments})
    assert (transition.done, transition.num_tool_calls) == (False, 1)
    (message,) = transition.observation.messages
    return str(message["content"])


async def asked(seed: int) -> tuple[UserEnvironment, str]:
    environment = make_environment(entry(ENVIRONMENT))
    context = EnvironmentContext(Prompt("", "", {"seed": seed}), (), CallRenderer())
    observation = await environment.start(context)
    return environment, str(observation.messages[0]["content"])


async def test_a_wrong_answer_has_no_reward():
    environment, _ = await asked(1)
    transition = await step(environment, "It is 1.")
    assert (transition.done, transition.reward, transition.metrics["success"]) == (True, 0.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
async def test_a_locker_is_found_in_two_searches(seed):
    environment, question = await asked(seed)
    who = re.search(r"the parcel that (.*) waits for", question)[1]
    parcel = re.search(r"waits for parcel (\d+)", await call(environment, "search", text=who))[1]
    hits = await call(environment, "search", text=f"Parcel {parcel} ")
    file, locker = re.fullmatch(r"(\S+): Parcel \d+ lies in locker (\d+)\.", hits).groups()
    assert f"locker {locker}" in await call(environment, "read", file=file)
    transition = await step(environment, f"Locker {locker}")
    assert (transition.done, transition.reward) == (True, 1.0)
    assert transition.metrics["success"] == 1.0
    assert transition.metrics["tool/search/num_calls"] == 2


async def test_searches_that_find_nothing_or_are_wrong_are_answered():
    environment, _ = await asked(0)
    assert await call(environment, "search", text="zebra") == "no line contains it"
    assert await call(environment, "read", file="none.txt") == "error: there is no file 'none.txt'"
    assert (await call(environment, "search", words="a")).startswith("error: the one argument is")
    assert "more)" in await call(environment, "search", text="parcel")


async def test_the_seed_is_the_question():
    questions = [(await asked(seed))[1] for seed in (1, 1, 2)]
    assert questions[0] == questions[1] != questions[2]


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"num_people": 1}, "num_people was 1; 2 to 132"),
        ({"num_peeple": 2}, "takes no 'num_peeple'; .*num_people"),
    ],
)
def test_bad_arguments_are_refused(kwargs, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_environment(entry(ENVIRONMENT, **kwargs))


@pytest.mark.parametrize("name", ["calculator", "file_search"])
def test_what_was_built_in_says_where_it_is(name):
    sentence = f"^generator.environment: was '{name}', .*--recipe {name}"
    with pytest.raises(ConfigError, match=sentence):
        make_environment(entry(name))
