"""A micro-batch: the part of a step's trajectories that shares one forward pass, its tokens packed.

Made by `learners.batch`; the network computes it, the objective selects its rows of the batch.
Shapes: S trajectories, R response tokens, N tokens (prompts included) of the micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from learners.policy.packed.shared_prompts import SharedPrompts
from learners.policy.packed.stretches import Packing
from streamrl.algorithms.candidates import Candidates
from streamrl.algorithms.sequences import Sequences
from streamrl.types import Media


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One forward pass: N tokens of some of the step's trajectories."""

    token_ids: torch.Tensor
    """[1, N] int64"""
    packing: Packing
    predictors: torch.Tensor
    """[R] positions in N whose hidden states predict the response tokens."""
    targets: torch.Tensor
    """[R] int64, the response tokens."""
    members: torch.Tensor
    """[S] which of the step's trajectories these are."""
    responses: torch.Tensor
    """[R] which of the step's response tokens these are."""
    sequences: Sequences
    prompt_indices: tuple[int, ...]
    """[S] places in the prompt stream."""
    media: tuple[tuple[Media, ...], ...]
    """Of each stretch of `packing`, in the order of their places."""
    sampling_mask: Candidates | None = None
    """What each response token was sampled among; no candidate for the whole vocabulary."""
    top_candidates: Candidates | None = None
    """The likeliest others beside each response token, as the behavior policy saw them."""

    shared_prompts: SharedPrompts | None = None
    """What is left to compute where trajectories begin alike; None if that is about everything."""

    @property
    def is_empty(self) -> bool:
        """Whether it has no trajectory: it accompanies a micro-batch of another rank."""
        return not len(self.members)

    def select(self, is_kept: torch.Tensor) -> "MicroBatch":
        """The trajectories for which [S] bool, on the CPU, is true; itself if that is each."""
        if is_kept.all():
            return self
        chosen, responses = is_kept.nonzero()[:, 0].tolist(), self.sequences.expand(is_kept)
        tokens = is_kept.repeat_interleave(torch.tensor(self.packing.lengths))
        device = self.token_ids.device
        places, token_ids = (tokens.cumsum(0) - 1).to(device), self.token_ids[:, tokens.to(device)]
        predictors = places[self.predictors[responses.to(device)]]
        lengths = tuple(self.packing.lengths[i] for i in chosen) or (1,)
        return MicroBatch(
            # Not one of those that are left out, whose hidden states may be NaN.
            token_ids=token_ids if chosen else self.token_ids.new_zeros((1, 1)),
            packing=Packing(lengths, device),
            predictors=predictors,
            targets=self.targets[responses.to(device)],
            members=self.members[is_kept],
            responses=self.responses[responses],
            sequences=Sequences.from_lengths(self.sequences.lengths[is_kept]),
            prompt_indices=tuple(self.prompt_indices[i] for i in chosen),
            media=tuple(self.media[i] for i in chosen) or ((),),
            sampling_mask=self.sampling_mask and self.sampling_mask.select(responses.to(device)),
            top_candidates=self.top_candidates and self.top_candidates.select(responses.to(device)),
            shared_prompts=self._shared(chosen, token_ids, lengths, predictors),
        )

    def _shared(
        self,
        chosen: Sequence[int],
        token_ids: torch.Tensor,
        lengths: tuple[int, ...],
        predictors: torch.Tensor,
    ) -> SharedPrompts | None:
        """Of the chosen trajectories, if prompts are shared: all of their tokens may be too many
        for the memory."""
        if self.shared_prompts is None or not chosen:
            return None
        prompts = [self.shared_prompts.prompts[i] for i in chosen]
        ids, at = token_ids[0].cpu().numpy(), predictors.cpu().numpy()
        return SharedPrompts.of(ids, lengths, prompts, at, token_ids.device, most=1.0)
