"""The teachers of `algorithm.distillation`: the log-probability of each sampled token under them.

    teachers with a path    a pass without gradient here, as of the reference policy
    teachers with a url     recorded with the trajectory, by the generator that asked

Where teachers are mixed, a token has the sum of their shares of log pi_k, so that with shares w_k
that add up to 1 its advantage sum_k w_k (log pi_k - log pi) is minus the weighted reverse KL.

Invariant: teachers read the policy's tokens and have its temperature; the result does not depend
on how a batch is cut, nor on how it is divided among ranks, which call all of this together.
Shapes: R response tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from learners.batch.micro_batch import offsets_within
from learners.batch.training_batch import TrainingBatch
from learners.parallel.mesh import Mesh
from learners.parallel.ranks import Ranks
from learners.policy.loading import load_network, require_same_input, within_vocabulary
from learners.policy.policy import Policy
from streamrl.algorithms.candidates import Likeliest
from streamrl.config import RunConfig
from streamrl.config.algorithm.distillation import DistillationSettings
from streamrl.errors import ConfigError, did_you_mean
from streamrl.types import TopLogprobs, Trajectory

SETTING = "algorithm.distillation.teachers"


@dataclass(frozen=True, eq=False)
class Teachers:
    """`policies` are those of the teachers with a path, by name; `max_tokens` those of a pass."""

    settings: DistillationSettings
    policies: Mapping[str, Policy]
    max_tokens: int
    ranks: Ranks = field(default_factory=Ranks)

    @classmethod
    def from_config(cls, config: RunConfig, mesh: Mesh | None, ranks: Ranks | None) -> "Teachers":
        """With the models of `path`.

        Raises:
            ConfigError: there is no such model, or it does not read the policy's tokens and images.
        """
        settings = config.algorithm.distillation
        assert settings is not None, "who makes teachers has asked"
        policies = {}
        for place, teacher in enumerate(settings.teachers):
            if teacher.path is not None:
                setting = f"{SETTING}.{place}.path"
                require_same_input(config, setting, teacher.path)
                network = load_network(
                    config, teacher.path, is_reference=True, mesh=mesh, setting=setting
                )
                policies[teacher.name] = Policy(network)
        limit = config.learner.max_tokens_per_forward_pass.reference
        max_tokens = limit or config.learner.max_tokens_per_micro_batch
        return cls(settings, policies, max_tokens, ranks or Ranks())

    def score(self, batch: TrainingBatch) -> tuple[torch.Tensor, Likeliest | None]:
        """[R] in nats, on the CPU: of the teacher that the row names, or the weighted sum of all;
        and under `top_k` the likeliest tokens of the one, in the rows of this rank's trajectories.

        Raises:
            ConfigError: groups came without what a generator has to record.
        """
        settings, num_tokens = self.settings, batch.sequences.num_tokens
        top = Likeliest.none(num_tokens, settings.top_k) if settings.top_k else None
        chosen = self._chosen(batch)
        total = torch.zeros(num_tokens)
        asked = sorted({i for teacher in settings.by_url for i in chosen[teacher.name]})
        own = [i for i in asked if i in batch.places]
        total[batch.rows(own)] = _recorded(batch, own)
        if top is not None and own:
            _take_recorded(batch, own, top)
        seen = batch.for_teachers(self.ranks) if settings.template else batch
        for teacher in settings.in_learner:
            if members := chosen[teacher.name]:
                policy = self.policies[teacher.name]
                read = within_vocabulary(policy.network, seen)
                micro_batches = policy.network.cut(read, self.max_tokens, members)
                found = policy.batch_logprobs(micro_batches, num_tokens, top)
                total += settings.share(teacher) * found
        return self.ranks.sum(total), top

    def _chosen(self, batch: TrainingBatch) -> Mapping[str, Sequence[int]]:
        """The trajectories that each teacher scores, of all ranks."""
        known = [teacher.name for teacher in self.settings.teachers]
        if self.settings.column is None:
            return dict.fromkeys(known, range(len(batch)))
        mine = {i: batch.teachers[place] for i, place in batch.places.items()}
        gathered = self.ranks.gather(mine, dict[int, str])
        names = {i: name for of_rank in gathered for i, name in of_rank.items()}
        for name in set(names.values()) - set(known):
            raise ConfigError(
                f"algorithm.distillation.column: a group came for teacher {name!r}; "
                f"{did_you_mean(name, known)}; start every daemon of a run with one configuration"
            )
        return {name: [i for i in sorted(names) if names[i] == name] for name in known}


def _recorded(batch: TrainingBatch, members: Sequence[int]) -> torch.Tensor:
    """[R of these trajectories of this rank] what the generators recorded."""
    trajectories = [batch.trajectories[batch.places[i]] for i in members]
    columns = [
        t.teacher_logprobs[t.response_mask] for t in trajectories if t.teacher_logprobs is not None
    ]
    if len(columns) < len(trajectories):
        raise ConfigError(
            f"{SETTING}: groups came without the log-probabilities of the teachers by url: start "
            "every daemon of a run with one configuration"
        )
    return torch.cat([torch.zeros(0), *map(torch.from_numpy, columns)])


def _take_recorded(batch: TrainingBatch, members: Sequence[int], top: Likeliest) -> None:
    """Write the candidates that the generators recorded to the rows of these trajectories."""
    trajectories = [batch.trajectories[batch.places[i]] for i in members]
    lengths = [t.num_tokens for t in trajectories]
    sets = TopLogprobs.joined([t.teacher_top_logprobs for t in trajectories], lengths)
    is_response = np.concatenate([t.response_mask for t in trajectories])
    top_k = top.token_ids.shape[1]
    if not is_response.any():
        return
    # A place has fewer where the teacher gives some of its likeliest tokens no probability.
    if sets is None or not all(_has_candidates(t, top_k) for t in trajectories):
        raise ConfigError(
            f"algorithm.distillation.top_k: was {top_k}, and groups came with other candidates of "
            "the teachers by url: start every daemon of a run with one configuration"
        )
    counts = torch.from_numpy(sets.counts[is_response]).long()
    places = offsets_within(counts)
    owners = batch.rows(members).repeat_interleave(counts)
    top.token_ids[owners, places] = torch.from_numpy(sets.token_ids).long()
    top.logprobs[owners, places] = torch.from_numpy(sets.logprobs)


def _has_candidates(trajectory: Trajectory, top_k: int) -> bool:
    """So many at some place, and more at none; true without a response."""
    if not trajectory.response_mask.any():
        return True
    sets = trajectory.teacher_top_logprobs
    return sets is not None and sets.counts[trajectory.response_mask].max() == top_k
