"""Exact match of checkpoints on held-out prompts, by the length of the answer; off the clock."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.evaluation import greedy_groups
from streamrl.config import RunConfig
from tests.benchmarks.async_runs.records import Line
from tests.benchmarks.async_runs.settings import PER_BUCKET, Workload


def held_out(config: RunConfig, workload: Workload, model: Path) -> Line:
    """Mean reward of the greedy responses, and by bucket."""
    config = on_held_out(config, workload)
    greedy = asyncio.run(greedy_groups(config, model))
    assert not greedy.num_failed
    return by_bucket(
        [group.trajectories[0].reward for group in greedy.groups], workload.bucket_names
    )


def on_held_out(config: RunConfig, workload: Workload) -> RunConfig:
    """The run's configuration with `PER_BUCKET` held-out prompts of each bucket as its stream."""
    data = config.data.model_copy(
        update={
            "eval_source": config.data.source.replace(":Spans", ":HeldOutSpans"),
            "source_kwargs": {"buckets": workload.buckets},
            "num_eval_prompts": PER_BUCKET * len(workload.buckets),
            "reward_kwargs": {},
        }
    )
    return config.model_copy(update={"data": data})


def by_bucket(rewards: Sequence[float], names: Sequence[str]) -> Line:
    """Means of rewards that belong to the buckets by turns.

    >>> by_bucket([1.0, 0.0, 0.0, 0.0], ["short", "long"])
    {'reward': 0.25, 'exact': {'short': 0.5, 'long': 0.0}}
    """
    parts = {name: rewards[i :: len(names)] for i, name in enumerate(names)}
    exact = {name: round(sum(part) / len(part), 3) for name, part in parts.items()}
    return {"reward": round(sum(rewards) / len(rewards), 4), "exact": exact}


def curve(
    config: RunConfig,
    workload: Workload,
    models: Mapping[int, str | Path],
    times: Mapping[int, float],
) -> list[Line]:
    """Of the model at each step, with the seconds since the end of the first step."""
    return [
        {
            "step": step,
            "seconds": round(times.get(step, times[1]) - times[1], 2),
            **held_out(config, workload, Path(model)),
        }
        for step, model in models.items()
    ]


def checkpoints(run: Path) -> dict[int, Path]:
    """By step, in their order."""
    folders = sorted((run / "checkpoints").glob("step-*"))
    return {int(folder.name.removeprefix("step-")): folder for folder in folders}
