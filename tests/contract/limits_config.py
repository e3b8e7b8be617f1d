"""The run that the tests at the limits are about; clients in other processes import this too."""

from streamrl.config import RunConfig

GROUPS_PER_STEP = 10


def limits_config(url: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "limits", "max_steps": 10**9},
            "model": {"path": "unused"},
            "data": {"source": "addition"},
            "buffer": {"url": url, "max_staleness": 2},
            "learner": {"groups_per_step": GROUPS_PER_STEP},
        }
    )
