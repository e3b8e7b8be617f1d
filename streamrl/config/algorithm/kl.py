"""`algorithm.kl_loss` and `algorithm.kl_reward`: the divergence from the reference policy."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from streamrl.config.section import Section
from streamrl.errors import did_you_mean

KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_KINDS = (*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS), "full")


def _known_kl(kind: str) -> str:
    if kind not in KL_KINDS:
        raise ValueError(f"{kind!r} is unknown; {did_you_mean(kind, KL_KINDS)}")
    return kind


KlKind = Annotated[str, AfterValidator(_known_kl)]


class KlLossSettings(Section):
    """KL to the reference policy as a term of the loss; `coef` 0 switches it off."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the term; 0.001 is usual."""
    kind: KlKind = "low_var_kl"
    """Estimator; a trailing + keeps its value and takes the gradient of k2."""

    @property
    def is_exact(self) -> bool:
        return self.coef > 0 and self.kind == "full"


class KlRewardSettings(Section):
    """KL to the reference policy, subtracted from the reward of each token; `coef` 0 is off."""

    coef: float = Field(default=0.0, ge=0)
    """Weight, or with the adaptive controller its first value."""
    kind: KlKind = "kl"
    """Estimator of the per-token KL; `full` exists in the loss only."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """Whether the weight follows the measured KL."""
    target: float = Field(default=0.1, gt=0)
    """adaptive: the KL aimed for."""
    horizon: int = Field(default=10_000, gt=0)
    """adaptive: trajectories over which the weight may change by a fifth."""

    @field_validator("kind")
    @classmethod
    def _is_an_estimator(cls, kind: str) -> str:
        if kind == "full":
            raise ValueError(
                f"was 'full', which kl_loss alone computes; use one of {KL_ESTIMATORS}"
            )
        return kind
