"""`algorithm.dynamic_sampling`: groups that teach nothing make room for the next prompts."""

from pydantic import Field

from streamrl.config.section import Section


class DynamicSamplingSettings(Section):
    """Groups whose siblings all have one reward are left out, and the prompts that follow are
    sampled in their place (DAPO, arXiv 2503.14476); they are counted as dropped, `uniform`."""

    metric: str = "reward"
    """What must differ among the siblings: reward, before any shaping, or the name of a metric
    that the environment records."""
    max_refills: float = Field(default=9.0, gt=0)
    """Groups that may be left out for each one that is kept, at most; beyond that, groups are
    trained although they are alike."""
