"""A version through `weights.store`: bytes and seconds, as a difference and whole, on a slow link.

    PYTHONPATH=. python tests/benchmarks/bench_store.py [--model FOLDER | --size 135m] [--steps 3]
        [--lr 1e-6] [--gbit 1.0]

Real steps: the gradient of a policy-gradient loss over random tokens, clipped, and AdamW on float32
parameters, which are published in bfloat16. Without a folder the weights are random, in the shape
of SmolLM2-135M or Qwen2.5-0.5B. The link takes every byte to and from the store at so many Gbit/s,
one after the other, by sleeping for as long as a chunk is ahead of it. The store and what both ends
do with a version are the real ones, and every version is compared bit by bit. `stored_s` is from
the snapshot to the manifest, `read_s` from there until an engine has every tensor. `xor_bytes` is
what zstd makes of the whole XOR; `cpu_s` is of both ends, also what follows the manifest: on a
machine that others use it says more than the seconds. One JSON line per step, and the
totals; nobody imports this.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import zstandard
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from streamrl.config.weights import WeightSettings
from streamrl.weights.layout import Layout, manifest_of
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

    def put(self, file: Path, name: str) -> None:
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


class Way:
    """A learner's end and a generator's, of which every version is whole or none but the first."""

    def __init__(self, folder: Path, layout: Layout, bytes_per_s: float, *, whole: bool) -> None:
        settings = WeightSettings.model_validate({"store": f"file://{folder}", "full_every": 1000})
        self._link = Link(folder / "store", bytes_per_s)
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
            "cpu_s": round(time.process_time() - cpu_s, 3),
        }


class Steps:
    """A model in float32 and its optimizer."""

    def __init__(self, model: Path | None, size: str, lr: float) -> None:
        torch.manual_seed(0)
        self.model = (
            AutoModelForCausalLM.from_config(SIZES[size], dtype=torch.float32)
            if model is None
            else AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        )
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def step(self) -> None:
        """Four sequences whose advantages are random."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--size", choices=SIZES, default="135m")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        report(arguments, Path(folder))


def report(arguments: argparse.Namespace, folder: Path) -> None:
    steps = Steps(arguments.model, arguments.size, arguments.lr)
    layout = Layout(manifest_of(steps.parameters(), torch.bfloat16), 2**28)
    buffers = SendBuffers(layout, "cpu")
    rate = arguments.gbit * 1e9 / 8
    whole = Way(folder / "whole", layout, rate, whole=True)
    delta = Way(folder / "delta", layout, rate, whole=False)
    model = str(arguments.model.name) if arguments.model else f"random, {arguments.size}"
    about = {"benchmark": "store", "model": model, "lr": arguments.lr, "gbit": arguments.gbit}
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
            for way in (whole, delta):
                assert all(torch.equal(way.received[name], sent[name]) for name in sent)
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
        "unchanged": round(sum(line["unchanged"] for line in lines) / len(lines), 5),
    }


if __name__ == "__main__":
    main()
