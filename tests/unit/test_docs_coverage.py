"""The table of verl's and ROLL's settings agrees with the settings and with `streamrl check`."""

import re
from collections import Counter
from pathlib import Path

from docs.coverage import STATUSES, entries
from docs.generate import pages
from streamrl.config import RunConfig
from streamrl.config.loading.foreign_names import FOREIGN_NAMES, find_foreign_name
from tests.settings import named_in, setting_names

ENTRIES = entries()
SYSTEMS = {entry.system for entry in ENTRIES}


def test_every_name_has_one_line_with_a_status_and_what_it_is_here():
    assert {entry.status for entry in ENTRIES} == set(STATUSES)
    assert all(entry.here and entry.section for entry in ENTRIES)
    twice = Counter((entry.system, entry.name) for entry in ENTRIES)
    assert [name for name, count in twice.items() if count > 1] == []


def test_every_name_that_check_knows_is_in_the_table_and_reads_alike():
    listed = {(entry.system, entry.name) for entry in ENTRIES}
    known = {(system, name) for system in SYSTEMS for name in FOREIGN_NAMES[system]}
    assert known - listed == set()
    differ = [
        name
        for system, name in known
        if (setting := FOREIGN_NAMES[system][name]) != name
        and find_foreign_name(name) != (system, setting)
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


def test_every_line_is_on_the_page():
    page = pages()["migration.md"]
    assert [entry.name for entry in ENTRIES if entry.name not in page] == []


def _names_a_setting(text: str) -> bool:
    return any(name in setting_names() for name in [*named_in(text), text.partition(",")[0]])
