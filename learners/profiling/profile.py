"""The profile of a trainer's steps: phases, operations and traces, observed from outside.

Forward and backward passes are seen by hooks of the networks, so that whoever calls a network is
measured without knowing it: with gradient a pass is `forward`, without `score`, and `backward` is
from the first gradient that reaches a network's output to the end of that backward pass.

Invariant: nothing here waits for a device before the end of a step, and nothing changes what is
computed.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from learners.policy.network import Network, NetworkOutput
from learners.profiling.flops import NetworkFlops, peak_flops
from learners.profiling.times import StepTimes
from learners.profiling.trace import Tracer
from streamrl.config import RunConfig

PHASES = ("plan", "score", "forward", "backward", "update")


class StepProfile:
    """Of the networks of one rank."""

    def __init__(self, config: RunConfig, networks: Mapping[str, Network], rank: int = 0) -> None:
        learner, device = config.learner, networks["policy"].device
        self._times = StepTimes(device, with_nvtx=learner.profiler.nvtx)
        self._tracer = Tracer(config, device, rank)
        self._peak = peak_flops(device, learner.dtype, learner.peak_tflops)
        # The ranks of one block share the trajectories of its data rank.
        self._ranks_per_share = learner.mesh.sequence * learner.mesh.tensor
        self._num_flops = 0.0
        self._pass: AbstractContextManager[None] = nullcontext()
        for network in networks.values():
            self._watch(network)

    def begin(self, step: int) -> None:
        """Before the first part of the batch that makes this step."""
        self._tracer.begin(step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(f"streamrl/{name}"), self._times.phase(name):
            yield

    def end(self) -> None:
        """After the last update of the step, or where its batch is discarded."""
        self._tracer.end()

    def take(self, train_s: float) -> dict[str, float]:
        """Metrics of the step that ended, whose computation took `train_s`; counting starts anew.

        Operations are those of this rank, by the model's own count.
        """
        per_s = self._num_flops / self._ranks_per_share / train_s
        self._num_flops = 0.0
        mfu = {} if self._peak is None else {"learner/mfu": per_s / self._peak}
        return {**self._times.take(*PHASES), "learner/tflops_per_s": per_s / 1e12, **mfu}

    def _watch(self, network: Network) -> None:
        cost = NetworkFlops.of(network)

        def before(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._pass = self.phase("forward" if torch.is_grad_enabled() else "score")
            self._pass.__enter__()
            packing = (network.shared_prompts(args[0]) or args[0]).packing
            num_logits = len(args[0].targets) if kwargs.get("with_logprobs", True) else 0
            size = (packing.lengths, num_logits, packing.num_tokens)
            self._num_flops += cost.forward(*size)
            if torch.is_grad_enabled():
                self._num_flops += cost.backward(*size)

        def after(module: torch.nn.Module, args: Any, output: NetworkOutput) -> None:
            self._pass.__exit__(None, None, None)
            for column in (output.logprobs, output.entropy, output.values, output.kl):
                if column is not None and column.requires_grad:
                    column.register_hook(self._begin_backward)

        network.register_forward_pre_hook(before, with_kwargs=True)
        network.register_forward_hook(after)

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        if not self._times.is_open("backward"):
            self._times.begin("backward")
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._times.end("backward"))
