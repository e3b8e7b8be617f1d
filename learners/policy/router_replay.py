"""The experts that the engine took, in the learner's passes: `algorithm.router_replay`.

Engine and learner round differently, and a router's choice is discrete: where two experts score
about alike, the two take different ones, and the log-probabilities of the same weights differ by
far more than rounding (R3, arXiv 2510.11370; IcePop, MoE-RL at Ant). With `replay` the learner
gives a token to the experts I that the engine took. Their weights are the learner's own,

    s = W_gate h                     the learner's scores of all experts, with gradient
    g_i = rule(s)_i for i in I       the router's rule, see `streamrl.algorithms.routing`

so the gate is trained through the weights of the recorded experts. With `record`, and for a token
without a record, the learner's router chooses. Each decoder layer is given its experts as an
argument, and so again where it is computed a second time for the gradient.

Invariant: where the recorded experts are those that the router takes, log-probabilities and
gradients are those without replay.
Shapes: N tokens of a micro-batch, L decoder layers, E experts, K experts of a token.
"""

from collections.abc import Callable
from functools import partial
from math import log
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from learners.batch.micro_batch import MicroBatch
from learners.parallel.ranks import Ranks
from streamrl.algorithms.routing import choosing, layer_of, num_experts_of, routers
from streamrl.algorithms.sequences import to_device
from streamrl.config.algorithm.settings import RouterReplay
from streamrl.errors import ConfigError

ARGUMENT = "routed_experts"
"""Under which decoders and their layers are given the experts [B, T, L, K] of their tokens."""


class _Layer:
    """One layer's router: the experts [N, K] of the pass that runs, and counts of what it took."""

    def __init__(self, router: torch.nn.Module, index: int, *, replays: bool) -> None:
        self.index = index
        self._replays = replays
        self._num_experts = num_experts_of(router)
        self._recorded: torch.Tensor | None = None
        self._counts = torch.zeros(self._num_experts + 2, dtype=torch.int64)
        choosing(router, self._choose)

    def forward(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """The layer's, with its own of the experts of all layers."""
        experts: torch.Tensor | None = options.pop(ARGUMENT, None)
        if experts is not None:
            experts = experts[..., self.index, :].flatten(0, -2).long()
        self._recorded = experts
        try:
            return forward(*inputs, **options)
        finally:
            self._recorded = None

    def _choose(self, own: torch.Tensor) -> torch.Tensor:
        recorded = self._recorded
        if recorded is None:
            return own
        has_record = recorded[:, :1] >= 0
        chosen = torch.where(has_record, recorded, own)
        if torch.is_grad_enabled():
            self._count(own, recorded, has_record)
        return chosen if self._replays else own

    @torch.no_grad()
    def _count(self, own: torch.Tensor, recorded: torch.Tensor, has_record: torch.Tensor) -> None:
        """A layer that is computed twice counts twice, and a prompt that trajectories of a
        micro-batch share once; all metrics are shares. Selects no tokens: a GPU would wait for how
        many there are."""
        is_taken = has_record.expand_as(recorded).long()
        load = is_taken.new_zeros(self._num_experts)
        load.scatter_add_(0, recorded.clamp_min(0).flatten(), is_taken.flatten())
        is_other = has_record & (own[:, :, None] != recorded[:, None, :]).all(2)
        sums = torch.stack([has_record.sum() * own.shape[1], is_other.sum()])
        self._counts = self._counts.to(load.device) + torch.cat([load, sums])

    def take(self) -> torch.Tensor:
        """[E + 2] on the CPU, since the last call, of tokens with a record: how many went to each
        expert, how many experts the learner's router takes, and how many of these the engine did
        not take."""
        counts = self._counts.cpu()
        self.forget()
        return counts

    def forget(self) -> None:
        self._counts = torch.zeros_like(self._counts)


def _without_experts(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    options.pop(ARGUMENT, None)
    return forward(*inputs, **options)


class RouterRecords:
    """Of one network whose decoder layers are its own."""

    def __init__(self, model: PreTrainedModel, setting: RouterReplay) -> None:
        """Puts itself around the model's layers and routers, before what computes layers twice;
        ConfigError if it has no experts, or routers that are not known."""
        self._setting = f"algorithm.router_replay: was {setting}"
        found: dict[str, Any] = routers(model, self._setting)
        chosen = {layer_of(name): router for name, router in found.items()}
        [stack] = {place for place, _ in chosen}
        layers: Any = model.get_submodule(stack)
        self._family: str = model.config.get_text_config().model_type
        self._num_layers = len(layers)
        self._top_k = min(int(router.top_k) for router in found.values())
        self._num_experts = min(map(num_experts_of, found.values()))
        self._layers: list[_Layer] = []
        for i, module in enumerate(layers):
            router = chosen.get((stack, i))
            if router is None:
                module.forward = partial(_without_experts, module.forward)
                continue
            layer = _Layer(router, i, replays=setting == "replay")
            module.forward = partial(layer.forward, module.forward)
            self._layers.append(layer)

    def of(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """[N, L, K] on the micro-batch's device; None if that accompanies one of another rank.
        ConfigError if a trajectory came without, or they are of another model."""
        if micro_batch.is_empty:
            return None
        experts = micro_batch.routed_experts
        lengths = micro_batch.packing.lengths
        starts = np.cumsum([0, *lengths[:-1]])
        if experts is None or not np.logical_or.reduceat(experts.is_recorded, starts).all():
            raise ConfigError(
                f"{self._setting}, and a trajectory came without the experts of its tokens: "
                "start every daemon of a run with one configuration, on an engine that reports "
                "them (generator.engine hf, vllm or sglang)"
            )
        found, own = (experts.num_layers, experts.top_k), (self._num_layers, self._top_k)
        highest = int(experts.rows.max(initial=0))
        if found != own or highest >= self._num_experts:
            raise ConfigError(
                f"{self._setting}, and a trajectory came with {found[1]} experts of up to number "
                f"{highest} in each of {found[0]} layers; {self._family} at model.path has "
                f"{own[1]} of {self._num_experts} in each of {own[0]}: start every daemon of a run "
                "with one configuration"
            )
        return to_device(torch.from_numpy(experts.experts()), micro_batch.token_ids.device)

    def forget(self) -> None:
        """Count anew; does not wait for the device."""
        for layer in self._layers:
            layer.forget()

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Of the passes with gradient since the last call, on all ranks; none if no token had a
        record. Waits for the device and the other ranks."""
        counts = ranks.sum(torch.stack([layer.take() for layer in self._layers])).double()
        loads, (num_taken, num_others) = counts[:, :-2], counts[:, -2:].sum(0).tolist()
        if not num_taken:
            return {}
        shares = loads / loads.sum(1, keepdim=True)
        entropy = torch.special.entr(shares).sum(1) / log(loads.shape[1])
        return {
            "router/mismatch_frac": num_others / num_taken,
            "router/busiest_expert_share": float(shares.amax(1).mean()),
            "router/load_entropy": float(entropy.mean()),
        }
