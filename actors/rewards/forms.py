"""The forms of a reward function: how each is called, and what its return value means.

    (episode, **kwargs)                                              a number
    (episodes, **kwargs)                                             a list of numbers
    verl's (data_source, solution_str, ground_truth, extra_info)     a number
    verl's (data_sources, solution_strs, ground_truths, extra_infos) a list of numbers
    TRL's (prompts, completions, completion_ids, **columns)          a list of numbers or None

Instead of a number, a function may return a dict with `score` and further numbers, or a `Score`. A
text in the dict under `extracted` (or verl's `pred`) is the answer found in the response. None
means that the reward does not apply to the episode.

A form is recognized by the names of the parameters.
Invariant: a function gives one finite number for each episode, or a RolloutError is raised.
"""

import inspect
import itertools
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

from actors.rewards.calls.limits import FinalError
from streamrl.errors import RolloutError
from streamrl.interfaces import Episode, Prompt, Score
from streamrl.samples.record import shortened_answer
from streamrl.user_code import attributed_to, defined_at

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRL_OWN = frozenset({"prompt", "completion", "completion_ids"})


@dataclass(frozen=True)
class Form:
    """`arguments` makes a call's arguments from episodes and the column of their data source."""

    arguments: Callable[[Sequence[Episode], str], Arguments]
    takes_group: bool
    may_not_apply: bool = False


def form_of(function: Callable[..., Any]) -> Form:
    """The form of a function."""
    parameters = tuple(inspect.signature(function).parameters)
    if "completions" in parameters:
        return TRL
    if "solution_str" in parameters:
        return VERL
    if "solution_strs" in parameters:
        return VERL_BATCH
    return OWN_GROUP if parameters[:1] == ("episodes",) else OWN


@dataclass(frozen=True)
class BoundFunction:
    """A reward function with the arguments from the configuration. `name` is used in errors."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    name: str
    data_source_key: str = "data_source"

    @property
    def title(self) -> str:
        return f"reward {self.name}"

    @cached_property
    def form(self) -> Form:
        return form_of(self.function)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def score(self, episodes: Sequence[Episode]) -> list[Score | None]:
        """Score one episode, or a group if the function takes groups; for functions that are not
        async.

        Raises:
            RolloutError: it raised, or returned something other than finite numbers.
        """
        with self._attributed():
            answer = self._call(episodes)
        return self._read(answer, len(episodes))

    def score_one(self, episode: Episode) -> Score | None:
        """Like `score`, for one episode."""
        return self.score([episode])[0]

    async def wait_for_score(self, episodes: Sequence[Episode]) -> list[Score | None]:
        """Like `score`, for an async function. Waits for its answer."""
        with self._attributed():
            answer = await self._call(episodes)
        return self._read(answer, len(episodes))

    @contextmanager
    def _attributed(self) -> Iterator[None]:
        """Turn what the function raises into a RolloutError that begins with the title."""
        try:
            with attributed_to(self.title, RolloutError):
                yield
        except RolloutError as error:
            if not isinstance(refused := error.__cause__, RolloutError):
                raise
            kind = FinalError if isinstance(refused, FinalError) else RolloutError
            raise kind(f"{self.title}: {refused}") from refused.__cause__

    def _call(self, episodes: Sequence[Episode]) -> Any:
        args, named = self.form.arguments(episodes, self.data_source_key)
        takes_any, names = self._parameters
        taken = {name: value for name, value in named.items() if takes_any or name in names}
        return self.function(*args, **{**taken, **self.kwargs})

    @cached_property
    def _parameters(self) -> tuple[bool, frozenset[str]]:
        """Whether it takes any keyword argument, and the names of its parameters."""
        parameters = inspect.signature(self.function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return takes_any, frozenset(parameters)

    def _read(self, answer: Any, num_episodes: int) -> list[Score | None]:
        answers = answer
        try:
            if not self.form.takes_group:
                answers = [answer]
            elif not isinstance(answer, str | bytes):
                # Read at most one more than needed: the answer may be endless.
                answers = list(itertools.islice(answer, num_episodes + 1))
            scores = [self._score(value) for value in answers]
        except (TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise self._refusal(answers, num_episodes) from error
        if len(scores) != num_episodes:
            raise self._refusal(answers, num_episodes)
        return scores

    def _score(self, answer: Any) -> Score | None:
        if answer is None and self.form.may_not_apply:
            return None
        score = score_of(answer)
        if not math.isfinite(score.reward):
            raise ValueError(answer)
        return score

    def _refusal(self, answers: Any, expected: int) -> RolloutError:
        if self.form.takes_group:
            needed = f"it must return {expected} finite numbers, one for each episode"
        else:
            needed, answers = "it must return one finite number", answers[0]
        place = f"{self.title}{defined_at(self.function)}"
        return RolloutError(f"{place} returned {reprlib.repr(answers)}: {needed}")


def score_of(answer: Any) -> Score:
    """A score from a number, a `Score`, or a mapping with `score` (or `reward`) and further
    numbers.

    Raises:
        TypeError, ValueError, KeyError: it is none of these.
    """
    if isinstance(answer, Score):
        metrics = {str(name): _number(value) for name, value in answer.metrics.items()}
        if not all(map(math.isfinite, metrics.values())):
            raise ValueError(answer)
        return Score(_number(answer.reward), metrics, _text(answer.extracted))
    if not isinstance(answer, Mapping):
        return Score(_number(answer))
    key = "score" if "score" in answer else "reward"
    numbers = {
        str(name): float(value)
        for name, value in answer.items()
        if name != key and isinstance(value, Real) and math.isfinite(value)
    }
    return Score(_number(answer[key]), numbers, _text(answer.get("extracted", answer.get("pred"))))


def _text(value: Any) -> str | None:
    return shortened_answer(value) if isinstance(value, str) else None


def _number(value: Any) -> float:
    """Convert a number to float; text, which `float` would read, is refused."""
    if isinstance(value, str | bytes):
        raise TypeError(value)
    return float(value)


def conversation(episode: Episode) -> list[dict[str, Any]]:
    """The messages of the episode, the response last."""
    if episode.messages:
        return [dict(message) for message in episode.messages]
    content = episode.prompt.content
    prompt = [{"role": "user", "content": content}] if isinstance(content, str) else content
    last = {"role": "assistant", "content": episode.response}
    return [*(dict(message) for message in prompt), last]


def gold_of(prompt: Prompt) -> Any:
    """verl's column `reward_model.ground_truth`, or the answer of the row."""
    column = prompt.row.get("reward_model")
    if isinstance(column, Mapping) and "ground_truth" in column:
        return column["ground_truth"]
    return prompt.answer


def shown_gold(prompt: Prompt) -> str:
    """The expected answer, shortened for people: it may be the tests of a program."""
    gold = gold_of(prompt)
    return shortened_answer(gold if isinstance(gold, str) else reprlib.repr(gold))


def _verl(episodes: Sequence[Episode], data_source_key: str) -> Arguments:
    (episode,) = episodes
    row = episode.prompt.row
    own = row.get("extra_info")
    extra = own if isinstance(own, Mapping) else {}
    return (), {
        "data_source": row.get(data_source_key),
        "solution_str": episode.response,
        "ground_truth": gold_of(episode.prompt),
        "extra_info": {**extra, "num_turns": len(episode.turn_rewards) or 1},
    }


def _verl_batch(episodes: Sequence[Episode], data_source_key: str) -> Arguments:
    each = [_verl([episode], data_source_key)[1] for episode in episodes]
    return (), {f"{name}s": [named[name] for named in each] for name in VERL_NAMES}


def _trl(episodes: Sequence[Episode], _: str) -> Arguments:
    rows = [{"answer": e.prompt.answer, **e.prompt.row} for e in episodes]
    columns = [name for name in rows[0] if name not in _TRL_OWN] if rows else []
    return (), {
        "prompts": [_prompt(e) for e in episodes],
        "completions": [_completion(e) for e in episodes],
        "completion_ids": [list(e.response_token_ids) for e in episodes],
        **{name: [row.get(name) for row in rows] for name in columns},
    }


def _prompt(episode: Episode) -> str | list[dict[str, Any]]:
    content = episode.prompt.content
    return content if isinstance(content, str) else [dict(message) for message in content]


def _completion(episode: Episode) -> str | list[dict[str, Any]]:
    """The completion: text after a text prompt; after messages, the messages that followed. The
    content of a final answer includes its thoughts, since rewards for a format look for them there;
    but not thoughts marked by special tokens, which are not in the response's text."""
    content = episode.prompt.content
    if isinstance(content, str):
        return episode.response
    messages = conversation(episode)[len(content) :]
    last = messages[-1] if messages else {}
    is_answer = last.get("role") == "assistant" and not last.get("tool_calls")
    if is_answer and "think>" in episode.response:
        messages[-1] = {**last, "content": episode.response}
    return messages


OWN = Form(lambda episodes, _: ((episodes[0],), {}), takes_group=False)
OWN_GROUP = Form(lambda episodes, _: ((episodes,), {}), takes_group=True)
VERL = Form(_verl, takes_group=False)
VERL_BATCH = Form(_verl_batch, takes_group=True)
TRL = Form(_trl, takes_group=True, may_not_apply=True)
