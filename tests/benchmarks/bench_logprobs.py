"""Blocked log-probabilities against the plain way, forward and backward.

8k tokens, a vocabulary of 152k, hidden size 896 (Qwen2.5-0.5B's head), two threads. The plain way
is `log_softmax((hidden @ weight.T).float())`, which needs about 25 GB: on a machine with less
memory both run with as many tokens as fit, and the output says how many. Uses a GPU if there is
one.
"""

import argparse
import json
import os
from collections.abc import Callable

import torch
from measure import contest, measured
from torch import Tensor

from streamrl.algorithms.logprobs import token_logprobs

CUDA = torch.cuda.is_available()
THREADS = 2
TOKENS, VOCABULARY, HIDDEN = 8192, 151_936, 896
REPEATS = 2
PLAIN_BYTES_PER_LOGIT = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("ours", "plain"))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=_affordable_tokens())
    options = parser.parse_args()
    if options.only:
        torch.set_num_threads(THREADS)
        compute = {"ours": _ours, "plain": _plain}[options.only]
        work = _work(compute, options.tokens, getattr(torch, options.dtype))
        measure = _measured_on_gpu if CUDA else measured
        print(json.dumps(measure(work, options.repeats)))
        return
    arguments = ("--dtype", options.dtype, "--tokens", str(options.tokens))
    contenders = ("ours", "plain")
    figures = contest(__file__, contenders, *arguments, threads=THREADS, repeats=REPEATS, rounds=1)
    plain, ours = figures["plain"], figures["ours"]
    print(
        json.dumps(
            {
                "benchmark": "logprobs",
                "device": "cuda" if CUDA else "cpu",
                "dtype": options.dtype,
                "tokens": options.tokens,
                "tokens_wanted": TOKENS,
                "ratio": plain["seconds"] / ours["seconds"],
                "memory_ratio": plain["extra_mib"] / ours["extra_mib"],
                "target": {"ratio": 1 / 1.15, "memory_ratio": 5.0},
            }
            | figures
        )
    )


def _affordable_tokens() -> int:
    """8192, halved until the plain way fits into free memory."""
    if CUDA:
        return TOKENS
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tokens = TOKENS
    while tokens > 256 and tokens * VOCABULARY * PLAIN_BYTES_PER_LOGIT > free * 2 // 3:
        tokens //= 2
    return tokens


def _work(compute: Callable[..., Tensor], tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    device = torch.device("cuda" if CUDA else "cpu")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype).requires_grad_()
    weight = 0.02 * torch.randn(VOCABULARY, HIDDEN, generator=generator)
    weight = weight.to(device, dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator).to(device)
    upstream = torch.randn(tokens, generator=generator).to(device)

    def work() -> None:
        hidden.grad = weight.grad = None
        (compute(hidden, weight, targets) * upstream).sum().backward()
        if CUDA:
            torch.cuda.synchronize()

    return work


def _measured_on_gpu(work: Callable[[], None], repeats: int) -> dict[str, float]:
    if repeats:
        return measured(work, repeats)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return {"extra_mib": (torch.cuda.max_memory_allocated() - held) / 2**20}


def _ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_logprobs(hidden, weight, targets).logprobs


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


if __name__ == "__main__":
    main()
