"""Generators follow a store without a connection to the learner, bit for bit, or keep what they
have; what a reader may need is there."""

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import IO

import pytest
import torch
from huggingface_hub import BucketFile, HfApi, hf_file_system
from huggingface_hub.utils import XetFileData
from pydantic import ValidationError

from streamrl.config.loading.load import load_config
from streamrl.config.weights import WeightSettings
from streamrl.errors import ConfigError, TransportError, WeightTransferError
from streamrl.object_store import StoreFolder
from streamrl.types import LoadReport, WeightUpdate
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.receiver import StoreReceiver
from streamrl.weights.transports import store as store_module
from streamrl.weights.transports.receive import TransferReceiver
from streamrl.weights.transports.shared_memory import SendBuffers
from streamrl.weights.transports.store import ObjectStore, StoreReader, StoreSender
from tests.unit.weights.update_run import parameters, run
from tests.waiting import until

SHAPES = {"embed": (500, 64), "norm": (7,), "head": (64, 500)}


class Learner:
    """Its parameters in bfloat16, in a store."""

    def __init__(self, folder: Path, learner_id: str = "a", **settings: object) -> None:
        torch.manual_seed(0)
        self.master = {n: 0.04 * torch.randn(shape) for n, shape in SHAPES.items()}
        chosen = {"store": f"file://{folder}/store", **settings}
        config = WeightSettings.model_validate(chosen)
        self.folder = folder / "store" / "run"
        self.store = ObjectStore(str(chosen["store"]), "run")
        self.layout = Layout(manifest_of(self.master, torch.bfloat16), 40_000)
        self.buffers = SendBuffers(self.layout, "cpu")
        own = folder / f"learner-{learner_id}"
        self.sender = StoreSender(config, self.store, self.layout, own, learner_id, bytes(32))
        self.version = 0

    def publish(self, lr: float = 1e-6) -> bool:
        """A step, and its version in the store; whether it is there."""
        for parameter in self.master.values():
            parameter += lr * torch.randn_like(parameter)
        self.version += 1
        self.buffers.write(self.master, self.version)
        with self.buffers.reading() as newest:
            assert newest is not None
            assert self.sender.wants(self.version)
            stored = self.sender.begin(self.version, newest.data)
        if stored is not None:
            self.sender.finish(stored)
        return self.sender.stored == self.version

    def kinds(self) -> list[bool]:
        """Whether each of the chain is a difference."""
        manifest = self.store.manifest()
        assert manifest is not None
        return [stored.is_delta for stored in manifest.chain]

    def objects(self) -> set[str]:
        return {path.name for path in self.folder.glob("*.safetensors")}


class Generator:
    """What a reader gets, as an engine reads it."""

    def __init__(self, folder: Path, learner: Learner, name: str = "gen-0") -> None:
        self.reader = StoreReader(learner.store, folder / "generator", name)
        self.transfer = TransferReceiver()
        self.known: tuple[str, int] | None = None
        self.weights: dict[str, torch.Tensor] = {}

    def load(self) -> bool:
        """The newest version, if there is a newer one."""
        update = self.reader.newest(self.known)
        if update is None:
            return False
        self.weights = {name: t.clone() for name, t in self.transfer.tensors(update)}
        self.known = (update.learner_id, update.policy_version)
        return True

    def has(self, learner: Learner) -> bool:
        """Exactly the learner's bits."""
        expected = {name: t.bfloat16() for name, t in learner.master.items()}
        return self.weights.keys() == expected.keys() and all(
            torch.equal(self.weights[n].view(torch.int16), expected[n].view(torch.int16))
            for n in expected
        )


def test_a_generator_follows_by_differences_to_exactly_the_learners_bits(tmp_path):
    learner = Learner(tmp_path)
    generator = Generator(tmp_path, learner)
    assert not generator.load()
    for _ in range(4):
        assert learner.publish()
        assert generator.load()
        assert generator.has(learner)
        assert not generator.load()
    assert learner.kinds() == [False, True, True, True]
    whole, delta = (max((tmp_path / "store").rglob(f"*.{k}.*")).stat() for k in ("whole", "delta"))
    assert delta.st_size < whole.st_size / 10


def test_a_learner_that_was_taken_over_replaces_no_version_of_its_successor(tmp_path):
    """Its upload may end after the first one of the successor, whose generators would wait."""
    older, learner = Learner(tmp_path, "older"), Learner(tmp_path, "newer")
    older.sender._survives = lambda: False
    assert learner.publish()
    assert not older.publish()
    generator = Generator(tmp_path, learner)
    assert generator.load()
    assert generator.known == ("newer", 1)


def test_a_learner_that_does_not_know_of_its_successor_removes_nothing_of_it(tmp_path):
    older, learner = Learner(tmp_path, "older"), Learner(tmp_path, "newer")
    assert older.publish()
    assert learner.publish()
    assert learner.publish()
    there = learner.objects()
    assert older.publish()
    assert older.publish(lr=1.0)
    assert there <= learner.objects()


def test_who_missed_versions_takes_what_it_lacks_and_who_has_none_the_whole_one(tmp_path):
    learner = Learner(tmp_path)
    generator = Generator(tmp_path, learner)
    learner.publish()
    generator.load()
    for _ in range(3):
        learner.publish()
    removed = next(learner.folder.glob("*.whole.*"))
    kept = removed.rename(tmp_path / "kept")
    assert generator.load()
    assert generator.has(learner)
    late = Generator(tmp_path, learner, "late")
    with pytest.raises(WeightTransferError, match=r"00000001\.whole\.safetensors is gone"):
        late.load()
    kept.rename(removed)
    assert late.load()
    assert late.has(learner)


@pytest.mark.parametrize("seed", range(5))
def test_what_a_reader_of_the_manifest_needs_is_always_there(tmp_path, seed):
    """Readers come at any time, in two lives of a learner, and also with the manifest before."""
    choose = random.Random(seed)
    learner = Learner(tmp_path, full_every=3)
    readers = [Generator(tmp_path, learner, f"gen-{i}") for i in range(3)]
    previous: set[str] = set()
    most = 0
    for step in range(40):
        if step == 20:
            learner = Learner(tmp_path, "b", full_every=3)
        learner.publish(lr=choose.choice([1e-6, 1e-6, 1e-2]))
        manifest = learner.store.manifest()
        assert manifest is not None
        assert manifest.names | previous <= learner.objects()
        previous = manifest.names
        most = max(most, len(learner.objects()))
        for reader in readers:
            if choose.random() < 0.3:
                reader.load()
                assert reader.has(learner)
    assert most <= 2 * 4


def test_what_others_have_put_there_stays(tmp_path):
    learner = Learner(tmp_path, full_every=1)
    learner.folder.mkdir(parents=True)
    (learner.folder / "model.safetensors").write_text("mine")
    for _ in range(8):
        learner.publish()
    assert (learner.folder / "model.safetensors").read_text() == "mine"
    assert len(learner.objects()) <= 5


def test_objects_that_somebody_has_removed_cost_one_whole_version(tmp_path, monkeypatch):
    """As a rule of the store's for old objects would."""
    learner = Learner(tmp_path)
    for _ in range(2):
        learner.publish()
    next(learner.folder.glob("*.whole.*")).unlink()
    assert not learner.publish()
    assert "whole.safetensors was removed by another process" in learner.sender.sentence()
    monkeypatch.setattr(learner.sender, "_retry_s", 0.0)
    assert learner.publish()
    generator = Generator(tmp_path, learner)
    assert generator.load()
    assert generator.has(learner)


def test_a_change_that_is_too_large_is_stored_as_a_whole_version(tmp_path):
    learner = Learner(tmp_path)
    generator = Generator(tmp_path, learner)
    for lr in (1e-6, 1e-6, 1.0, 1e-6):
        learner.publish(lr)
        generator.load()
        assert generator.has(learner)
    assert learner.version == 4
    assert learner.kinds() in ([False, True, True, True], [False, True])


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def test_a_damaged_difference_costs_versions_until_the_next_whole_one(tmp_path):
    learner = Learner(tmp_path, full_every=2)
    generator = Generator(tmp_path, learner)
    learner.publish()
    generator.load()
    before = {name: t.clone() for name, t in generator.weights.items()}
    learner.publish()
    damage(next(learner.folder.glob("*.delta.*")))
    with pytest.raises(WeightTransferError, match=r"corrupt|sender's|differ"):
        generator.load()
    assert all(torch.equal(generator.weights[name], before[name]) for name in before)
    learner.publish()
    with pytest.raises(WeightTransferError):
        generator.load()
    learner.publish()
    assert learner.kinds() == [False]
    assert generator.load()
    assert generator.has(learner)


def test_a_reader_that_computes_another_checksum_takes_the_whole_version(tmp_path):
    learner = Learner(tmp_path)
    generator = Generator(tmp_path, learner)
    learner.publish()
    generator.load()
    learner.publish()
    assert generator.reader._memory is not None
    generator.reader._memory.data[1000] ^= 1
    assert generator.load()
    assert generator.has(learner)


@pytest.mark.parametrize("fails", ["put_file", "pipe_file", "mv"])
@pytest.mark.parametrize("in_the_middle", [False, True])
def test_what_is_half_written_is_never_read(tmp_path, monkeypatch, fails, in_the_middle):
    """The store refuses, or takes a half and then refuses; it is tried again with a later one."""
    learner = Learner(tmp_path)
    generator = Generator(tmp_path, learner)
    learner.publish()
    generator.load()
    real = getattr(learner.store._fs, fails)

    def half(source: str, target: str | bytes, **_: object) -> None:
        if in_the_middle and fails == "put_file":
            Path(str(target)).write_bytes(Path(source).read_bytes()[:-1000])
        elif in_the_middle and fails == "pipe_file":
            real(source, bytes(target)[:-10])
        elif in_the_middle:
            real(source, target)
        raise ConnectionResetError("reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(learner.store._fs, fails, half)
        before = learner.master["norm"].clone()
        assert not learner.publish()
    assert "reset by peer" in learner.sender.sentence()
    assert learner.sender.gauges["num_store_failures"] == 1
    is_moved = fails == "mv" and in_the_middle
    assert generator.load() is is_moved
    if not is_moved:
        assert torch.equal(generator.weights["norm"], before.bfloat16())
    monkeypatch.setattr(learner.sender, "_retry_s", 0.0)
    assert learner.publish()
    assert generator.load()
    assert generator.has(learner)
    assert "reset" not in learner.sender.sentence()


def test_a_manifest_that_is_no_manifest_is_refused_and_replaced(tmp_path):
    learner = Learner(tmp_path)
    generator = Generator(tmp_path, learner)
    learner.folder.mkdir(parents=True)
    for content in (
        "{",
        json.dumps({"format": 2}),
        json.dumps({"learner_id": "../x", "tensors": [], "bucket_bytes": 1, "chain": []}),
    ):
        (learner.folder / "newest.json").write_text(content)
        with pytest.raises(WeightTransferError, match=r"newest\.json is not readable"):
            generator.load()
    learner.publish()
    assert generator.load()
    assert generator.has(learner)


class Engine:
    """Loads what it is told to, without an address of the learner."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.fails = False
        self._transfer = TransferReceiver()

    async def load(self, update: WeightUpdate) -> LoadReport:
        if self.fails:
            raise WeightTransferError("told to fail")
        self.weights = {name: t.clone() for name, t in self._transfer.tensors(update)}
        self.versions.append(update.policy_version)
        return LoadReport(transfer_s=0.0, pause_s=0.0)


async def test_an_unreachable_store_costs_staleness_and_not_the_run(tmp_path, monkeypatch):
    """The sender publishes on, and so does who is near; once the store is back, so is a reader."""
    monkeypatch.setattr(store_module, "RETRY_S", 0.05)
    monkeypatch.setattr("streamrl.weights.receiver.POLL_S", 0.02)
    monkeypatch.setattr("streamrl.weights.receiver.MAX_POLL_S", 0.05)
    place = tmp_path / "store"
    async with run(tmp_path / "run", store=f"file://{place}") as started:
        near, _ = started.join("near")
        engine = Engine()
        store = ObjectStore(f"file://{place}", "run")
        far = StoreReceiver(store, tmp_path / "far", "far", engine.load)
        started.running.append(started._tasks.create_task(far.run()))
        started.publish(1, 1.0)
        await until(lambda: engine.versions[-1:] == [1])
        shutil.rmtree(place)
        place.write_text("a file, where the folder was")
        started.publish(2, 2.0)
        await until(lambda: near.has(2.0))
        await until(lambda: started.sender.gauges().get("num_store_failures", 0.0) > 1)
        assert "version 1 in file://" in started.sender.stored()
        assert not started.running[0].done()
        assert engine.versions[-1] == 1
        place.unlink()
        started.publish(3, 3.0)
        await until(lambda: engine.versions[-1:] == [3])
        assert all(torch.equal(t, torch.full_like(t, 3.0)) for t in engine.weights.values())
        engine.fails = True
        started.publish(4, 4.0)
        await asyncio.sleep(0.3)
        engine.fails = False
        await until(lambda: engine.versions[-1:] == [4])
        assert started.sender.gauges()["store_bytes"] > 0


async def test_versions_between_are_left_out_while_one_is_on_its_way(tmp_path, monkeypatch):
    put, going = ObjectStore.put, asyncio.Event()
    loop = asyncio.get_running_loop()
    names: list[str] = []

    def slow(self: ObjectStore, file: Path, name: str) -> None:
        names.append(name)
        asyncio.run_coroutine_threadsafe(going.wait(), loop).result()
        put(self, file, name)

    monkeypatch.setattr(ObjectStore, "put", slow)
    async with run(tmp_path / "run", store=f"file://{tmp_path}/store") as started:
        started.publish(1, 1.0)
        await until(lambda: len(names) == 1)
        for version in range(2, 6):
            started.publish(version, float(version))
            await asyncio.sleep(0.02)
        going.set()
        await until(lambda: started.sender.stored().startswith("version 5"))
        assert [name.split("-")[1][:8] for name in names] == ["00000001", "00000005"]
    assert parameters(0.0).keys()


@pytest.mark.parametrize(
    "store",
    [
        *(
            "ftp://host/x",
            "/tmp/x",
            "file://x/y",
            "s3://",
            "s3://key:word@bucket/x",
            "hf://user/model",
        ),
        *("hf://buckets/user", "hf://buckets/key:word@user/bucket/x", ""),
    ],
)
def test_another_store_is_refused_with_what_is_allowed(store):
    with pytest.raises(ValidationError, match=r"it must be a folder in a store, .*: s3://BUCKET/F"):
        WeightSettings.model_validate({"store": store})


@pytest.mark.parametrize("place", ["key:wo/rd@bucket/x", "bucket/x?secret=wo/rd"])
def test_a_store_that_is_refused_for_its_keys_shows_none_of_them(tmp_path, place):
    file = tmp_path / "run.yaml"
    settings = {"model": {"path": "m"}, "data": {"source": "addition"}}
    file.write_text(json.dumps({**settings, "weights": {"store": f"s3://{place}"}}))
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert "wo/rd" not in str(refused.value)
    assert "it must be a folder in a store, without user" in str(refused.value)


def test_the_transport_store_needs_a_store():
    with pytest.raises(ValidationError, match=r"transport store needs weights\.store"):
        WeightSettings.model_validate({"transport": "store"})


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gs")])
def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch, scheme, extra):
    monkeypatch.setitem(__import__("sys").modules, {"s3": "s3fs", "gs": "gcsfs"}[scheme], None)
    with pytest.raises(ConfigError, match=rf"weights\.store: .*pip install 'streamrl\[{extra}\]'"):
        ObjectStore(f"{scheme}://bucket/runs", "run")


def test_a_bucket_of_the_hub_that_refuses_costs_no_disk(tmp_path, monkeypatch):
    """What is tried again every few seconds leaves no copy of the weights behind."""
    taken: list[tuple[str, bytes]] = []
    refusals = [OSError("over the quota")]

    def batch(_: HfApi, bucket: str, *, add: list[tuple[Path | str, str]], **__: object) -> None:
        for source, place in add:
            if refusals:
                raise refusals.pop()
            taken.append((f"{bucket}: {place}", Path(source).read_bytes()))

    monkeypatch.setattr(HfApi, "bucket_info", lambda *_: None)
    monkeypatch.setattr(HfApi, "_batch_bucket_files", batch)
    temporary, file = tmp_path / "tmp", tmp_path / "file"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    file.write_bytes(b"weights")
    store = ObjectStore("hf://buckets/user/bucket/runs", "run")
    with pytest.raises(WeightTransferError, match=r"weights\.store hf://buckets/.* over the quota"):
        store.put(file, "a.safetensors")
    assert list(temporary.iterdir()) == []
    store.put(file, "a.safetensors")
    assert taken == [("user/bucket: runs/run/a.safetensors", b"weights")]


def test_an_object_that_came_after_a_listing_is_read(tmp_path, monkeypatch):
    """The hub's file system keeps what it has listed, whatever it is told."""
    objects = {"runs/run/first": b"one"}

    def listed(_: HfApi, __: str, prefix: str, **___: object) -> list[BucketFile]:
        assert prefix == "runs/run"
        told = {"type": "file", "mtime": None, "uploadedAt": None}
        return [BucketFile(path=p, size=len(c), xetHash=p, **told) for p, c in objects.items()]

    def xet_get(*, incomplete_path: Path, xet_file_data: XetFileData, **_: object) -> None:
        incomplete_path.write_bytes(objects[xet_file_data.file_hash])

    def http_get(*, temp_file: IO[bytes], displayed_filename: str, **_: object) -> None:
        temp_file.write(objects[displayed_filename.removeprefix("buckets/user/bucket/")])

    monkeypatch.setattr(HfApi, "bucket_info", lambda *_: None)
    monkeypatch.setattr(HfApi, "list_bucket_tree", listed)
    # The older releases of huggingface-hub have the second alone.
    for get in (xet_get, http_get):
        monkeypatch.setattr(hf_file_system, get.__name__, get, raising=False)
    store, file = StoreFolder("weights.store", "hf://buckets/user/bucket/runs/run"), tmp_path / "f"
    store.get("first", file)
    objects["runs/run/second"] = b"two"
    store.get("second", file)
    assert file.read_bytes() == b"two"
    with pytest.raises(TransportError, match=r"weights\.store hf://.*: third is gone"):
        store.get("third", file)
