"""`check` names what was given and is read by nothing, and nothing else."""

from functools import reduce
from operator import attrgetter
from typing import Any

import pytest

from streamrl.cli.check.unused_settings import _unused, check_unused_settings, default_of
from streamrl.config import RunConfig
from streamrl.config.loading.load import with_setting
from streamrl.config.loading.sources import from_override

BASE = ("model.path=m", "data.source=copy", "run.max_steps=10")


def config(*settings: str) -> RunConfig:
    start: dict[str, Any] = {}
    return RunConfig.model_validate(
        reduce(with_setting, map(from_override, (*BASE, *settings)), start)
    )


IDLE = [
    ("learner.profiler.steps=[5, 50]", "run.max_steps=60"),
    ("learner.profiler.ranks=[1]", "learner.profiler.steps=[1]"),
    ("validation.temperature=0.5", "validation.every=5"),
    ("validation.generator={max_num_seqs: 3}", "validation.every=5"),
    ("generator.vllm.enforce_eager=true", "generator.engine=vllm"),
    ("generator.vllm.enforce_eager=true", "validation={every: 5, generator: {engine: vllm}}"),
    ("generator.oversample.keep=first_finished", "generator.oversample.num_siblings=1"),
    ("buffer.record_max_bytes=5", "buffer.record=true"),
    ("buffer.password_file=secret", "buffer.url=redis://here"),
    ("weights.full_every=5", "weights.delta=true"),
    ("data.filter_workers=2", "data.truncation=filter"),
    ("tracking.prometheus.port=9000", "tracking.prometheus.enabled=true"),
    ("algorithm.kl_reward.target=0.2", "algorithm.kl_reward.coef=0.1"),
]


@pytest.mark.parametrize(("setting", "reader"), IDLE)
def test_what_nothing_reads_is_said_until_something_does(setting, reader):
    (found,) = check_unused_settings(config(setting))
    assert found.sentence.startswith(f"{setting.partition('=')[0]}: ")
    assert list(check_unused_settings(config(setting, reader))) == []


def test_every_setting_that_is_looked_at_is_one():
    default = config()
    for _, place, names, _ in _unused(default):
        section = attrgetter(place)(default)
        for name in names.split():
            assert getattr(section, name) == default_of(section, name)
    assert list(check_unused_settings(default)) == []
