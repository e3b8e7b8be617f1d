"""Log-probabilities from hidden states, forward and backward: our blocks, the plain way, and the
libraries that are installed, by time, memory and error. Uses a GPU if there is one.

8k tokens, a vocabulary of 152k, hidden size 896 (Qwen2.5-0.5B's head), two threads. The plain way
is `log_softmax((hidden @ weight.T).float())`, which needs about 25 GB: on a machine with less
memory all run with as many tokens as fit, and the output says how many. `ratio` and `memory_ratio`
are how many times slower and bigger the plain way is. Errors are against float64 on 256 of the
tokens: the largest of a log-probability, in nats, and of the hidden states' gradient, over its
largest.

Libraries need a GPU: liger-kernel, and cut-cross-entropy with all gradients (by default it leaves
out small ones). A loss of a policy weighs each token by what its log-probability turns out to be,
so what computes gradients before the weights are known has no place here: the chunked ways of
quack-kernels and of torch.nn.functional.linear_cross_entropy.
"""

import argparse
import json
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from measure import Figures, contest, measured
from torch import Tensor

from streamrl.algorithms.logprobs import token_logprobs

CUDA = torch.cuda.is_available()
THREADS = 2
TOKENS, VOCABULARY, HIDDEN = 8192, 151_936, 896
REPEATS = 2
COMPARED = 256
PLAIN_BYTES_PER_LOGIT = 20
Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of hidden states [R, H], a head [V, H] and targets [R]: [R] nats."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=tuple(WAYS))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=_affordable_tokens())
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    options = parser.parse_args()
    if options.only:
        torch.set_num_threads(THREADS)
        compute, dtype = WAYS[options.only], getattr(torch, options.dtype)
        measure = _measured_on_gpu if CUDA else measured
        size = options.tokens, options.vocabulary
        figures = measure(_work(compute, *_inputs(*size, dtype)), options.repeats)
        compared = min(options.tokens, COMPARED), options.vocabulary
        errors = {} if options.repeats else _errors(compute, *compared, dtype)
        print(json.dumps(figures | errors))
        return
    arguments = [
        *("--dtype", options.dtype),
        *("--tokens", str(options.tokens)),
        *("--vocabulary", str(options.vocabulary)),
    ]
    about = {
        "device": "cuda" if CUDA else "cpu",
        "dtype": options.dtype,
        "tokens": options.tokens,
        "tokens_wanted": TOKENS,
        "vocabulary": options.vocabulary,
    }
    plain: Figures = {}
    for name in (name for name in WAYS if name in OWN or (CUDA and find_spec(name))):
        line = {"benchmark": "logprobs", "way": name, **about}
        try:
            found = contest(
                __file__, [name], *arguments, threads=THREADS, repeats=REPEATS, rounds=1
            )
        except SystemExit as error:
            if name in OWN:
                raise
            # A library's: the others have figures all the same.
            print(json.dumps({**line, "error": str(error)[-300:]}))
            continue
        figures = found[name]
        plain = plain or figures
        ratios = {
            "ratio": plain["seconds"] / figures["seconds"],
            "memory_ratio": plain["extra_mib"] / figures["extra_mib"],
        }
        print(json.dumps(line | ratios | figures))


def _affordable_tokens() -> int:
    """8192, halved until the plain way fits into free memory."""
    if CUDA:
        return TOKENS
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tokens = TOKENS
    while tokens > COMPARED and tokens * VOCABULARY * PLAIN_BYTES_PER_LOGIT > free * 2 // 3:
        tokens //= 2
    return tokens


def _inputs(
    tokens: int, vocabulary: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, targets, and the gradient of each target's log-probability."""
    device = torch.device("cuda" if CUDA else "cpu")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype).requires_grad_()
    weight = 0.02 * torch.randn(vocabulary, HIDDEN, generator=generator)
    weight = weight.to(device, dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    upstream = torch.randn(tokens, generator=generator).to(device)
    return hidden, weight, targets, upstream


def _work(
    compute: Logprobs, hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor
) -> Callable[[], None]:
    def work() -> None:
        hidden.grad = weight.grad = None
        (compute(hidden, weight, targets) * upstream).sum().backward()
        if CUDA:
            torch.cuda.synchronize()

    return work


def _measured_on_gpu(work: Callable[[], None], repeats: int) -> Figures:
    if repeats:
        return measured(work, repeats)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return {"extra_mib": (torch.cuda.max_memory_allocated() - held) / 2**20}


def _errors(compute: Logprobs, tokens: int, vocabulary: int, dtype: torch.dtype) -> Figures:
    hidden, weight, targets, upstream = _inputs(tokens, vocabulary, dtype)
    logprobs = compute(hidden, weight, targets)
    (gradient,) = torch.autograd.grad((logprobs * upstream).sum(), hidden)
    exact_hidden = hidden.detach().double().requires_grad_()
    exact = _plain(exact_hidden, weight.detach().double(), targets)
    (exact_gradient,) = torch.autograd.grad((exact * upstream).sum(), exact_hidden)
    error = (gradient - exact_gradient).abs().max() / exact_gradient.abs().max()
    return {
        "logprob_error": (logprobs - exact).abs().max().item(),
        "gradient_error": error.item(),
    }


def _blocks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_logprobs(hidden, weight, targets).logprobs


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = hidden @ weight.T
    # Double stays double.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def _liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    library = import_module("liger_kernel.transformers.functional")
    losses: Tensor = library.liger_fused_linear_cross_entropy(
        hidden, weight, targets, reduction="none", accum_dtype=torch.float32
    )
    return -losses


def _cut_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    library = import_module("cut_cross_entropy")
    losses: Tensor = library.linear_cross_entropy(
        hidden, weight, targets, reduction="none", filter_eps=None
    )
    return -losses


WAYS: dict[str, Logprobs] = {
    "plain": _plain,
    "blocks": _blocks,
    "liger_kernel": _liger,
    "cut_cross_entropy": _cut_cross_entropy,
}
"""By name, the plain one first; those of a library are named as its module."""
OWN = ("plain", "blocks")


if __name__ == "__main__":
    main()
