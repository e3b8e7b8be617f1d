"""How often prompts come again: within training by chance alone, in what is held out never."""

import string
from collections.abc import Iterable
from itertools import islice

import pytest

from actors.environments import BUILT_IN, make_environment
from actors.episodes.mixed_runner import make_runner
from actors.make_model import make_tokenizer
from actors.prompts import open_held_out, open_held_out_stream, open_prompts, open_stream
from actors.prompts.tasks import _BLOCK, FIRST_HELD_OUT, TASKS, UNEARNED, block_seed, seed_of
from actors.rendering.renderer import ChatRenderer
from streamrl.config import RunConfig
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError
from streamrl.interfaces import EnvironmentContext, Prompt
from tests.documents import ROOT
from tests.unit.test_generator import FakeEngine

RUN_SEEDS = (0, 1, 2, 2**31 - 1, 2**31, 2**40)


def texts(prompts: Iterable[Prompt]) -> list[str]:
    return [repr(prompt.content) for prompt in prompts]


def test_no_two_blocks_of_a_run_share_a_seed_and_none_is_held_out():
    for run_seed in RUN_SEEDS:
        firsts = [block_seed(run_seed, number, _BLOCK) for number in range(5000)]
        assert len(set(firsts)) == len(firsts)
        assert all(not first % _BLOCK for first in firsts)
        assert min(firsts) >= 0
        assert max(firsts) + _BLOCK <= FIRST_HELD_OUT
    held_out = [block_seed(None, number, _BLOCK) for number in range(1000)]
    assert held_out == [FIRST_HELD_OUT + number * _BLOCK for number in range(1000)]
    assert held_out[-1] + _BLOCK < 2**32


def test_every_block_comes_once_before_any_comes_again():
    size = 2**21
    blocks = [block_seed(7, number, size) for number in range(FIRST_HELD_OUT // size)]
    assert sorted(blocks) == list(range(0, FIRST_HELD_OUT, size))
    assert block_seed(7, len(blocks), size) == blocks[0]


def test_runs_of_neighboring_seeds_read_other_blocks():
    of_runs = [{block_seed(seed, n, _BLOCK) for n in range(20)} for seed in range(20)]
    assert len(set().union(*of_runs)) > 380


def test_seeds_of_training_are_never_held_out():
    held_out = {seed_of(None, number) for number in range(1000)}
    for run_seed in RUN_SEEDS:
        trained = {seed_of(run_seed, index) for index in range(2000)}
        assert len(trained) > 1990
        assert max(trained) < FIRST_HELD_OUT <= min(held_out)


@pytest.mark.parametrize("run_seed", [0, 1])
def test_a_generated_data_set_repeats_itself_by_chance_alone(run_seed):
    data = DataSettings(source="reasoning_gym:chain_sum", num_eval_prompts=64)
    prompts = open_prompts(data, run_seed)
    num_trained = 3 * _BLOCK
    trained = texts(prompts[i] for i in range(num_trained))
    # Two draws of this data set are the same prompt with a chance of about 7e-6.
    assert len(set(trained)) > 11_600
    held_out = texts(open_held_out(data))
    assert len(set(held_out)) == 64
    assert sum(text in set(trained) for text in held_out) < 20


@pytest.mark.parametrize(
    "name", ["base_conversion", "gsm_symbolic", "list_functions", "spell_backward"]
)
def test_neighboring_blocks_of_other_data_sets_are_different(name):
    prompts = open_prompts(DataSettings(source=f"reasoning_gym:{name}"), seed=0)
    first = {repr(prompts[i].content) for i in range(300)}
    second = {repr(prompts[_BLOCK + i].content) for i in range(300)}
    held_out = texts(islice(open_held_out(DataSettings(source=f"reasoning_gym:{name}")), 64))
    assert len(first & second) < 100
    assert len(first & set(held_out)) < 32


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("run_seed", RUN_SEEDS[:2])
@pytest.mark.parametrize("names_eval_source", [False, True])
def test_a_task_holds_out_what_it_never_trains(task, run_seed, names_eval_source):
    data = DataSettings(
        source=task, eval_source=task if names_eval_source else None, num_eval_prompts=50
    )
    held_out, training = open_held_out(data), open_prompts(data, run_seed)
    trained = texts(training[i] for i in range(1000))
    assert set(texts(held_out)).isdisjoint(trained)
    assert [held_out[i] for i in range(5)] == [open_held_out(data)[i] for i in range(5)]
    # As many as independent draws have: of 10,000 additions 950 of 1000 are different.
    assert len(set(trained)) > 900


def test_a_task_never_trains_what_another_source_of_it_holds_out():
    short, long = {"max_length": 4}, {"max_length": 5}
    sources = [
        {"path": "reverse", "kwargs": own, "weight": 1, "name": f"up to {own['max_length']}"}
        for own in (short, long)
    ]
    data = DataSettings(source=sources, num_eval_prompts=100)
    training = open_prompts(data, seed=0)
    trained = texts(training[i] for i in range(3000))
    assert set(texts(open_held_out(data))).isdisjoint(trained)


def test_held_out_levels_of_an_eval_source_are_not_those_of_training():
    data = DataSettings(source="environment", eval_source="environment", num_eval_prompts=50)
    training, held_out = open_prompts(data, seed=0), open_held_out(data)
    trained = {training[i].row["seed"] for i in range(2000)}
    assert trained.isdisjoint(prompt.row["seed"] for prompt in held_out)


def test_a_generated_eval_source_is_held_out_too():
    data = DataSettings(
        source="reasoning_gym:base_conversion", eval_source="reasoning_gym:base_conversion"
    )
    training = open_prompts(data, seed=0)
    trained = texts(training[i] for i in range(500))
    assert sum(text in trained for text in texts(islice(open_held_out(data), 50))) < 5


def test_a_source_of_the_users_own_is_held_out_with_a_seed_of_its_own(tmp_path):
    (tmp_path / "own.py").write_text(
        "from streamrl.interfaces import Prompt\n"
        "class Own:\n"
        "    def __init__(self, seed):\n"
        "        self.seed = seed\n"
        "    def __getitem__(self, index):\n"
        "        return Prompt(f'{self.seed}:{index}', 'a')\n"
    )
    own = f"{tmp_path}/own.py:Own"
    data = DataSettings(source=own, eval_source=own)
    assert open_prompts(data, seed=0)[0].content == "0:0"
    assert open_held_out(data)[0].content == "2147483647:0"


LEVELS = ("frozen_lake",)
FILE_SEARCH = f"{ROOT}/configs/recipes/file_search/file_search.py:FileSearch"


def test_every_environment_that_makes_up_its_levels_is_counted_here():
    assert set(BUILT_IN) - {"single_turn", "agent", "tools"} == set(LEVELS)


@pytest.mark.parametrize("environment", [*LEVELS, FILE_SEARCH])
async def test_levels_repeat_by_chance_alone(environment):
    config = RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"source": "environment", "num_eval_prompts": 50},
            "generator": {
                "environment": environment,
                "environment_kwargs": {"size": 8} if environment in LEVELS else {},
            },
        }
    )
    training, held_out = open_prompts(config.data, 0), open_held_out(config.data)
    renderer = ChatRenderer(make_tokenizer(string.printable), config.data)
    trained = [await opening(config, renderer, training[i]) for i in range(200)]
    others = [await opening(config, renderer, prompt) for prompt in held_out]
    assert len(set(trained)) > 190
    assert len(set(trained) & set(others)) < 10


async def opening(config: RunConfig, renderer: ChatRenderer, prompt: Prompt) -> str:
    """What the policy reads first. Of a file search that names a person; the locker differs."""
    environment = make_environment(config.entries[0])
    observation = await environment.start(EnvironmentContext(prompt, (), renderer))
    await environment.close()
    tokens = list(observation.token_ids)
    own = getattr(environment, "_environment", None)
    return f"{observation.messages}{tokens}{getattr(own, 'answer', '')}"


def test_a_group_without_a_level_of_its_own_is_held_out_with_another_seed():
    config = RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"source": "copy", "num_eval_prompts": 20},
            "generator": {"environment": "frozen_lake"},
        }
    )
    renderer = ChatRenderer(make_tokenizer("c0123456789="), config.data)
    seeds = {}
    for name, stream in (
        ("training", open_stream(config, renderer)),
        ("held out", open_held_out_stream(config)),
    ):
        runner = make_runner(config, FakeEngine(), renderer, stream).of(0)
        seeds[name] = {seed_of(runner.run_seed, i) for i in range(20)}
    assert max(seeds["training"]) < FIRST_HELD_OUT <= min(seeds["held out"])


@pytest.mark.parametrize("name", UNEARNED)
def test_a_scorer_that_pays_for_wrong_answers_is_refused_by_name(name):
    data = DataSettings(source=f"reasoning_gym:{name}", reward="task")
    for opened in (lambda: open_prompts(data, 0), lambda: open_held_out(data)):
        with pytest.raises(ConfigError, match=rf"data\.reward: was task, .*{name} pays in full"):
            opened()
    assert open_prompts(DataSettings(source=f"reasoning_gym:{name}"), 0)[0].answer


def test_a_scorer_that_is_not_asked_is_not_refused():
    data = DataSettings(
        source=[
            {"path": "reasoning_gym:chain_sum", "weight": 1},
            {"path": "reasoning_gym:coin_flip", "weight": 1},
        ],
        rewards=[
            {"reward": "task", "data_source": ["chain_sum"]},
            {"reward": "numeric_answer", "data_source": ["coin_flip"]},
        ],
    )
    assert open_prompts(data, 0)[0].answer


def test_a_data_set_that_cannot_be_made_is_refused():
    data = DataSettings(source="reasoning_gym:chain_sum", source_kwargs={"min_terms": 0})
    with pytest.raises(ConfigError, match=r"data\.source_kwargs: chain_sum: AssertionError"):
        open_prompts(data, 0)
