"""`learner.mesh`: what the ranks of a learner share."""

from pydantic import field_validator

from streamrl.config.numbers import Positive
from streamrl.config.section import Section
from streamrl.errors import ConfigError


class MeshSettings(Section):
    """How many ranks share what: the four sizes multiply to the number of ranks."""

    replicate: Positive = 1
    """Copies of the sharded parameters; each trains other trajectories."""
    shard: int = -1
    """Ranks that share one copy of the parameters and train other trajectories; -1 takes all that
    are left."""
    sequence: Positive = 1
    """Ranks that share the tokens of the same trajectories."""
    tensor: Positive = 1
    """Ranks that share each matrix."""

    @field_validator("shard")
    @classmethod
    def _is_a_size(cls, shard: int) -> int:
        if shard > 0 or shard == -1:
            return shard
        raise ValueError(f"was {shard}; it must be positive, or -1 for all ranks that are left")

    def sizes(self, world_size: int) -> tuple[int, int, int, int]:
        """Replicate, shard, sequence and tensor, in a world of so many ranks.

        Raises:
            ConfigError: they do not multiply to it.
        """
        others = self.replicate * self.sequence * self.tensor
        shard = world_size // others if self.shard == -1 else self.shard
        if others * shard == world_size:
            return self.replicate, shard, self.sequence, self.tensor
        product = f"replicate {self.replicate} x sequence {self.sequence} x tensor {self.tensor}"
        if self.shard == -1:
            raise ConfigError(
                f"learner.mesh: {product} is {others}, which does not divide the {world_size} "
                "ranks of the learner; torchrun --nproc-per-node says how many there are"
            )
        raise ConfigError(
            f"learner.mesh: {product} x shard {shard} is {others * shard}, but the learner has "
            f"{world_size} ranks; shard -1 takes all that are left"
        )
