"""`algorithm.rollout_is`: rollout importance sampling, and presets to start from.

Invariant: in any valid record 0 < lower < upper wherever bounds apply.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from streamrl.config.section import PositiveNumber, Section, twice
from streamrl.errors import did_you_mean

REJECTION_STATISTICS = tuple(
    f"{scope}_{kind}"
    for scope in ("token", "seq_sum", "seq_mean", "seq_max")
    for kind in ("k1", "k2", "k3")
)


class RejectionRule(Section):
    """One test; short form: `{seq_mean_k3: 0.1}`."""

    statistic: str
    """token, seq_sum, seq_mean or seq_max, followed by _k1, _k2 or _k3, such as `seq_mean_k3`."""
    upper: PositiveNumber
    """Largest value that is kept; for k1 the largest behavior/train ratio."""
    lower: PositiveNumber | None = None
    """k1 only: smallest behavior/train ratio that is kept; null: 1 / upper."""

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        """`{name: upper}` and `{name: "lower_upper"}`."""
        if not isinstance(value, dict) or len(value) != 1 or "statistic" in value:
            return value
        ((statistic, bounds),) = value.items()
        lower, upper = _split_bounds(bounds, "rejection")
        return {"statistic": statistic, "upper": upper, "lower": lower}

    def contradictions(self) -> Iterator[str]:
        if self.statistic not in REJECTION_STATISTICS:
            hint = did_you_mean(self.statistic, REJECTION_STATISTICS)
            yield f"statistic: {self.statistic!r} is unknown; {hint}"
        if not self.is_ratio and self.lower is not None:
            yield f"lower: only a k1 rule has one; {self.statistic} has an upper bound"
        if self.is_ratio and self.ratio_lower >= self.upper:
            yield f"lower: is {self.ratio_lower:g}; it must be below upper, which is {self.upper:g}"

    @property
    def is_ratio(self) -> bool:
        """Whether the bounds are on the ratio behavior/train instead of on a divergence."""
        return self.statistic.endswith("k1")

    @property
    def ratio_lower(self) -> float:
        return 1.0 / self.upper if self.lower is None else self.lower


class RolloutISSettings(Section):
    """Weights exp(train - behavior) of stale trajectories: a preset's name, or the settings that
    differ from token_is."""

    threshold: PositiveNumber | None = 2.0
    """Upper bound U of a weight; null: no weights; "lo_up": zero outside both bounds (IcePop)."""
    threshold_lower: PositiveNumber | None = None
    """Lower bound L of a weight; null: 1 / threshold."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio per token, or per sequence their product or their geometric mean."""
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """truncate: weights above U become U; clip (or mask): weights outside [L, U] become 0."""
    veto_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Veto: a sequence with a token whose ratio is below this gets weight 0; 1e-4 is usual, null:
    off."""
    apply: bool = True
    """Whether the loss uses the weights; false: metrics only."""
    normalize_by: Literal["all", "kept"] = "all"
    """Whether the denominators of the loss count all response tokens, or only those that
    contribute."""
    batch_normalize: bool = False
    """Divide the weights by their mean after bounding."""
    rejection: tuple[RejectionRule, ...] = ()
    """Tests that a token must pass to stay in the loss."""
    second_moment: PositiveNumber | None = None
    """Mask harmful tokens until the mean squared log-ratio of the remaining ones is at most this
    (M2PO); 0.04 is usual, null: off."""
    engine_threshold: Annotated[float, Field(gt=1)] | None = None
    """Upper bound U of a token's engine-mismatch factor, which `algorithm.rescore_share` measures;
    null: off."""
    lag_threshold: Annotated[float, Field(gt=1)] | None = None
    """The same for its policy-lag factor."""
    scale_lr: bool = False
    """Multiply the learning rate of an update by sqrt(ESS / B) of its B sequences (VCPO)."""

    @model_validator(mode="before")
    @classmethod
    def _expand_two_sided(cls, value: Any) -> Any:
        """`threshold: "0.5_5.0"` sets both bounds, with zero outside."""
        if not isinstance(value, dict) or not isinstance(value.get("threshold"), str):
            return value
        lower, upper = _split_bounds(value["threshold"], "threshold")
        if lower is None:
            return {**value, "threshold": upper}
        if value.get("threshold_lower") is not None or value.get("mode") == "truncate":
            raise ValueError(
                f"threshold: {value['threshold']!r} sets both bounds and mode clip;"
                " threshold_lower and mode truncate do not go with it"
            )
        return {**value, "threshold": upper, "threshold_lower": lower, "mode": "clip"}

    def contradictions(self) -> Iterator[str]:
        if self.threshold is not None and self.lower >= self.threshold:
            yield f"""threshold_lower: is {self.lower:g} (null means 1 / threshold); it must be
                below threshold, which is {self.threshold:g}"""
        if name := twice(rule.statistic for rule in self.rejection):
            yield f"rejection: {name} stands twice; give one rule per statistic"

    @property
    def is_off(self) -> bool:
        """Whether nothing is computed: no weights, masks or metrics."""
        is_bare = not self.rejection and not self.bounds_factors
        return self.threshold is None and is_bare and self.second_moment is None

    @property
    def applies_weights(self) -> bool:
        """Whether the loss uses weights, including the zeros of the veto."""
        return self.threshold is not None and self.apply

    @property
    def lower(self) -> float:
        """The lower bound L; 0 if there are no weights."""
        if self.threshold is None:
            return 0.0
        return 1.0 / self.threshold if self.threshold_lower is None else self.threshold_lower

    @property
    def bounds_factors(self) -> bool:
        """Whether engine mismatch or policy lag has its own bound."""
        return self.engine_threshold is not None or self.lag_threshold is not None

    @property
    def zeroes_outside(self) -> bool:
        return self.mode != "truncate"

    @property
    def masks_tokens(self) -> bool:
        """Whether a rule rejects single tokens, independently of their weights."""
        by_rule = any(rule.statistic.startswith("token_") for rule in self.rejection)
        by_factor = self.bounds_factors and self.zeroes_outside
        return by_rule or by_factor or self.second_moment is not None

    @property
    def weighs_tokens_zero(self) -> bool:
        """Whether a bound can give single tokens weight 0."""
        return self.applies_weights and self.zeroes_outside and self.level == "token"


_VETO = 1e-4
_UNBOUNDED = 1e6
"""Bound for papers that do not bound the token ratio; a larger ratio means a broken engine."""

ROLLOUT_IS_PRESETS = {
    "off": RolloutISSettings(threshold=None),
    "metrics_only": RolloutISSettings(apply=False, veto_threshold=_VETO),
    "token_is": RolloutISSettings(),
    "token_is_veto": RolloutISSettings(veto_threshold=_VETO),
    "token_clip": RolloutISSettings(mode="clip"),
    "sequence_is": RolloutISSettings(level="sequence"),
    "sequence_is_veto": RolloutISSettings(level="sequence", veto_threshold=_VETO),
    "sequence_clip": RolloutISSettings(level="sequence", mode="clip", veto_threshold=_VETO),
    "geometric_clip": RolloutISSettings(
        level="geometric", mode="clip", threshold=1.01, veto_threshold=_VETO
    ),
    "icepop": RolloutISSettings(mode="clip", threshold=5.0, threshold_lower=0.5),
    "m2po": RolloutISSettings(threshold=_UNBOUNDED, second_moment=0.04),
    "vcpo": RolloutISSettings(level="sequence", threshold=8.0, scale_lr=True),
}


def rollout_is_preset(value: object) -> object:
    """The preset of that name, or the record itself; ValueError for an unknown name."""
    if not isinstance(value, str):
        return value
    if value not in ROLLOUT_IS_PRESETS:
        raise ValueError(f"preset {value!r} is unknown; {did_you_mean(value, ROLLOUT_IS_PRESETS)}")
    return ROLLOUT_IS_PRESETS[value]


def _split_bounds(bounds: Any, field: str) -> tuple[float | None, float]:
    """`2.0` and "2.0" set the upper bound, "0.5_2.0" the lower and the upper one."""
    parts = str(bounds).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    match numbers:
        case [upper]:
            return None, upper
        case [lower, upper]:
            return lower, upper
    raise ValueError(f'{field}: was {bounds!r}; it must be a number or "lower_upper"')
