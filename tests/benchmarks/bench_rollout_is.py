"""Rollout importance sampling against verl's own function, same batch, same run.

256 sequences, 533k response tokens of 1M padded, float32, two threads, token level, truncate, all
metrics. verl's function is loaded from the `verl` package, installed without its dependencies
(`pip install --no-deps verl==0.6.0` has the function with percentiles; later ones lack them).
"""

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import contest, measured
from torch import Tensor

from tests.benchmarks.peers.verl_functions import load
from tests.settings import RolloutISConfig

THREADS = 2
NUM_SEQUENCES, WIDTH, NUM_TOKENS = 256, 4096, 533_000
REPEATS, ROUNDS = 15, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("ours", "verl"))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    given = parser.parse_args()
    if given.only:
        torch.set_num_threads(THREADS)
        work = {"ours": ours, "verl": verl}[given.only]()
        print(json.dumps(measured(work, given.repeats)))
        return
    known: dict[str, Any] = {
        "benchmark": "rollout_is",
        "tokens": NUM_TOKENS,
        "threads": THREADS,
        "target": {"ratio": 5.0, "memory_ratio": 4.0},
    }
    contenders = ["ours"] if _verl_file() is None else ["ours", "verl"]
    figures = contest(__file__, contenders, threads=THREADS, repeats=REPEATS, rounds=ROUNDS)
    if "verl" not in figures:
        known |= {"skipped": "verl is not installed: pip install --no-deps verl==0.6.0"}
    else:
        known |= {
            "ratio": figures["verl"]["seconds"] / figures["ours"]["seconds"],
            "memory_ratio": figures["verl"]["extra_mib"] / figures["ours"]["extra_mib"],
        }
    print(json.dumps(known | figures))


def ours() -> Callable[[], object]:
    from streamrl.algorithms.rollout_is import rollout_is_weights
    from streamrl.algorithms.sequences import Sequences

    train, behavior, lengths = _batch()
    mask = torch.arange(WIDTH) < lengths[:, None]
    train, behavior, sequences = train[mask], behavior[mask], Sequences.from_lengths(lengths)
    config = RolloutISConfig(veto_threshold=1e-4)
    few = Sequences.from_lengths([8, 8])
    rollout_is_weights(train[:16], behavior[:16], few, config)
    return lambda: rollout_is_weights(train, behavior, sequences, config).metrics


def verl() -> Callable[[], object]:
    function = _load_verl()
    train, behavior, lengths = _batch()
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    function(train[:2, :8], behavior[:2, :8], torch.ones_like(mask[:2, :8]))
    return lambda: function(train, behavior, mask)


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    """Padded log-probabilities [256, 4096] of policies a little apart, and response lengths."""
    generator = torch.Generator().manual_seed(0)
    behavior = -2 * torch.rand(NUM_SEQUENCES, WIDTH, generator=generator)
    train = behavior + 0.05 * torch.randn(NUM_SEQUENCES, WIDTH, generator=generator)
    shares = torch.rand(NUM_SEQUENCES, generator=generator)
    lengths = (shares * NUM_TOKENS / shares.sum()).long().clamp(1, WIDTH)
    room = WIDTH - lengths
    lengths += (room * (NUM_TOKENS - lengths.sum()) / room.sum()).long()
    lengths[lengths.argmin()] += NUM_TOKENS - lengths.sum()
    return train, behavior, lengths


def _verl_file() -> Path | None:
    """The file with the function, by the name it has in the installed version."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "trainer" / "ppo"
    names = ("mismatch_helper.py", "rollout_corr_helper.py")
    return next((folder / name for name in names if (folder / name).exists()), None)


def _load_verl() -> Callable[[Tensor, Tensor, Tensor], object]:
    file = _verl_file()
    if file is None:
        raise SystemExit("verl is not installed")
    helper = load(file.parents[2], f"trainer/ppo/{file.name}")
    if file.name == "mismatch_helper.py":
        return lambda train, behavior, mask: helper.compute_rollout_importance_weights(
            train, behavior, mask, "token", "truncate", 2.0, None, 1e-4
        )
    return lambda train, behavior, mask: helper.compute_rollout_correction_and_rejection_mask(
        train, behavior, mask, "token", 2.0
    )


if __name__ == "__main__":
    main()
