"""The figures of one run, and those that need the synchronous runs beside it."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from streamrl.interfaces import PromptSource
from tests.benchmarks.async_runs.lengths import ks_p_value, mean, p99
from tests.benchmarks.async_runs.records import Line, RunRecord


def figures(record: RunRecord, prompts: PromptSource) -> Line:
    """Seconds from the first step to the last; what was trained, dropped and left at the end.

    `answer_length` is a property of the prompts alone, `response_length` of what was sampled.
    `ks_p` compares the responses that were trained with all that were sampled, `ks_p_answers` the
    answers of the prompts trained with those of the stream up to the last of them.
    """
    metrics, trained = record.metrics, record.trained
    expected = set(range(len(trained)))
    missing = sorted(expected - set(trained) - record.dropped.keys())
    stream = range(max(trained) + 1)
    responses = [n for i in trained for n in record.sampled[i]]
    sampled = [n for lengths in record.sampled.values() for n in lengths]

    def answers(indices: Sequence[int]) -> list[int]:
        return [len(prompts[i].answer) for i in indices]

    return {
        "seconds": round(seconds(metrics), 2),
        "wait_s": round(sum(line["learner/wait_s"] for line in metrics[1:]), 2),
        "wait_due_s": round(sum(line["learner/wait_due_s"] for line in metrics[1:]), 2),
        "staleness_max": max(line["buffer/staleness_max"] for line in metrics),
        "groups_trained": len(trained),
        "trained_twice": len(trained) - len(set(trained)),
        "dropped": dict(Counter(record.dropped.values())),
        "dropped_answer_length_mean": mean(answers(list(record.dropped))),
        "unfinished": len(missing),
        "unfinished_answer_length_mean": mean(answers(missing)),
        "trained_answer_length_mean": mean(answers(trained)),
        "stream_answer_length_mean": mean(answers(range(len(trained)))),
        "trained_tokens": sum(responses),
        "trained_response_length_mean": mean(responses),
        "trained_response_length_p99": p99(responses),
        "sampled_response_length_mean": mean(sampled),
        "sampled_response_length_p99": p99(sampled),
        "ks_p": round(ks_p_value(responses, sampled), 4),
        "ks_p_answers": round(ks_p_value(answers(trained), answers(stream)), 4),
    }


def seconds(metrics: Sequence[Line]) -> float:
    return float(metrics[-1]["time_s"] - metrics[0]["time_s"])


def with_ratios(lines: Sequence[Line]) -> list[Line]:
    """The lines of one workload and seed, with two ratios of the synchronous runs to each.

    `ratio` is of the seconds of the faster synchronous run; `ratio_to_reward` of the seconds to the
    held-out reward that both synchronous runs reach, None where this run does not reach it.
    """
    synchronous = [line for line in lines if is_synchronous(line)]
    if not synchronous:
        return list(lines)
    fastest = min(line["seconds"] for line in synchronous)
    reward = min(max(point["reward"] for point in line["curve"]) for line in synchronous)
    times = [seconds_to(line["curve"], reward) for line in lines]
    earliest = min(t or 0.0 for line, t in zip(lines, times, strict=True) if is_synchronous(line))
    return [
        {
            **line,
            "ratio": round(fastest / line["seconds"], 2),
            "reward": round(reward, 3),
            "seconds_to_reward": time and round(time, 2),
            "ratio_to_reward": round(earliest / time, 2) if earliest and time else None,
        }
        for line, time in zip(lines, times, strict=True)
    ]


def is_synchronous(line: Line) -> bool:
    return str(line["mode"]).startswith("sync")


def seconds_to(curve: Sequence[Line], reward: float) -> float | None:
    """When the curve of checkpoints first reaches the reward, linear between two checkpoints.

    >>> seconds_to([{"seconds": 0, "reward": 0.2}, {"seconds": 10, "reward": 0.6}], 0.4)
    5.0
    """
    if curve[0]["reward"] >= reward:
        return float(curve[0]["seconds"])
    for before, after in pairwise(curve):
        if after["reward"] >= reward:
            part = (reward - before["reward"]) / (after["reward"] - before["reward"])
            return float(before["seconds"] + part * (after["seconds"] - before["seconds"]))
    return None
