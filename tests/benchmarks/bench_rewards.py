"""Grading: responses a second and the p99 of one, beside math-verify alone and TRL's own way.

    PYTHONPATH=. .venv/bin/python tests/benchmarks/bench_rewards.py [--trl FOLDER] [--prompts 48] \
        [--programs 6] [--conversations 8] [--rounds 3]

Responses are groups of 8 siblings: 150 to 600 words, then a boxed answer, which is right in half of
them, in two notations.

    numeric   `numeric_answer`; answers are whole numbers and decimals
    math      `math`; of the answers three quarters are numbers, as MATH-500's are, the others
              formulas, roots, points and intervals
    code      `code`; a test of 20 inputs and outputs, a program of 15 lines that imports sys,
              collections and typing
    model     `reward_model`; a Llama of 4 layers of 256 with one label, on the CPU

    ours          the reward of a run, with its limits, processes and sandbox, 2 groups at a time
    math_verify   `verify(parse(gold), parse(response))`, one after the other
    trl           `trl.rewards.accuracy_reward` of one group after the other, as its trainer does
    process       a Python process for each input, of all inputs, as the script of open-r1 (TRL's
                  code reward) starts them; no sandbox around them, 2 responses at a time.
                  SandboxFusion's package is a client of its server, which comes as a container
    trl_model     the classifier called with all responses of a step, padded on the right to the
                  longest, as TRL's GRPOTrainer calls a reward model

`p99` is of responses that are scored alone, of other prompts. Starting processes and importing are
not counted. Each round has prompts of its own, all take turns in it, and the median of the rounds'
ratios counts.
`agrees` is the share of rewards that are right; those of a reward model are of a response alone.
TRL's file is loaded from FOLDER, from an installed trl, or from one that pip puts into a temporary
folder, with a stand-in for what it imports of trl.
"""

import argparse
import asyncio
import importlib.util
import json
import logging
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from math_verify import parse, verify
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from actors.rewards import make_reward
from streamrl.config.data import DataSettings
from streamrl.interfaces import Episode, Prompt, Reward
from streamrl.types import FinishReason
from tests.benchmarks.measure import Figures

TRL, FILE = "trl==1.16.0", Path("trl", "rewards", "accuracy_rewards.py")
GROUP_SIZE, AT_A_TIME, NUM_CASES = 8, 2, 20
WORDS = ("so", "we", "see", "that", "the", "sum", "of", "both", "is", "what", "was", "asked")
PROGRAM = """import sys
from collections import Counter
from typing import List


def commonest(values: List[int]) -> int:
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


def main() -> None:
    values = list(map(int, sys.stdin.read().split()))[1:]
    print(sum(values), RESULT)


main()
"""


@dataclass(frozen=True)
class Graded:
    """A response, and what it is worth."""

    episode: Episode
    reward: float


Group = Sequence[Graded]
Round = tuple[Sequence[Group], Sequence[Group]]
"""What is scored as fast as can be, and what is scored alone."""
Grade = Callable[[Group], Sequence[float | None]]
Run = Callable[[Sequence[Group]], Awaitable[Sequence[float | None]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", type=Path, help="folder that has trl/rewards/accuracy_rewards.py")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--programs", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=8, help="prompts for reward models")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as temporary:
        theirs = {
            "math_verify": in_turn(by_math_verify),
            "trl": in_turn(by_trl(given.trl or find_trl(Path(temporary)))),
        }
        for kind, reward in (("numeric", "numeric_answer"), ("math", "math")):
            make = partial(of_math, kind)
            data = DataSettings(source="copy", reward=reward)
            rounds = rounds_of(make, given.prompts, given.rounds)
            show(compared(kind, data, make(-4), rounds, theirs))
        data = DataSettings(source="copy", reward="code")
        rounds = rounds_of(of_code, given.programs, given.rounds)
        show(compared("code", data, of_code(-1), rounds, {"process": by_processes}))
        data, classifier = reward_model(Path(temporary))
        rounds = rounds_of(classifier.group, given.conversations, given.rounds)
        trl_model = {"trl_model": classifier.of_step}
        show(compared("model", data, classifier.group(-1), rounds, trl_model))


def show(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def rounds_of(make: Callable[[int], Group], count: int, rounds: int) -> list[Round]:
    groups = [make(number) for number in range(2 * count * rounds)]
    starts = range(0, len(groups), 2 * count)
    return [(groups[s : s + count], groups[s + count : s + 2 * count]) for s in starts]


def compared(
    kind: str, data: DataSettings, warm_up: Group, rounds: Sequence[Round], theirs: dict[str, Run]
) -> dict[str, Any]:
    """The line of one kind: ours against each of the others."""

    async def contest() -> dict[str, list[Figures]]:
        ours = make_reward(data)
        await scored_by(ours, [warm_up, warm_up])
        runs: dict[str, list[Figures]] = {name: [] for name in ("ours", *theirs)}
        for groups in rounds:
            runs["ours"].append(await figures_of(groups, partial(scored_by, ours)))
            for name, run in theirs.items():
                runs[name].append(await figures_of(groups, run))
        return runs

    found = asyncio.run(contest())
    ours = found.pop("ours")
    return {
        "benchmark": "rewards",
        "kind": kind,
        "responses": sum(map(len, rounds[0][0])),
        **{
            name: {
                "ratio": ratio(ours, other, "per_s"),
                "p99_ratio": ratio(other, ours, "p99_s"),
                "agrees": other[0]["agrees"],
            }
            for name, other in found.items()
        },
        "ours": {"agrees": ours[0]["agrees"]},
        "target": {"ratio": 3},
    }


async def figures_of(of_round: Round, run: Run) -> Figures:
    """Responses a second, p99 of one alone, share that agrees."""
    groups, others = of_round
    start = time.perf_counter()
    rewards = await run(groups)
    seconds = time.perf_counter() - start
    alone = []
    for group in others:
        begin = time.perf_counter()
        await run([group[:1]])
        alone.append(time.perf_counter() - begin)
    right = [graded.reward for group in groups for graded in group]
    agreeing = sum(
        value is not None and math.isclose(value, wanted, abs_tol=1e-4)
        for value, wanted in zip(rewards, right, strict=True)
    )
    return {
        "per_s": len(right) / seconds,
        "p99_s": sorted(alone)[int(0.99 * len(alone))],
        "agrees": round(agreeing / len(right), 3),
    }


def ratio(above: Sequence[Figures], below: Sequence[Figures], name: str) -> float:
    """The median over the rounds."""
    pairs = zip(above, below, strict=True)
    return round(statistics.median(one[name] / other[name] for one, other in pairs), 1)


async def scored_by(reward: Reward, groups: Sequence[Group]) -> list[float]:
    slots = asyncio.Semaphore(AT_A_TIME)

    async def one(group: Group) -> list[float]:
        async with slots:
            return [score.reward for score in await reward.score([g.episode for g in group])]

    return [value for values in await asyncio.gather(*map(one, groups)) for value in values]


def in_turn(grade: Grade) -> Run:
    """math-verify limits its time by signals, which the main thread alone may have."""

    async def run(groups: Sequence[Group]) -> list[float | None]:
        return [value for group in groups for value in grade(group)]

    return run


def by_math_verify(group: Group) -> list[float]:
    return [
        float(verify(parse(f"${g.episode.prompt.answer}$"), parse(g.episode.response)))
        for g in group
    ]


def by_trl(folder: Path) -> Grade:
    """TRL's function alone."""
    stand_ins = {name: ModuleType(name) for name in ("trl", "trl.import_utils", "trl.rewards")}
    stand_ins["trl.import_utils"].is_math_verify_available = lambda: True
    sys.modules.update(stand_ins)
    spec = importlib.util.spec_from_file_location("trl.rewards.accuracy_rewards", folder / FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def grade(group: Group) -> Sequence[float | None]:
        completions = [[{"role": "assistant", "content": g.episode.response}] for g in group]
        return module.accuracy_reward(completions, [f"${g.episode.prompt.answer}$" for g in group])

    return grade


async def by_processes(groups: Sequence[Group]) -> list[float]:
    slots = asyncio.Semaphore(AT_A_TIME)

    async def one(graded: Graded) -> float:
        async with slots:
            return await asyncio.to_thread(passes, graded)

    return list(await asyncio.gather(*(one(graded) for group in groups for graded in group)))


def passes(graded: Graded) -> float:
    program = graded.episode.response.partition("```python\n")[2].partition("```")[0]
    tests = graded.episode.prompt.row["input_output"]
    num_passed = 0
    for given, expected in zip(tests["inputs"], tests["outputs"], strict=True):
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=given,
            capture_output=True,
            text=True,
            timeout=10,
        )
        num_passed += not done.returncode and done.stdout.strip() == expected.strip()
    return float(num_passed == NUM_CASES)


class Classifier:
    """A sequence classifier with random weights, as TRL calls it."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def group(self, number: int) -> list[Graded]:
        """The siblings of one prompt, each with its score alone."""
        rng = random.Random(number)
        prompt = Prompt(" ".join(rng.choices(WORDS, k=40)) + " ", "")
        episodes = [said(prompt, thought(rng)) for _ in range(GROUP_SIZE)]
        return [Graded(episode, *self._scores([episode])) for episode in episodes]

    async def of_step(self, groups: Sequence[Group]) -> list[float]:
        return self._scores([graded.episode for group in groups for graded in group])

    def _scores(self, episodes: Sequence[Episode]) -> list[float]:
        inputs = self._tokenizer(
            text=[f"{episode.prompt.content}{episode.response}" for episode in episodes],
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        )
        with torch.inference_mode():
            scores: list[float] = self._model(**inputs).logits[:, 0].tolist()
        return scores


def reward_model(temporary: Path) -> tuple[DataSettings, Classifier]:
    """Of a tokenizer of words."""
    folder = temporary / "model"
    words = {word: i for i, word in enumerate(("<pad>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=1,
        pad_token_id=0,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    kwargs = {"path": str(folder), "chat_template": "none"}
    data = DataSettings(source="copy", reward="reward_model", reward_kwargs=kwargs)
    return data, Classifier(folder)


def of_math(kind: str, number: int) -> list[Graded]:
    """The siblings of one prompt."""
    rng = random.Random(f"{kind} {number}")
    right, same, *wrong = answers(rng, "number" if kind == "numeric" or number % 4 else "formula")
    given = [(right, True), (same, True), *((text, False) for text in wrong)]
    drawn = [*given[:2], *given[:2], *rng.choices(given[2:], k=GROUP_SIZE - 4)]
    rng.shuffle(drawn)
    prompt = Prompt("question", right)
    return [Graded(said(prompt, f"{thought(rng)} \\boxed{{{text}}}"), ok) for text, ok in drawn]


def answers(rng: random.Random, kind: str) -> list[str]:
    """The right one, the same in another notation, and wrong ones."""
    a, b, c = rng.sample(range(2, 60), 3)
    if kind == "number":
        return [f"{1000 + a}", f"{1000 + a:,}.0", f"{1000 + b}", f"-{1000 + a}", f"{a}"]
    forms = (
        (f"\\frac{{{a}x}}{{{b}}}", f"\\dfrac{{{a}}}{{{b}}}x", f"\\frac{{{b}x}}{{{a}}}"),
        (f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{b}}} \\cdot {a}", f"{b}\\sqrt{{{a}}}"),
        (f"({a}, {b}\\pi)", f"\\left({a}, {b} \\pi\\right)", f"({b}, {a}\\pi)"),
        (f"[{a}, {a + b})", f"\\left[{a},{a + b}\\right)", f"({a}, {a + b})"),
    )
    right, same, other = rng.choice(forms)
    return [right, same, other, f"{c}x + {a}"]


def of_code(number: int) -> list[Graded]:
    rng = random.Random(number)
    rows = [[rng.randrange(-99, 99) for _ in range(rng.randrange(1, 30))] for _ in range(NUM_CASES)]
    tests = {
        "inputs": [f"{len(row)}\n{' '.join(map(str, row))}\n" for row in rows],
        "outputs": [f"{sum(row)} {max(row, key=lambda v: (row.count(v), v))}\n" for row in rows],
    }
    prompt = Prompt("question", "", {"input_output": tests})
    results = {"commonest(values)": True, "max(values) + (len(values) > 28)": False}
    return [
        Graded(said(prompt, f"{thought(rng)}\n```python\n{program}```\n"), is_right)
        for result, is_right in results.items()
        for program in [PROGRAM.replace("RESULT", result)] * (GROUP_SIZE // 2)
    ]


def thought(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randrange(150, 600)))


def said(prompt: Prompt, response: str) -> Episode:
    return Episode(prompt, response, len(response) // 4, FinishReason.STOP)


def find_trl(temporary: Path) -> Path:
    """A folder that holds trl's package: where it is installed, or where pip puts it."""
    spec = importlib.util.find_spec("trl")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0]).parent
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", TRL]
    if subprocess.run([*command, "--target", str(temporary)], check=False).returncode:
        raise SystemExit(f"{TRL} could not be installed; give its folder by --trl")
    return temporary


if __name__ == "__main__":
    main()
