"""One line a step in the learner's log."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

log = logging.getLogger("streamrl.progress")

_MOST_SHOWN = 12
_SHOWN = {
    "reward": "reward/mean",
    "staleness": "buffer/staleness_mean",
    "ess": "mismatch/rollout_is_eff_sample_size",
    "length": "response_length/mean",
    "wait_s": "learner/wait_s",
    "step_s": "learner/step_s",
}


class ConsoleTracker:
    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        shown = [f"{k} {metrics[name]:.3g}" for k, name in _SHOWN.items() if name in metrics]
        log.info("step %d  %s", step, "  ".join(shown))

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        shown = [
            f"{name.removeprefix('validation/')} {value:.3g}"
            for name, value in metrics.items()
            if "@" in name
        ]
        log.info("validation of version %d  %s", policy_version, "  ".join(shown[:_MOST_SHOWN]))

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """They are in samples.jsonl."""

    def log_validation_samples(
        self, samples: Sequence[Mapping[str, Any]], policy_version: int
    ) -> None:
        """They are in validation/."""

    def close(self) -> None:
        """It holds no resource."""
