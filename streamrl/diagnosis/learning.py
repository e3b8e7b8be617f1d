"""Signs that a run does not learn, from the metrics of its last steps, each with a remedy.

Pure. The learner adds each step's metrics. What is found goes into its log and its report, and so
into the live view, `streamrl status` and the summary.

Invariant: a sign is an entry of `SIGNS`. It holds over the last `run.signs.steps` steps together,
and says for how many steps it has held. A sign that another one explains is not reported beside it.
A metric that is not measured gives no sign.
"""

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple

from streamrl.config.run import SignSettings

_SOLVED = 0.9
_HELD_OUT = re.compile(r"validation/mean@\d+")


class TrainingReward(NamedTuple):
    """The mean reward over `run.signs.steps` steps, the last of these steps, and the mean's
    standard error."""

    mean: float
    step: int
    error: float


_NO_REWARD = TrainingReward(-math.inf, 0, 0.0)


class HeldOut(NamedTuple):
    """The mean held-out reward of a version."""

    reward: float
    version: int
    num_prompts: float


@dataclass
class Signs:
    """The signs of a run: add each step's metrics with `add`; `go_on` continues from a file."""

    settings: SignSettings
    lines: deque[Mapping[str, Any]] = field(default_factory=deque)
    """Metrics of the last `settings.steps` steps, oldest first."""
    first_entropy: float | None = None
    """Mean over the first `settings.steps` steps."""
    best: TrainingReward = _NO_REWARD
    """The largest mean over `settings.steps` steps."""
    max_reward: float = -math.inf
    held_out: list[HeldOut] = field(default_factory=list)
    """Oldest first."""
    _num_steps: dict[str, int] = field(default_factory=dict)
    """For how many steps each sign has been seen without a break."""

    def values(self, name: str) -> list[float]:
        """The metric in each of the last steps; [] if any step lacks it or its value is not
        finite."""
        found = [float(line[name]) for line in self.lines if line.get(name) is not None]
        return found if len(found) == len(self.lines) and all(map(math.isfinite, found)) else []

    def mean(self, name: str) -> float | None:
        values = self.values(name)
        return fmean(values) if values else None

    def are_all(self, name: str, value: float) -> bool:
        return {*self.values(name)} == {value}

    def go_on(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Continue after the steps of these lines of a `metrics.jsonl`, where null is a value that
        was not finite."""
        for line in lines if self.settings.steps else ():
            of_step = {k: math.nan if v is None else v for k, v in line.items()}
            self.add(line["step"], of_step)

    def add(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, str]:
        """Add a step; return the signs seen with it, by their names in `SIGNS`, each as a sentence
        with its remedy; {} before there are enough steps."""
        steps = self.settings.steps
        if not steps:
            return {}
        self.lines.append(metrics)
        if len(self.lines) > steps:
            self.lines.popleft()
        if (largest := metrics.get("reward/max")) is not None:
            self.max_reward = max(self.max_reward, largest)
        self._add_validation(step, metrics)
        if len(self.lines) < steps:
            return {}
        found = {name: seen for name, sign in SIGNS.items() if (seen := sign.find(self))}
        if self.first_entropy is None:
            self.first_entropy = self.mean("actor/entropy")
        if rewards := self.values("reward/mean"):
            self.best = max(self.best, TrainingReward(fmean(rewards), step, _error(rewards)))
        self._num_steps = {name: self._num_steps.get(name, steps - 1) + 1 for name in found}
        return dict(self._sentences(found))

    def _add_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step's line contains the validation that was reported since the previous step, if
        any."""
        version = int(metrics.get("validation/policy_version", step))
        num_prompts = max(1.0, metrics.get("validation/num_prompts", 1.0))
        found = (float(value) for name, value in metrics.items() if _HELD_OUT.fullmatch(name))
        self.held_out += [HeldOut(reward, version, num_prompts) for reward in found]

    def _sentences(self, found: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        explained: set[str] = set()
        for name, seen in found.items():
            if name not in explained:
                yield name, f"for {self._num_steps[name]} steps {seen}: {SIGNS[name].remedy}"
                explained |= set(SIGNS[name].explains)


@dataclass(frozen=True)
class Sign:
    """`find` returns what is seen in the last steps, as the end of a sentence, or ""."""

    find: Callable[[Signs], str]
    remedy: str
    explains: tuple[str, ...] = ()


def _is_always(name: str, value: float, seen: str) -> Callable[[Signs], str]:
    return lambda signs: seen if signs.are_all(name, value) else ""


def _no_reward(signs: Signs) -> str:
    return "every reward is 0" if _all_rewards(signs) == 0 else ""


def _one_reward(signs: Signs) -> str:
    value = _all_rewards(signs)
    return "" if value is None or value == 0 else f"every reward is {value:g}"


def _all_rewards(signs: Signs) -> float | None:
    """The value that all rewards have; None if they differ."""
    values = {*signs.values("reward/min"), *signs.values("reward/max")}
    return values.pop() if len(values) == 1 else None


def _alike(signs: Signs) -> str:
    is_alike = signs.are_all("reward/groups_alike_frac", 1.0)
    is_flat = signs.are_all("advantage/abs_mean", 0.0)
    seen = "the rewards of each group are alike, so no advantage is left"
    return seen if is_alike and is_flat else ""


def _bad_gradient(signs: Signs) -> str:
    norms = [line.get("learner/grad_norm") for line in signs.lines]
    is_bad = all(norm is not None and not 0 <= norm < math.inf for norm in norms)
    return "the gradient is not finite" if is_bad else ""


def _falling(signs: Signs) -> str:
    """The training reward fell by more than chance (two standard errors of the difference)."""
    rewards, best = signs.values("reward/mean"), signs.best
    if not rewards or best.mean <= 0:
        return ""
    now, chance = fmean(rewards), 2 * math.hypot(best.error, _error(rewards))
    if best.mean - now <= max(signs.settings.max_reward_fall * best.mean, chance):
        return ""
    return f"the training reward is {now:.3f}, and was {best.mean:.3f} at step {best.step}"


def _error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _held_out_falling(signs: Signs) -> str:
    """The held-out reward fell in two validations, and by more than chance: two standard errors of
    a mean of n rewards between 0 and the largest are at most the largest over the root of n."""
    if not signs.held_out:
        return ""
    best = max(signs.held_out)
    newest = max(signs.held_out[-2:]).reward
    chance = max(0.0, signs.max_reward) / math.sqrt(best.num_prompts)
    fall = max(signs.settings.max_held_out_fall * best.reward, chance)
    if best.reward <= 0 or newest >= best.reward - fall:
        return ""
    now = signs.held_out[-1].reward
    return f"the held-out reward is {now:.3f}, and was {best.reward:.3f} at version {best.version}"


def _memorized(signs: Signs) -> str:
    passes = signs.values("learner/num_passes")
    known = signs.held_out
    has_risen = bool(known) and known[-1].reward > known[0].reward
    if has_risen or not (passes and passes[0] >= signs.settings.max_passes):
        return ""
    held_out = (
        "the held-out reward has not risen"
        if known
        else "no held-out reward (data.eval_source) shows that more is learned than these"
    )
    return (
        f"the same prompts are trained over and over, {passes[-1]:.0f} times by now, and {held_out}"
    )


def _collapsed(signs: Signs) -> str:
    """The entropy collapsed; not reported of a solved task, where low entropy is right."""
    now, reward = signs.mean("actor/entropy"), signs.mean("reward/mean")
    if now is None or reward is None or signs.first_entropy is None:
        return ""
    is_solved = reward >= _SOLVED * signs.max_reward
    if is_solved or now >= signs.settings.min_entropy_frac * signs.first_entropy:
        return ""
    return f"the entropy is {now:.2g} nats, and was {signs.first_entropy:.2g} at the start"


def _few_count(signs: Signs) -> str:
    size = signs.mean("mismatch/rollout_is_eff_sample_size")
    if size is None or size >= signs.settings.min_eff_sample_size:
        return ""
    return f"the effective sample size is {size:.2f} of the batch"


def _cut(signs: Signs) -> str:
    share = signs.mean("response_length/clip_ratio")
    if share is None or share <= signs.settings.max_clip_ratio:
        return ""
    return f"a limit cuts {100 * share:.0f} % of the responses"


def _far(signs: Signs) -> str:
    for name in ("actor/kl_loss", "reward/kl"):
        kl = signs.mean(name)
        if kl is not None and kl > signs.settings.max_kl:
            return f"the KL to the reference is {kl:.2g} nats a token"
    return ""


SIGNS: Mapping[str, Sign] = {
    "falling": Sign(
        _falling,
        "lower learner.optimizer.lr or buffer.max_staleness, and go on from a checkpoint of before "
        "(run.resume)",
        ("no_reward", "alike", "no_gradient", "held_out_falling"),
    ),
    "held_out_falling": Sign(
        _held_out_falling,
        "stop there (validation.early_stop), go on from a checkpoint of before (run.resume), and "
        "take more prompts or a lower learner.optimizer.lr",
        ("memorized",),
    ),
    "memorized": Sign(
        _memorized,
        "take more prompts or fewer steps",
    ),
    "no_reward": Sign(
        _no_reward,
        "compare answers with what is expected in `streamrl samples`; begin with easier prompts, "
        "or pay for parts of an answer",
        ("alike", "no_gradient"),
    ),
    "one_reward": Sign(
        _one_reward,
        "if the prompts are solved, take harder ones; else see what the reward pays for in "
        "`streamrl samples`",
        ("alike", "no_gradient"),
    ),
    "alike": Sign(
        _alike,
        "raise generator.group_size or generator.temperature, or take prompts that are answered "
        "rightly at times",
        ("no_gradient",),
    ),
    "no_gradient": Sign(
        _is_always("learner/grad_norm", 0.0, "the gradient is 0"),
        "see which corrections mask all tokens (mismatch/*), and whether algorithm.loss reads the "
        "advantages",
        # If corrections mask all tokens, the entropy is taken over no token.
        ("collapsed",),
    ),
    "bad_gradient": Sign(
        _bad_gradient, "lower learner.optimizer.lr, bound the reward, or try learner.dtype: float32"
    ),
    "collapsed": Sign(
        _collapsed,
        "raise algorithm.entropy_coef, loss_config.clip_ratio_high or generator.temperature, or "
        "lower learner.optimizer.lr",
    ),
    "few_count": Sign(
        _few_count,
        "lower buffer.max_staleness or learner.optimizer.lr, and compare engine and learner with "
        "`streamrl parity`",
    ),
    "cut": Sign(
        _cut,
        "raise generator.max_new_tokens, or pay less for long answers (algorithm.reward.length, "
        "algorithm.reward.truncated)",
    ),
    "far": Sign(_far, "raise algorithm.kl_loss.coef, or lower learner.optimizer.lr"),
    "no_form": Sign(
        _is_always("reward/format", 0.0, "no response has the form that format pays for"),
        "show the form in data.system_prompt, with an example",
    ),
    "no_tool": Sign(
        _is_always("episode/tools/num_tool_calls", 0.0, "no tool is called"),
        "say in data.system_prompt when to call, and see with `streamrl samples` what is written "
        "instead",
    ),
}
