"""What a validation says of the responses to its prompts: mean@k, pass@k and majority@k.

Invariant: pure, and each prompt counts alike, whatever its data source.

Responses with the same answer vote together: what a reward has extracted, or the whole last turn
where none has.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from actors.rewards.answers import shown_number, whole_number, words, written
from streamrl.types.validation import MAX_METRICS


def vote(extracted: str) -> str:
    """An extracted answer as `math` compares it, but that formulas are compared as they are
    written: 0.5 and \\frac{1}{2} vote together, as "Left." and "left" do."""
    number = whole_number(extracted)
    return (words(extracted) or written(extracted)) if number is None else shown_number(number)


PREFIX = "validation"


@dataclass(frozen=True)
class PromptResult:
    """The k responses to one prompt: their rewards, and the answers that they give."""

    data_source: str
    rewards: tuple[float, ...]
    answers: tuple[str, ...]


def scores(
    results: Sequence[PromptResult], num_samples: int, pass_reward: float
) -> dict[str, float]:
    """Metrics over all prompts, and for each data source if there are several.

    Sources beyond those that fit into a report are in the metrics over all prompts alone.
    """
    overall = dict(_named(PREFIX, results, num_samples, pass_reward))
    by_source: Mapping[str, list[PromptResult]] = defaultdict(list)
    for result in results:
        by_source[result.data_source].append(result)
    num_shown = (MAX_METRICS - 2 * len(overall)) // len(overall)
    largest = sorted(by_source, key=lambda source: (-len(by_source[source]), source))[:num_shown]
    of_sources = (
        _named(f"{PREFIX}/{source}", by_source[source], num_samples, pass_reward)
        for source in largest
        if len(by_source) > 1 or source
    )
    return {**overall, **{name: value for pairs in of_sources for name, value in pairs}}


def _named(
    prefix: str, results: Sequence[PromptResult], num_samples: int, pass_reward: float
) -> Iterator[tuple[str, float]]:
    def over_prompts(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    yield f"{prefix}/mean@{num_samples}", over_prompts(statistics.fmean(r.rewards) for r in results)
    passed = [sum(reward >= pass_reward for reward in r.rewards) for r in results]
    for k in sizes(num_samples):
        yield f"{prefix}/pass@{k}", over_prompts(pass_at(num_samples, c, k) for c in passed)
    if num_samples > 1:
        yield f"{prefix}/majority@{num_samples}", over_prompts(map(majority, results))
    yield f"{prefix}/num_prompts", float(len(results))


def sizes(num_samples: int) -> tuple[int, ...]:
    """The k of pass@k: 1, the powers of two below the number of samples, and that number.

    >>> sizes(1), sizes(6), sizes(8)
    ((1,), (1, 2, 4, 6), (1, 2, 4, 8))
    """
    powers = tuple(2**i for i in range(num_samples.bit_length()) if 2**i < num_samples)
    return (*powers, num_samples)


def pass_at(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that one of k responses passes, drawn without replacement from these: the
    unbiased estimator of Chen et al. 2021 (arXiv 2107.03374).

    >>> pass_at(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def majority(result: PromptResult) -> float:
    """The mean reward of the responses with the commonest answer; of the answers that are as
    common, each counts alike.

    >>> majority(PromptResult("", (1.0, 0.0, 0.0), ("7", "8", "8")))
    0.0
    """
    counts = Counter(result.answers)
    most = max(counts.values())
    given = list(zip(result.answers, result.rewards, strict=True))
    commonest = [answer for answer, count in counts.items() if count == most]
    return statistics.fmean(
        statistics.fmean(reward for other, reward in given if other == answer)
        for answer in commonest
    )
