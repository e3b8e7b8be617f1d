"""The names that other systems have agree with the settings and with `streamrl check`."""

import io
import re
import zipfile
from collections import Counter
from pathlib import Path

from docs import foreign_names as releases
from streamrl.config import RunConfig
from streamrl.config.loading.foreign_names import SYSTEMS, find_foreign_name, foreign_names
from tests.settings import named_in, setting_names

ENTRIES = [name for system in SYSTEMS for name in foreign_names(system).values()]
STATUSES = {"have", "fixed", "partly", "missing", "not applicable"}


def test_every_name_has_one_line_with_a_status_and_what_it_is_here():
    assert {entry.status for entry in ENTRIES} == STATUSES
    assert all(entry.here and entry.section for entry in ENTRIES)
    twice = Counter((entry.system, entry.name) for entry in ENTRIES)
    assert [name for name, count in twice.items() if count > 1] == []


def test_every_name_is_found_by_check():
    differ = [
        entry.name
        for entry in ENTRIES
        if entry.name != entry.here
        and not {" ", "*", "/"} & set(entry.name)
        and (found := find_foreign_name(entry.name)) != entry
        and (found is None or found.system not in SYSTEMS[: SYSTEMS.index(entry.system)])
    ]
    assert differ == []


def test_every_setting_that_the_table_names_exists():
    ours, sections = setting_names(), set(RunConfig.model_fields)
    named = {
        name
        for entry in ENTRIES
        for name in named_in(entry.here.partition(": ")[0] + " " + entry.note)
        if name.partition(".")[0] in sections
    }
    assert named - ours == set()
    assert len(named) > 100


def test_what_is_there_names_a_setting_and_what_is_not_there_says_why():
    for entry in ENTRIES:
        is_setting = entry.status in ("have", "partly")
        assert is_setting != entry.here.startswith("("), entry
        assert entry.status != "partly" or entry.note, entry
        assert not is_setting or _names_a_setting(entry.here), entry


def test_every_setting_that_the_table_names_is_set_by_a_test():
    tests = Path(__file__).parents[1]
    folders = ("unit", "contract", "system", "vllm", "gpu")
    files = [path for folder in folders for path in (tests / folder).rglob("*.py")]
    words = Counter(
        word
        for path in files
        if path != Path(__file__)
        for line in path.read_text().splitlines()
        for word in re.findall(r"[\"'.]?\b([a-z_0-9]+)(?:=|: |[\"'])", line)
    )
    sections = set(RunConfig.model_fields)
    named = {
        name
        for entry in ENTRIES
        if entry.status in ("have", "partly")
        for name in named_in(entry.here.partition(": ")[0])
        if name.partition(".")[0] in sections
    }
    assert sorted(name for name in named if not words[name.rpartition(".")[2]]) == []


def test_a_new_release_keeps_what_is_known_and_shows_what_is_new_and_gone():
    text = "trainer: {save_freq: 7, brand_new: true}\nray_kwargs: {ray_init: {fresh: 1}}\n"
    archive = _zipped({"verl/trainer/config/_generated_ppo_trainer.yaml": text})
    ours, others = releases.update("verl", dict(releases.verl(archive)))
    lines = {line.name: line for line in ours}
    assert lines["trainer.save_freq"].here == "learner.checkpoint.every"
    assert lines["trainer.save_freq"].default == "7"
    assert [line.name for line in ours if not line.here] == ["trainer.brand_new"]
    assert "ray_kwargs.*" in lines
    assert "trainer.test_freq" in {line.name for line in others}


def test_names_of_dataclasses_are_read_with_those_that_they_hold_and_come_from():
    text = """
class Inner:
    rate: float = field(default=0.5, metadata={"help": "x"})

class PPOConfig:
    seed: int = 42

class RLVRConfig(PPOConfig):
    inner: Optional[Inner] = None
    rewards: dict[str, Inner] = field(default_factory=dict)

class AgenticConfig(PPOConfig):
    tags: list[str] = ["a"]
"""
    archive = _zipped({"roll/configs/base_config.py": text})
    assert dict(releases.roll(archive)) == {
        "inner.rate": "0.5",
        "rewards": "",
        "seed": "42",
        "tags": "[a]",
    }


def _zipped(files: dict[str, str]) -> zipfile.ZipFile:
    archive = zipfile.ZipFile(io.BytesIO(), "w")
    for name, text in files.items():
        archive.writestr(name, text)
    return archive


def _names_a_setting(text: str) -> bool:
    return any(name in setting_names() for name in [*named_in(text), text.partition(",")[0]])
