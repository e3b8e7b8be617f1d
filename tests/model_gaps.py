"""The table of docs/models.md: `PYTHONPATH=. .venv/bin/python -m tests.model_gaps`.

How each family of tests/data/model_families.yaml runs, and the largest difference of these from
transformers' eager attention over the sequences of the tests.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.utils import logging

from learners.policy.network import Network
from learners.policy.packing_check import choose_packing
from tests.model_families import DOCUMENTED, FAMILIES, WINDOW, make_model, plain_logprobs
from tests.training import make_micro_batch

LENGTHS = (1, 3 * WINDOW, 5, 2, 1, 2 * WINDOW + 3, 9)


def rows() -> Iterator[str]:
    families: dict[str, list[str]] = {"packed": [], "unpacked": []}
    gaps = dict.fromkeys(families, 0.0)
    for family in FAMILIES:
        network, gap = measure(make_model(family))
        how = "packed" if network.is_packed else "unpacked"
        families[how].append(documented_name(family))
        gaps[how] = max(gaps[how], gap)
    yield "| runs | largest difference, nats | families, by `model_type` |"
    yield "|---|---|---|"
    for how, members in families.items():
        yield f"| {how} | {gaps[how]:.0e} | {', '.join(members)} |"


def documented_name(family: str) -> str:
    """What `config.json` says of it, and what a variant has."""
    return f"`{DOCUMENTED[family]['model_type']}`" + "".join(family.partition(" with ")[1:])


@torch.no_grad()
def measure(model: Any) -> tuple[Network, float]:
    network = Network(model, temperature=1.0)
    choose_packing(network)
    micro_batch = make_micro_batch(LENGTHS)
    logprobs = network(micro_batch).logprobs
    model.set_attn_implementation("eager")
    sequences = micro_batch.token_ids[0].split(LENGTHS)
    expected = torch.cat([plain_logprobs(model, sequence) for sequence in sequences])
    return network, float((logprobs - expected).abs().max())


if __name__ == "__main__":
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    for row in rows():
        print(row)
