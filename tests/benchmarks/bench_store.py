"""A version on a slow link: bytes and seconds, as a difference and whole, by store or broadcast.

    PYTHONPATH=. python tests/benchmarks/bench_store.py [--model FOLDER | --size 135m] [--steps 3]
        [--lr 1e-6] [--gbit 1.0] [--way store | broadcast] [--perturb]

Real steps: the gradient of a policy-gradient loss over random tokens, clipped, and AdamW on float32
parameters, which are published in bfloat16; or with `--perturb` every parameter by the learning
rate, up or down by chance, as Adam's first step is where no gradient is zero: the most that can
change. Without a folder the weights are random, in the shape
of SmolLM2-135M or Qwen2.5-0.5B. The link takes every byte to and from the store, or to the
receiver of a gloo broadcast, at so many Gbit/s,
one after the other, by sleeping for as long as a chunk is ahead of it. The transport and what both
ends do with a version are the real ones, and every version is compared bit by bit. `stored_s` is
from the snapshot to the manifest, `read_s` from there until an engine has every tensor; `encode_s`
is that of a broadcast's sender. `xor_bytes` is
what zstd makes of the whole XOR; `cpu_s` is of both ends, also what follows the manifest, and
`alone_s` adds the bytes over the link's rate: on a machine that others use it says more than the
seconds. One JSON line per step, and the
totals; nobody imports this.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import zstandard
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from streamrl.config.weights import WeightSettings
from streamrl.types import BroadcastEndpoint, WeightUpdate
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.transports import groups
from streamrl.weights.transports.broadcast import BroadcastSender
from streamrl.weights.transports.differences import SentVersion
from streamrl.weights.transports.files import version_name
from streamrl.weights.transports.receive import TransferReceiver
from streamrl.weights.transports.shared_memory import SendBuffers, Written
from streamrl.weights.transports.store import ObjectStore, StoreManifest, StoreReader, StoreSender

CHUNK = 2**20
SIZES = {
    "135m": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
        initializer_range=0.041666666666666664,
    ),
    "0.5b": Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
}


class Link(ObjectStore):
    """A folder that is as far away as the link is slow."""

    def __init__(self, folder: Path, bytes_per_s: float) -> None:
        super().__init__(f"file://{folder}", "run")
        self._bytes_per_s = bytes_per_s
        self.num_bytes = 0
        self.stored_s = 0.0

    def replace_manifest(self, manifest: StoreManifest) -> None:
        super().replace_manifest(manifest)
        self.stored_s = time.perf_counter()

    def put(self, file: Path, name: str, *, is_read: bool = False) -> None:
        assert not is_read, "of what both ends exchange only the manifest is read under its name"
        Path(self._place(name)).parent.mkdir(parents=True, exist_ok=True)
        self._copy(file, Path(self._place(name)))

    def get(self, name: str, file: Path) -> None:
        self._copy(Path(self._place(name)), file)

    def _copy(self, source: Path, target: Path) -> None:
        start_s, done = time.perf_counter(), 0
        with source.open("rb") as read, target.open("wb") as written:
            while chunk := read.read(CHUNK):
                written.write(chunk)
                done += len(chunk)
                ahead_s = done / self._bytes_per_s - (time.perf_counter() - start_s)
                time.sleep(max(0.0, ahead_s))
        self.num_bytes += done


class Stores:
    """A learner's end and a generator's, of which every version is whole or none but the first."""

    def __init__(self, folder: Path, layout: Layout, bytes_per_s: float, *, whole: bool) -> None:
        settings = WeightSettings.model_validate({"store": f"file://{folder}", "full_every": 1000})
        self._link, self._rate = Link(folder / "store", bytes_per_s), bytes_per_s
        self._sender = StoreSender(settings, self._link, layout, folder, "bench", bytes(32))
        self._reader = StoreReader(self._link, folder / "generator", "generator")
        self._transfer = TransferReceiver()
        self._known: tuple[str, int] | None = None
        self._whole = whole
        self.received: dict[str, torch.Tensor] = {}

    def take(self, held: Written) -> dict[str, float]:
        if self._whole:
            self._sender._base = None
            self._reader.forget()
        before, cpu_s, start_s = self._link.num_bytes, time.process_time(), time.perf_counter()
        stored = self._sender.begin(held.policy_version, held.data)
        assert stored is not None
        self._sender.finish(stored)
        stored_s, read_from_s = self._link.stored_s - start_s, time.perf_counter()
        update = self._reader.newest(self._known)
        assert update is not None
        landing = dict(self._transfer.tensors(update))
        read_s = time.perf_counter() - read_from_s
        self._known = (update.learner_id, update.policy_version)
        self.received = landing
        return {
            "bytes": stored.num_bytes,
            "through_the_link": self._link.num_bytes - before,
            "stored_s": round(stored_s, 3),
            "read_s": round(read_s, 3),
            "total_s": round(stored_s + read_s, 3),
            **without_others(
                time.process_time() - cpu_s, self._link.num_bytes - before, self._rate
            ),
        }


class SlowSender(BroadcastSender):
    """Its groups are as far away as the link is slow."""

    bytes_per_s = 0.0
    num_bytes = 0

    def _join(self, endpoint: BroadcastEndpoint, device: torch.device) -> groups.BroadcastGroup:
        group = super()._join(endpoint, device)
        start = group.start

        def later(tensor: torch.Tensor) -> groups.Broadcast:
            time.sleep(len(tensor) / self.bytes_per_s)
            self.num_bytes += len(tensor)
            return start(tensor)

        group.start = later  # type: ignore[method-assign]
        return group


class Broadcasts:
    """Both ends of a gloo broadcast, of which every version is whole or none but the first."""

    def __init__(self, folder: Path, layout: Layout, bytes_per_s: float, *, whole: bool) -> None:
        del folder
        settings = WeightSettings(
            backend="gloo", delta=not whole, full_every=1000, deadline_s=2400.0
        )
        self._layout, self._landing = layout, torch.zeros(layout.num_bytes, dtype=torch.uint8)
        self._sent = SentVersion(
            settings, layout, lambda version: version_name("bench", version), lambda _: bytes(40)
        )
        self._sender = SlowSender(settings, "127.0.0.1", torch.device("cpu"))
        self._sender.bytes_per_s = bytes_per_s
        self._transfer = TransferReceiver()
        self.received: dict[str, torch.Tensor] = {}

    def take(self, held: Written) -> dict[str, float]:
        before, cpu_s, start_s = self._sender.num_bytes, time.process_time(), time.perf_counter()
        version, data = held.policy_version, held.data
        difference, _ = self._sent.difference_to(version, data, {"a": version - 1})
        encode_s = time.perf_counter() - start_s
        endpoint = self._sender.endpoints({"a": 1}, "gloo", verify=True, difference=difference)["a"]
        update = WeightUpdate(
            policy_version=version,
            learner_id="bench",
            manifest=self._layout.manifest,
            endpoint=endpoint,
            key=bytes(40),
        )
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(
                self._sender.send, endpoint, self._layout, data, bytes(40), difference
            )
            self.received = dict(self._transfer.tensors(update, self._landing))
            sending.result()
        return {
            "bytes": self._sender.num_bytes - before,
            "encode_s": round(encode_s, 3),
            "total_s": round(time.perf_counter() - start_s, 3),
            **without_others(
                time.process_time() - cpu_s,
                self._sender.num_bytes - before,
                self._sender.bytes_per_s,
            ),
        }


def without_others(cpu_s: float, num_bytes: int, bytes_per_s: float) -> dict[str, float]:
    """What all of it takes on one core that nobody else uses, one thing after the other."""
    return {"cpu_s": round(cpu_s, 3), "alone_s": round(cpu_s + num_bytes / bytes_per_s, 3)}


class Steps:
    """A model in float32 and its optimizer."""

    def __init__(self, model: Path | None, size: str, lr: float, *, perturb: bool) -> None:
        torch.manual_seed(0)
        self.model = (
            AutoModelForCausalLM.from_config(SIZES[size], dtype=torch.float32)
            if model is None
            else AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        )
        self._lr, self._perturb = lr, perturb
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def step(self) -> None:
        """Four sequences whose advantages are random; or by chance."""
        if self._perturb:
            for parameter in self.model.parameters():
                direction = torch.empty_like(parameter).uniform_(-1, 1).sign_()
                parameter.data.add_(direction, alpha=self._lr)
            return
        tokens = torch.randint(self.model.config.vocab_size, (4, 32))
        advantages = torch.randn(4)
        logits = self.model(tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), tokens[:, 1:], reduction="none"
        )
        (loss.mean(1) * advantages).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


WAYS: Mapping[str, type[Stores] | type[Broadcasts]] = {"store": Stores, "broadcast": Broadcasts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--size", choices=SIZES, default="135m")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--way", choices=WAYS, default="store")
    parser.add_argument("--perturb", action="store_true")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        report(arguments, Path(folder))


def report(arguments: argparse.Namespace, folder: Path) -> None:
    steps = Steps(arguments.model, arguments.size, arguments.lr, perturb=arguments.perturb)
    layout = Layout(manifest_of(steps.parameters(), torch.bfloat16), 2**28)
    buffers = SendBuffers(layout, "cpu")
    rate = arguments.gbit * 1e9 / 8
    way = WAYS[arguments.way]
    whole = way(folder / "whole", layout, rate, whole=True)
    delta = way(folder / "delta", layout, rate, whole=False)
    model = str(arguments.model.name) if arguments.model else f"random, {arguments.size}"
    about = {"benchmark": arguments.way, "model": model, "perturbed": arguments.perturb}
    about = {**about, "lr": arguments.lr, "gbit": arguments.gbit}
    lines: list[dict[str, Any]] = []
    before: torch.Tensor | None = None
    for version in range(arguments.steps + 1):
        if version:
            steps.step()
        buffers.write(steps.parameters(), version)
        with buffers.reading() as held:
            assert held is not None
            figures = {"delta": delta.take(held), "whole": whole.take(held)}
            sent = {slot.spec.name: slot.read(slot.of(held.data)) for slot in layout.slots}
            for received in (whole.received, delta.received):
                assert all(torch.equal(received[name], sent[name]) for name in sent)
            if before is not None:
                line = {**about, "step": version, **compared(before, held.data, figures)}
                lines.append(line)
                print(json.dumps(line), flush=True)
            before = held.data.clone()
    print(
        json.dumps(
            {**about, "cores": os.cpu_count(), "model_bytes": layout.num_bytes, **totals(lines)}
        )
    )


def compared(
    before: torch.Tensor, data: torch.Tensor, figures: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    changed = float((before.view(torch.int16) != data.view(torch.int16)).float().mean())
    xor = zstandard.ZstdCompressor(level=1).compress((before ^ data).numpy().data)
    return {"unchanged": round(1 - changed, 5), "xor_bytes": len(xor), **figures}


def totals(lines: list[dict[str, Any]]) -> dict[str, float]:
    """How many times fewer bytes, and how many times sooner."""
    sums = {
        way: {key: sum(line[way][key] for line in lines) for key in lines[0][way]}
        for way in ("delta", "whole")
    }
    return {
        "fewer_bytes": round(sums["whole"]["bytes"] / sums["delta"]["bytes"], 1),
        "sooner": round(sums["whole"]["total_s"] / sums["delta"]["total_s"], 1),
        "sooner_alone": round(sums["whole"]["alone_s"] / sums["delta"]["alone_s"], 1),
        "unchanged": round(sum(line["unchanged"] for line in lines) / len(lines), 5),
    }


if __name__ == "__main__":
    main()
