"""What an environment and a reward take is looked up once, not for each episode."""

import inspect
from types import SimpleNamespace

from actors.environments import SingleTurn
from actors.episodes.mixed_runner import make_runner
from actors.rewards.forms import BoundFunction
from streamrl.config import RunConfig
from streamrl.interfaces import Episode, Prompt, Score
from streamrl.types import FinishReason
from tests.unit.test_generator import FakeEngine, FakeRenderer


def test_no_signature_is_looked_up_for_an_episode(monkeypatch):
    looked_up = []
    lookup = inspect.signature

    def counted(function, **options):
        looked_up.append(function)
        return lookup(function, **options)

    config = RunConfig.model_validate({"data": {"source": "copy"}, "model": {"path": "unused"}})
    stream = SimpleNamespace(entries=config.entries)
    runner = make_runner(config, FakeEngine(), FakeRenderer(), stream)  # type: ignore[arg-type]
    (group_runner,) = runner.runners.values()
    reward = BoundFunction(lambda episode: float(episode.response), {}, "own")
    episode = Episode(Prompt("c1=", "1"), "1", 1, FinishReason.STOP)
    reward.score([episode])
    monkeypatch.setattr(inspect, "signature", counted)
    for _ in range(3):
        assert isinstance(group_runner.make_environment(), SingleTurn)
        assert reward.score([episode]) == [Score(1.0)]
    assert not looked_up
