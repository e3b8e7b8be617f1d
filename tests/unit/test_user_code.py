"""A user's own loss, advantage, reward, environment and prompts, from real files, each by the way
a run uses it; and the sentence for a file that cannot be used."""

from pathlib import Path

import pytest
import torch

from actors.environments import make_environment
from actors.episodes.mixed_runner import make_runner
from actors.make_model import make_tokenizer
from actors.prompts import open_held_out, open_prompts, open_stream
from actors.prompts.tasks import HELD_OUT_RUN_SEED
from actors.rendering.renderer import ChatRenderer
from learners.trainer import Trainer
from streamrl.algorithms.objective import require_algorithm
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.config.algorithm.losses import UserLossSettings
from streamrl.config.data import DataSettings
from streamrl.config.environments import EnvironmentEntry
from streamrl.errors import ConfigError, RolloutError
from streamrl.types import Lease, TrajectoryGroup
from streamrl.user_code import find_user_code, load_user_code
from tests.training import make_batch, make_config, make_policy
from tests.unit.test_generator import FakeEngine, Run

ALGORITHM = """
from dataclasses import dataclass

import torch

from streamrl.algorithms.losses import LossOutput, aggregate


def plain(batch, settings):
    per_token = -settings.scale * batch.advantages * batch.logprobs
    loss = aggregate(per_token, batch.sequences, settings.loss_agg_mode, batch.batch_totals)
    return LossOutput(loss, {"actor/scale": torch.tensor(settings.model_extra["scale"])})


def centered(batch, settings):
    scores = batch.returns
    return batch.to_tokens(settings.sign * (scores - scores.mean()))


def tensor(batch, settings):
    return batch.logprobs.sum()


def short(batch, settings):
    return batch.returns
"""

ACTOR = '''
from dataclasses import dataclass

from streamrl.interfaces import Observation, Prompt, Transition


def score(episode):
    return float(episode.prompt.answer) + len(episode.response)


class Twice:
    """Asks once more."""

    def __init__(self):
        self.turn = 0

    async def start(self, context):
        self.again = context.renderer.encode_text(context.prompt.answer)
        return Observation(token_ids=context.prompt_token_ids)

    async def step(self, completion):
        self.turn += 1
        return Transition(observation=Observation(token_ids=self.again), done=self.turn == 2)


class Broken(Twice):
    async def step(self, completion):
        raise KeyError("level")


class Unmade:
    def __init__(self, level):
        self.level = level


class Shut(Twice):
    def close(self):
        pass


class Riddles:
    def __init__(self, seed, hardest=9):
        self.seed, self.hardest = seed, hardest

    def __getitem__(self, prompt_index):
        number = (self.seed + prompt_index) % self.hardest
        return Prompt(f"{number}+1=", str(number + 1))


def strings(seed):
    return ["a", "b"]
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The path, without a name, of a file with a user's algorithm and one for the actors."""
    (tmp_path / "own_algorithm.py").write_text(ALGORITHM)
    (tmp_path / "own_actor.py").write_text(ACTOR)
    return str(tmp_path)


def algorithm(own: str, **changes: object) -> RunConfig:
    section = {
        "loss": f"{own}/own_algorithm.py:plain",
        "loss_config": {"scale": 2.0},
        "advantage": f"{own}/own_algorithm.py:centered",
        "advantage_config": {"sign": -1, "clip": 0.5},
    }
    return make_config(algorithm={**section, **changes})


def test_a_step_is_made_with_a_loss_and_an_advantage_of_the_users_own(own):
    torch.manual_seed(0)
    config = algorithm(own)
    require_algorithm(config.algorithm)
    trainer, batch = Trainer(config, make_policy()), make_batch()
    before = {name: p.detach().clone() for name, p in trainer.policy.parameters().items()}
    metrics = trainer.step(batch)
    assert metrics["actor/scale"] == 2.0
    centered = -(batch.rewards - batch.rewards.mean()).clamp(-0.5, 0.5)
    lengths = batch.sequences.lengths
    expected = (centered * lengths).sum() / lengths.sum()
    assert metrics["advantage/mean"] == pytest.approx(float(expected), abs=1e-6)
    after = trainer.policy.parameters()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_numbers_of_the_users_own_read_back_to_the_same(own, tmp_path):
    config = algorithm(own)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_config(tmp_path / "config.yaml", environment={}).config
    assert again == config
    assert isinstance(again.algorithm.loss_config, UserLossSettings)
    assert again.algorithm.loss_config.model_extra == {"scale": 2.0}


@pytest.mark.parametrize(
    ("field", "name", "sentence"),
    [
        ("loss", "plane", "algorithm.loss: .*has no function 'plane'; did you mean 'plain'"),
        ("advantage", "centred", "algorithm.advantage: .*did you mean 'centered'"),
    ],
)
def test_a_run_with_an_unknown_name_does_not_start(own, field, name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        require_algorithm(algorithm(own, **{field: f"{own}/own_algorithm.py:{name}"}).algorithm)


@pytest.mark.parametrize(
    ("field", "name", "sentence"),
    [
        ("loss", "tensor", r"returned Tensor; it must return LossOutput"),
        ("advantage", "short", r"returned Tensor of shape .*; it must return a tensor of shape"),
    ],
)
def test_what_the_users_own_returns_is_checked(own, field, name, sentence):
    config = algorithm(own, **{field: f"{own}/own_algorithm.py:{name}"})
    with pytest.raises(ConfigError, match=f"algorithm.{field}: .*{sentence}"):
        Trainer(config, make_policy()).step(make_batch())


def entry(**settings: object) -> EnvironmentEntry:
    generator = {"data": {"source": "copy"}, "model": {"path": "unused"}, "generator": settings}
    return RunConfig.model_validate(generator).entries[0]


def actor_data(own: str) -> DataSettings:
    entries = {"source": f"{own}/own_actor.py:Riddles", "reward": f"{own}/own_actor.py:score"}
    return DataSettings.model_validate(entries)


async def sampled(own: str, environment: str, renderer: ChatRenderer) -> TrajectoryGroup:
    """One group of a generator whose environment, prompts and reward are the user's own."""
    run, data = Run(environment=f"{own}/own_actor.py:{environment}"), actor_data(own)
    config = run.config.model_copy(update={"data": data})
    seeded = config.run.model_copy(update={"seed": 3})
    config = config.model_copy(update={"run": seeded})
    runner = make_runner(config, FakeEngine(), renderer, open_stream(config, renderer))
    lease = Lease(lease_id="a", prompt_index=0, min_policy_version=0)
    return await runner.of(0).run(lease)


@pytest.fixture
def renderer(own: str) -> ChatRenderer:
    return ChatRenderer(make_tokenizer("0123456789+="), actor_data(own))


async def test_a_group_is_sampled_with_everything_of_the_users_own(own, renderer):
    group = await sampled(own, "Twice", renderer)
    assert group.environment == f"{own}/own_actor.py:Twice"
    asked, again = renderer.encode_text("3+1="), renderer.encode_text("4")
    length = len(asked)
    expected = [*asked, length, length, *again, length + 3, length + 3]
    assert group.trajectories[0].token_ids.tolist() == expected
    assert [t.num_observation_tokens for t in group.trajectories[0].turns] == [length, 1]
    assert group.trajectories[0].reward == 4 + len(renderer.decode([length + 3] * 2))


async def test_an_environment_that_fails_costs_its_group_alone(own, renderer):
    with pytest.raises(RolloutError, match=r"own_actor.py:Broken: KeyError: 'level'"):
        await sampled(own, "Broken", renderer)


def test_an_environment_that_cannot_be_made_is_refused(own):
    with pytest.raises(ConfigError, match=r"generator.environment_kwargs: .*needs 'level'"):
        make_environment(entry(environment=f"{own}/own_actor.py:Unmade"))
    with pytest.raises(ConfigError, match=r"own_actor.py:Shut: close is not `async def`"):
        make_environment(entry(environment=f"{own}/own_actor.py:Shut"))
    with pytest.raises(ConfigError, match="did you mean 'single_turn'"):
        make_environment(entry(environment="single_trun"))


def test_prompts_of_the_users_own_get_seed_and_arguments(own):
    source = f"{own}/own_actor.py:Riddles"
    data = DataSettings(source=source, source_kwargs={"hardest": 5}, eval_source=source)
    assert [open_prompts(data, seed=4)[i].answer for i in range(3)] == ["5", "1", "2"]
    assert open_held_out(data)[0].answer == str(HELD_OUT_RUN_SEED % 5 + 1)
    with pytest.raises(ConfigError, match=r"data\.eval_source: is needed"):
        open_held_out(DataSettings(source=source))


@pytest.mark.parametrize(
    ("name", "kwargs", "sentence"),
    [
        ("Riddles", {"easiest": 1}, "TypeError: .*unexpected keyword argument 'easiest'"),
        ("Riddle", {}, "did you mean 'Riddles'"),
        ("strings", {}, "row 1 was str; it must be a mapping or a streamrl.interfaces.Prompt"),
        ("Riddles", {"hardest": 0}, "prompt 0: ZeroDivisionError"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(own, name, kwargs, sentence):
    data = DataSettings(source=f"{own}/own_actor.py:{name}", source_kwargs=kwargs)
    with pytest.raises(ConfigError, match=f"data.source: .*{sentence}"):
        open_prompts(data, seed=0)


def test_a_file_is_run_once_and_its_dataclasses_work(tmp_path):
    (tmp_path / "counted.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from pathlib import Path\n"
        "with Path(__file__).with_name('runs').open('a') as runs:\n    runs.write('x')\n"
        "@dataclass\nclass Loss:\n    scale: float = 1.0\n"
        "def plain(batch, settings):\n    return Loss()\n"
    )
    for field in ("algorithm.loss", "data.reward"):
        assert load_user_code(field, f"{tmp_path}/counted.py:plain")(None, None).scale == 1.0
    assert (tmp_path / "runs").read_text() == "x"


def test_a_name_is_found_without_running_the_file_where_the_file_binds_it_itself(tmp_path):
    (tmp_path / "own.py").write_text(
        "\ufeffif True:\n    def outer():\n        def inner(): ...\nalias = outer\n1 / 0\n",
        encoding="utf-8",
    )
    for name in ("outer", "alias"):
        find_user_code("data.reward", f"{tmp_path}/own.py:{name}")
    with pytest.raises(ConfigError, match=r"own\.py has no function 'inner'"):
        find_user_code("data.reward", f"{tmp_path}/own.py:inner")


def test_a_wrong_file_is_named_with_its_field(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for entry, sentence in {
        f"{tmp_path}/nowhere.py:plain": "algorithm.loss: there is no file .*nowhere.py",
        f"{tmp_path}/broken.py:plain": "algorithm.loss: .*broken.py: ZeroDivisionError",
        f"{tmp_path}/broken.py": "algorithm.loss: was .*named PATH.py:NAME",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            load_user_code("algorithm.loss", entry)
