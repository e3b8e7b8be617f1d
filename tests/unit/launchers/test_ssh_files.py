"""What is copied to which host, what comes back, and what `--hosts` says."""

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.launchers import chosen
from streamrl.cli.launchers.hosts import with_hosts
from streamrl.cli.launchers.ssh.agent import files as agent_files
from streamrl.cli.launchers.ssh.agent.folder import enter
from streamrl.cli.launchers.ssh.agent.growing import GrowingFiles
from streamrl.cli.launchers.ssh.files import copy, needed
from streamrl.cli.launchers.ssh.frames import Compare, Differing, Join, Part, Stat
from streamrl.cli.launchers.ssh.gathered import sizes_of, write_part
from streamrl.cli.launchers.ssh.hosts import patterns_of
from streamrl.cli.launchers.ssh.launch import require_steps
from streamrl.cli.launchers.ssh.secrets import with_keys, write_secrets
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, DamagedCheckpointError
from streamrl.placement.assign import make_plan
from streamrl.placement.hosts import hosts_of

HOSTS = [
    {"name": "a", "address": "10.9.0.1", "ssh": "a", "devices": 0, "roles": ["buffer", "learner"]},
    {"name": "b", "address": "10.9.0.2", "ssh": "b", "devices": 0, "roles": ["generator"]},
]


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of the files that stand in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("models/mine/a.safetensors", "code/reward.py", "code/beside.py", "other.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    Path("rows.jsonl").write_text("{}\n")
    return RunConfig.model_validate(
        {
            "model": {"path": "models/mine"},
            "data": {"source": str(tmp_path / "rows.jsonl"), "reward": "code/reward.py:score"},
            "generator": {"count": 1},
            "cluster": {"hosts": HOSTS},
        }
    )


def test_each_host_gets_what_its_processes_read_and_no_more(given: RunConfig, tmp_path: Path):
    config = with_keys(given)
    plan = make_plan(config, hosts_of(config))
    learner, generator = needed(plan, "a"), needed(plan, "b")
    copied = ["code/beside.py", "code/reward.py", "models/mine/a.safetensors"]
    assert [str(path) for path in generator.relative] == copied
    assert list(generator.absolute) == [str(tmp_path / "rows.jsonl")]
    keys = {path.name for path in generator.secrets}
    assert keys == {"client.public", "client.secret", "server.public"}
    assert {path.name for path in learner.secrets} == keys | {"server.secret"}


def test_long_texts_are_no_paths_and_a_checkpoint_to_begin_with_goes_to_the_learner(
    given: RunConfig,
):
    checkpoint = Path("runs/old/checkpoints/step-5/state.pt")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("weights")
    data = given.data.model_copy(update={"system_prompt": "You are careful. " * 40})
    run = given.run.model_copy(update={"resume": checkpoint.parent})
    config = with_keys(given.model_copy(update={"data": data, "run": run}))
    plan = make_plan(config, hosts_of(config))
    assert checkpoint in needed(plan, "a").relative
    assert checkpoint not in needed(plan, "b").relative


@pytest.mark.parametrize("folder", [Path("runs/run"), Path("/nowhere/run")])
def test_a_checkpoint_that_only_the_hosts_have_is_theirs_to_check(given: RunConfig, folder: Path):
    run = given.run.model_copy(update={"resume": folder / "checkpoints" / "step-00000005"})
    config = with_keys(given.model_copy(update={"run": run}))
    require_steps(config, Namespace(resume=True, new=False))
    absolute = needed(make_plan(config, hosts_of(config)), "a").absolute
    assert not any("checkpoints" in path for path in absolute)


def test_a_path_that_leads_out_of_the_working_folder_is_not_copied(given: RunConfig):
    Path("../rows.jsonl").write_text("{}\n")
    data = given.data.model_copy(update={"source": "../rows.jsonl"})
    plan = make_plan(with_keys(given.model_copy(update={"data": data})), hosts_of(given))
    (path,) = needed(plan, "b").absolute

    class Lacking:
        def send(self, _: Compare) -> None: ...

        async def answer(self, _: type[Differing]) -> Differing:
            return Differing(missing=(path,))

    sentence = r"\.\./rows\.jsonl is not there; a relative path that stays below the working"
    with pytest.raises(ConfigError, match=sentence):
        asyncio.run(copy(Lacking(), plan, "b", shares_folder=True))  # type: ignore[arg-type]


def test_a_checkpoint_that_is_here_is_checked_before_the_hosts_are_reached(given: RunConfig):
    Path("here").mkdir()
    run = given.run.model_copy(update={"resume": Path("here")})
    with pytest.raises(DamagedCheckpointError):
        require_steps(given.model_copy(update={"run": run}), Namespace(resume=True, new=False))


def test_keys_are_made_once_or_taken_from_the_configuration(given: RunConfig):
    write_secrets(given)
    folder = given.run.path / "keys"
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    write_secrets(given)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == made
    missing = given.buffer.model_copy(update={"curve": Path("no-keys")})
    with pytest.raises(ConfigError, match=r"^cannot read no-keys/server.public: No such file"):
        write_secrets(given.model_copy(update={"buffer": missing}))


def test_a_file_on_a_host_has_its_name_when_it_is_whole(tmp_path: Path):
    path = tmp_path / "keys" / "client.secret"
    agent_files.write(Part(path=str(path), mode=0o600), b"half")
    assert not path.exists()
    agent_files.write(Part(path=str(path), offset=4, is_last=True, mode=0o600, mtime_s=7), b"!")
    assert path.read_bytes() == b"half!"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    same, other = Stat(str(path), 5, 7), Stat(str(path), 6, 7)
    answer = agent_files.compare(Compare(files=(same, other), required=("/", "/no/such")))
    assert (answer.paths, answer.missing) == ((str(path),), ("/no/such",))


async def test_logs_and_records_come_from_the_hosts_however_they_change(tmp_path: Path):
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "logs").mkdir(parents=True)
    here.mkdir()
    patterns, sent = ("logs/x.log", "*.jsonl"), []

    async def send(part: Part, body: bytes) -> None:
        sent.append(len(body))
        write_part(here, part, body)

    growing = GrowingFiles(there, patterns, {}, send)
    log, records = there / "logs/x.log", there / "metrics.jsonl"
    (there / "logs/y.log").write_text("not asked for")
    for content, cut in (("one\n", "1\n2\n3\n"), ("one\ntwo\n", "1\n"), ("one\ntwo\n", "1\n2\n")):
        log.write_text(content)
        records.write_text(cut)
        await growing.send_new()
        assert (here / "logs/x.log").read_text() == content
        assert (here / "metrics.jsonl").read_text() == cut
    assert not (here / "logs/y.log").exists()
    assert sizes_of(here, patterns) == {"logs/x.log": 8}
    sent.clear()
    await GrowingFiles(there, patterns, sizes_of(here, patterns), send).send_new()
    assert sum(sent) == len("1\n2\n"), "of logs only what is new"
    with pytest.raises(ValueError, match="which is not below"):
        write_part(here, Part(path="../escaped"), b"x")


def test_the_launcher_wants_logs_of_all_hosts_and_records_of_the_learner(given: RunConfig):
    config = with_keys(given)
    plan = make_plan(config, hosts_of(config))
    assert patterns_of(plan, "b") == ("logs/generator-0.log",)
    assert {"logs/buffer.log", "logs/learner.log", "*.jsonl"} <= set(patterns_of(plan, "a"))


def test_an_older_run_on_a_host_is_moved_aside_once_unless_it_goes_on(tmp_path: Path):
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    resumed = Join(folder=str(folder), launch_id="1", resume=True)
    assert enter(folder, resumed) is False
    assert (folder / "metrics.jsonl").exists()
    for _ in range(2):
        assert enter(folder, Join(folder=str(folder), launch_id="2")) is False
        assert len(list(folder.parent.iterdir())) == 2
    assert not (folder / "metrics.jsonl").exists()
    (folder / "launch.id").write_text("3")
    assert enter(folder, Join(folder=str(folder), launch_id="3")) is True


@pytest.mark.parametrize(
    ("hosts", "settings"),
    [
        ("a", '[{"name": "a", "ssh": "a"}]'),
        (
            "me@10.0.0.1:8, b:0",
            '[{"name": "10.0.0.1", "ssh": "me@10.0.0.1", "devices": 8}, '
            '{"name": "b", "ssh": "b", "devices": 0}]',
        ),
    ],
)
def test_hosts_is_short_for_a_setting(hosts, settings):
    changed = with_hosts(Namespace(hosts=hosts, overrides=["run.name=x"]))
    assert changed.overrides == ["run.name=x", f"cluster.hosts={settings}"]


@pytest.mark.parametrize("hosts", ["a,", "a:x", "me@", "fe80::1"])
def test_what_is_no_host_is_refused(hosts):
    with pytest.raises(ConfigError, match=r"^--hosts: was '.*a host is \[user@\]host\[:devices\]"):
        with_hosts(Namespace(hosts=hosts, overrides=[]))


def test_hosts_choose_the_launcher(given: RunConfig):
    nothing: dict[str, Any] = {"slurm": False, "k8s": False}
    assert chosen(given, Namespace(**nothing)) == "ssh"
    alone = given.model_copy(update={"cluster": given.cluster.model_copy(update={"hosts": ()})})
    assert chosen(alone, Namespace(**nothing)) == ""
    assert chosen(None, Namespace(**nothing)) == ""
