"""Files carry exactly the sender's bits, or say what is wrong with them."""

import errno
import json
import os
import random
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from actors.engines.hf.engine import SpareWeights
from streamrl.config.weights import WeightSettings
from streamrl.errors import WeightTransferError
from streamrl.types import FilesEndpoint, WeightUpdate, replace
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.transports import tensor_file
from streamrl.weights.transports.checksums import checksum, version_key
from streamrl.weights.transports.differences import SentVersion
from streamrl.weights.transports.files import FileSender, version_name
from streamrl.weights.transports.receive import TransferReceiver
from streamrl.weights.transports.shared_memory import SendBuffers
from streamrl.weights.transports.tensor_file import TensorFile
from tests.full_disk import files_no_larger_than

LIFE = "0123456789ab"
SECRET = bytes(range(32))


def small_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(300, 200), torch.nn.LayerNorm(200), torch.nn.Linear(200, 7)]
    return torch.nn.Sequential(*layers)


def key_of(version: int) -> bytes:
    return version_key(SECRET, version_name(LIFE, version))


class Learner:
    """Parameters that are stepped and sent through files."""

    def __init__(self, folder: Path, dtype: torch.dtype | None = None, **settings: object) -> None:
        self.folder = folder
        self.master = {n: p.detach().clone() for n, p in small_model().named_parameters()}
        chosen = {"transport": "files", "bucket_bytes": 100_000, "deadline_s": 5, **settings}
        config = WeightSettings.model_validate(chosen)
        self.layout = Layout(manifest_of(self.master, dtype), config.bucket_bytes)
        self.buffers = SendBuffers(self.layout, "cpu")
        sent = SentVersion(config, self.layout, lambda v: version_name(LIFE, v), key_of)
        self.files = FileSender(config, self.layout, folder, LIFE, key_of, sent)

    def step(self, lr: float) -> None:
        """As Adam's: about lr, whatever the gradient."""
        for parameter in self.master.values():
            parameter += lr * torch.randn_like(parameter)

    def write(self, version: int, **held: int) -> dict[str, WeightUpdate]:
        self.buffers.write(self.master, version)
        with self.buffers.reading() as newest:
            assert newest is not None
            endpoints = self.files.write(version, newest.data, held)
        return {name: self.update(version, endpoint) for name, endpoint in endpoints.items()}

    def update(self, version: int, endpoint: FilesEndpoint) -> WeightUpdate:
        return WeightUpdate(
            policy_version=version,
            learner_id=LIFE,
            manifest=self.layout.manifest,
            endpoint=endpoint,
            key=key_of(version),
        )

    def bits(self) -> dict[str, torch.Tensor]:
        """The newest version as receivers should have it."""
        with self.buffers.reading() as newest:
            assert newest is not None
            return {s.spec.name: s.read(s.of(newest.data)).clone() for s in self.layout.slots}


class Copying:
    """A receiver without memory of its own for an update."""

    def __init__(self) -> None:
        self.transfer = TransferReceiver()
        self.weights: dict[str, torch.Tensor] = {}

    def load(self, update: WeightUpdate) -> None:
        self.weights = {name: t.clone() for name, t in self.transfer.tensors(update)}


class InPlace:
    """A receiver that stages and swaps as the HF engine does."""

    def __init__(self) -> None:
        self.transfer = TransferReceiver()
        self.model = small_model(seed=1).to(torch.bfloat16)
        self.spare = SpareWeights(self.model)

    def load(self, update: WeightUpdate) -> None:
        landing = self.spare.landing(update.manifest)
        self.spare.stage(self.transfer.tensors(update, landing))
        self.spare.swap()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


def is_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == expected.keys() and all(
        torch.equal(weights[name].float(), expected[name].float()) for name in expected
    )


def is_delta(update: WeightUpdate) -> bool:
    return ".delta." in Path(update.endpoint.path).name


@pytest.mark.parametrize("make", [Copying, InPlace])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, None])
def test_differences_give_exactly_the_senders_bits(tmp_path, make, dtype):
    learner, receiver = Learner(tmp_path, dtype, delta=True), make()
    has, kinds = -1, []
    for version in range(1, 6):
        learner.step(1e-3)
        update = learner.write(version, a=has)["a"]
        receiver.load(update)
        expected = learner.bits()
        if make is InPlace:
            expected = {name: tensor.bfloat16() for name, tensor in expected.items()}
        assert is_equal(receiver.weights, expected)
        learner.files.on_answers({"a"}, set())
        kinds.append(is_delta(update))
        has = version
    assert kinds == [False, True, True, True, True]


def test_a_small_step_in_bfloat16_costs_a_small_part_of_the_bytes(tmp_path):
    """A learning rate of 1e-6 against weights of about 0.03: as reinforcement learning has it."""
    learner, receiver = Learner(tmp_path, torch.bfloat16, delta=True), Copying()
    whole = learner.write(1, a=-1)["a"]
    receiver.load(whole)
    before = learner.bits()
    learner.step(1e-6)
    update = learner.write(2, a=1)["a"]
    receiver.load(update)
    after = learner.bits()
    changed = sum(int((after[name] != before[name]).sum()) for name in after)
    sizes = [os.path.getsize(u.endpoint.path) for u in (whole, update)]
    share = changed / sum(t.numel() for t in after.values())
    print(f"{share:.2%} of the weights changed; {sizes[1] / sizes[0]:.2%} of the bytes sent")
    assert 0 < share < 0.1
    assert sizes[1] < sizes[0] / 10
    assert is_equal(receiver.weights, after)


def test_everyone_gets_a_whole_file_after_so_many_differences(tmp_path):
    learner = Learner(tmp_path, delta=True, full_every=2)
    kinds = [is_delta(learner.write(version, a=version - 1)["a"]) for version in range(1, 8)]
    assert kinds == [False, True, True, False, True, True, False]


def test_whoever_lacks_the_version_before_gets_a_whole_file_and_the_others_do_not(tmp_path):
    learner = Learner(tmp_path, delta=True)
    learner.write(1, a=-1, b=-1)
    learner.write(2, a=1)
    updates = learner.write(3, a=2, b=1, new=-1)
    assert {name: is_delta(u) for name, u in updates.items()} == {"a": True, "b": 0, "new": 0}
    again = learner.write(3, late=-1)["late"]
    receiver = Copying()
    receiver.load(again)
    assert is_equal(receiver.weights, learner.bits())


def test_a_receiver_with_another_base_says_so_keeps_its_weights_and_gets_a_whole_file(tmp_path):
    learner, receiver = Learner(tmp_path, torch.bfloat16, delta=True), InPlace()
    receiver.load(learner.write(1, a=-1)["a"])
    learner.step(1e-3)
    update = learner.write(2, a=1)["a"]
    name, used = next(iter(receiver.weights.items()))
    used.view(-1)[0] += 1.0
    kept = {name: tensor.clone() for name, tensor in receiver.weights.items()}
    with pytest.raises(
        WeightTransferError, match=rf"{update.endpoint.path}.*sender's bytes.*{name}"
    ):
        receiver.load(update)
    assert is_equal(receiver.weights, kept)
    learner.files.on_answers(set(), {"a"})
    again = learner.write(2, a=1)["a"]
    assert not is_delta(again)
    receiver.load(again)
    assert is_equal(receiver.weights, learner.bits())
    learner.files.on_answers({"a"}, set())
    assert is_delta(learner.write(3, a=2)["a"])


def test_a_receiver_that_was_replaced_has_no_base(tmp_path):
    learner = Learner(tmp_path, delta=True)
    learner.write(1, a=-1)
    update = learner.write(2, a=1)["a"]
    with pytest.raises(WeightTransferError, match="here is nothing"):
        Copying().load(update)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def cut(path: Path, position: int) -> None:
    path.write_bytes(path.read_bytes()[:position])


def error_of(receiver: InPlace, update: WeightUpdate) -> str:
    try:
        receiver.load(update)
    except WeightTransferError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("damage", [flip, cut])
@pytest.mark.parametrize("delta", [False, True], ids=["whole", "delta"])
def test_a_damaged_file_gives_the_senders_bits_or_an_error_and_the_old_weights(
    tmp_path, damage: Callable[[Path, int], None], delta: bool
):
    """A bit of the header may mean nothing, such as the name of the format; any other counts."""
    learner = Learner(tmp_path, torch.bfloat16, delta=True)
    first = learner.write(1, a=-1)["a"]
    learner.step(1e-3)
    update = learner.write(2, a=1 if delta else -1)["a"]
    path = Path(update.endpoint.path)
    intact = path.read_bytes()
    positions = [0, 3, 9, 40, len(intact) - 1, *random.Random(0).sample(range(len(intact)), 12)]
    harmless = []
    for position in positions:
        receiver = InPlace()
        receiver.load(first)
        kept = {name: tensor.clone() for name, tensor in receiver.weights.items()}
        damage(path, position)
        error = error_of(receiver, update)
        if not error:
            harmless.append(position)
        assert not error or str(path) in error
        assert is_equal(receiver.weights, kept if error else learner.bits()), position
        path.write_bytes(intact)
    assert not [position for position in harmless if damage is cut or position > 100]


def forge(path: Path, known: bytes) -> None:
    """As who knows the format, but not the key: another tensor, and a checksum of it."""
    name, *_ = load_file(path)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    header = json.loads(path.read_bytes()[8 : 8 + length])
    start, stop = header[name]["data_offsets"]
    data = bytearray(path.read_bytes())
    data[8 + length + start : 8 + length + stop] = bytes(stop - start)
    forged = checksum(name, torch.zeros(stop - start, dtype=torch.uint8), known)
    sums = header["__metadata__"]["checksums"]
    at = data.index(sums.encode())
    data[at : at + 16] = forged.hex().encode()
    path.write_bytes(data)


@pytest.mark.parametrize("known", [b"", version_key(SECRET, version_name(LIFE, 2))])
def test_a_file_that_somebody_wrote_anew_is_refused_without_the_key(tmp_path, known):
    """Nor does the key of another version help."""
    learner, receiver = Learner(tmp_path), InPlace()
    kept = {name: tensor.clone() for name, tensor in receiver.weights.items()}
    update = learner.write(1, a=-1)["a"]
    forge(Path(update.endpoint.path), known)
    with pytest.raises(
        WeightTransferError, match=r"checksum of 0\.weight from .* is not the sender"
    ):
        receiver.load(update)
    assert is_equal(receiver.weights, kept)
    forge(Path(update.endpoint.path), update.key)
    Copying().load(update)
    learner.files.on_answers(set(), {"a"})
    receiver.load(learner.write(1, a=-1)["a"])
    assert is_equal(receiver.weights, {n: t.bfloat16() for n, t in learner.bits().items()})


def test_an_older_version_is_not_taken_for_a_newer_one(tmp_path):
    learner = Learner(tmp_path)
    older = Path(learner.write(1, a=-1)["a"].endpoint.path)
    update = learner.write(2, a=-1)["a"]
    Path(update.endpoint.path).write_bytes(older.read_bytes())
    with pytest.raises(WeightTransferError, match="is not the sender's"):
        Copying().load(update)


def test_a_difference_that_lacks_a_bucket_is_refused(tmp_path):
    """A bucket that is left out is that of the base, which is not what the sender had."""
    learner, receiver = Learner(tmp_path, torch.bfloat16, delta=True), InPlace()
    receiver.load(learner.write(1, a=-1)["a"])
    learner.step(1e-3)
    update = learner.write(2, a=1)["a"]
    path = Path(update.endpoint.path)
    with TensorFile(path) as file:
        metadata, frame = dict(file._metadata), file.read("1")
    tensor_file.write(path, {"1": frame}, metadata)
    with pytest.raises(WeightTransferError, match="does not give the sender's bytes: bucket 0"):
        receiver.load(update)


def test_files_are_for_their_owner_alone(tmp_path):
    folder = tmp_path / "weights"
    update = Learner(folder).write(1, a=-1)["a"]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, Path(update.endpoint.path))]
    assert modes == [0o700, 0o600]


def test_a_whole_file_is_plain_safetensors(tmp_path):
    learner = Learner(tmp_path, torch.float8_e4m3fn)
    update = learner.write(1, a=-1)["a"]
    held = load_file(update.endpoint.path)
    matrix = (
        held["0.weight"].float()
        * held["0.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    )
    assert torch.equal(matrix, learner.bits()["0.weight"].float())
    assert torch.equal(held["0.bias"], learner.bits()["0.bias"])


def test_files_go_when_nobody_needs_them_and_stay_while_one_reads(tmp_path):
    (tmp_path / "of-an-earlier-life-00000007.safetensors").write_bytes(b"old")
    (tmp_path / f"{LIFE}-00000009.safetensors.unfinished").write_bytes(b"half")
    learner = Learner(tmp_path, delta=True)
    slow = learner.write(1, slow=-1, a=-1)["slow"]
    learner.files.on_answers({"a"}, set())
    for version in range(2, 6):
        learner.write(version, a=version - 1)
        learner.files.on_answers({"a"}, set())
    left = {path.name for path in tmp_path.iterdir()}
    newest = {f"{LIFE}-0000000{v}.delta.safetensors" for v in (4, 5)}
    assert left == {Path(slow.endpoint.path).name, *newest}
    learner.files.on_answers({"slow"}, set())
    assert {path.name for path in tmp_path.iterdir()} == newest


async def test_a_full_disk_is_said_once_and_tried_again_less_and_less_often(
    tmp_path, monkeypatch, caplog
):
    learner, now_s, tried_s = Learner(tmp_path), 0.0, []
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("streamrl.weights.transports.files.time", clock)
    write = learner.files.write

    def watched(*arguments):
        tried_s.append(now_s)
        return write(*arguments)

    monkeypatch.setattr(learner.files, "write", watched)
    learner.buffers.write(learner.master, 1)
    with learner.buffers.reading() as newest:
        assert newest is not None
        with files_no_larger_than(1_000):
            while now_s < 60:
                assert await learner.files.offer(1, newest.data, {"generator": -1}) == {}
                now_s += 1
        assert list(tmp_path.iterdir()) == []
        assert tried_s == [0, 2, 6, 14, 30]
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "cannot be written: [Errno 27]" in learner.files.failure
        assert await learner.files.offer(1, newest.data, {"generator": -1})
        assert learner.files.failure == ""


def test_a_file_that_cannot_be_removed_stays_and_harms_nothing(tmp_path, monkeypatch, caplog):
    learner, unlink = Learner(tmp_path), Path.unlink

    def is_busy(path: Path, missing_ok: bool = False) -> None:
        if path.name == f"{LIFE}-00000001.safetensors":
            raise OSError(errno.EBUSY, "Device or resource busy")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", is_busy)
    for version in range(1, 5):
        learner.write(version, a=version - 1)
        learner.files.on_answers({"a"}, set())
    left = {f"{LIFE}-0000000{version}.safetensors" for version in (1, 3, 4)}
    assert {path.name for path in tmp_path.iterdir()} == left
    learner.files.close()
    assert [path.name for path in tmp_path.iterdir()] == [f"{LIFE}-00000001.safetensors"]
    assert "00000001.safetensors cannot be removed: Device or resource busy" in caplog.text


def test_a_file_of_another_model_is_refused(tmp_path):
    learner = Learner(tmp_path)
    update = learner.write(1, a=-1)["a"]
    other = manifest_of({**learner.master, "0.weight": torch.zeros(2, 3)})
    wrong = replace(update, manifest=other)
    with pytest.raises(WeightTransferError, match=r"holds 0\.weight as F32 \(200, 300\)"):
        Copying().load(wrong)


def test_a_learner_that_ends_leaves_no_file_of_its_own(tmp_path):
    learner = Learner(tmp_path, delta=True)
    learner.write(1, a=-1)
    learner.step(1e-3)
    learner.write(2, a=1)
    other = tmp_path / "other-00000001.safetensors"
    other.write_bytes(b"")
    assert len(list(tmp_path.iterdir())) > 2
    learner.files.close()
    assert [*tmp_path.iterdir()] == [other]
