"""Teachers in a real run: one in the learner, one behind a URL that fails now and then."""

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.settings import set_options
from tests.system.conftest import ROOT, Launched, script
from tests.unit.rewards.services import Answer, serving

Launch = Callable[..., Launched]


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """The address of a service in a thread of its own."""
    ready, loop, found = threading.Event(), asyncio.new_event_loop(), [""]

    async def run() -> None:
        async with serving(answer) as service:
            found[0] = service.url
            ready.set()
            await stopping.wait()

    stopping = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    ready.wait()
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()


def engine_of(model: Path, *, num_between_failures: int) -> Answer:
    """An engine of vLLM's format, under which each token has a log-probability of -1."""
    tokenizer, asked = AutoTokenizer.from_pretrained(model), [0]

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if "tokens" in body:
            return 200, {"prompt": tokenizer.decode(body["tokens"])}
        asked[0] += 1
        if asked[0] % num_between_failures == 0:
            return 500, {"error": "out of memory"}
        rows = [{str(own): {"logprob": -1.0}} for own in body["prompt"][1:]]
        return 200, {"choices": [{"prompt_logprobs": [None, *rows]}]}

    return answer


@pytest.mark.long
def test_teachers_here_and_by_url_train_and_failures_cost_their_groups_alone(
    launch: Launch, model: Path
):
    with served(engine_of(model, num_between_failures=7)) as url:
        here, far = f"{{name: here, path: {model}}}", f"{{name: far, url: '{url}', weight: 3}}"
        settings = f"teachers: [{here}, {far}], template: '{{{{prompt}}}}', retries: 0"
        run = launch(f"--set=algorithm.distillation={{{settings}}}", "--set=run.max_steps=4")
        assert run.end() == 0, run.output
    assert [line["step"] for line in run.lines] == [1, 2, 3, 4]
    assert all(line["advantage/mean"] != 0 for line in run.lines)
    assert all(line["reward/teacher_kl"] != 0 for line in run.lines)
    assert run.books["balanced"]
    assert run.books["dropped"]["failed"] > 0
    assert "teacher far: " in run.log("generator-0")
    assert "answered with 500: out of memory" in run.log("generator-0")


@pytest.mark.long
@pytest.mark.parametrize("how", ["student: proximal", "top_k: 4"])
def test_a_policy_that_is_its_teacher_stays(launch: Launch, model: Path, how: str):
    settings = f"teachers: [{{path: {model}}}], {how}"
    # With the usual eps AdamW makes a step of a gradient that is zero but for its rounding.
    sizes = ("--set=run.max_steps=3", "--set=learner.optimizer.eps=0.01")
    run = launch(f"--set=algorithm.distillation={{{settings}}}", *sizes)
    assert run.end() == 0, run.output
    assert all(abs(line["reward/teacher_kl"]) < 1e-3 for line in run.lines)
    assert all(abs(line.get("actor/teacher_kl", 0)) < 1e-4 for line in run.lines)
    assert run.books["balanced"]


@pytest.mark.long
def test_the_script_compares_a_teacher_with_rewards(tmp_path: Path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    own = ("learner.optimizer.warmup_steps=0", "run.max_steps=6")
    sizes = (*own, "model.recipe.warm_start_accuracy=0.02", "data.num_eval_prompts=8")
    words = set_options(*sizes)
    command = [*script("distill"), "configs/ablation/lag.yaml", "--lags", "0", "--seeds", "0"]
    done = subprocess.run(
        [*command, *words, "--teacher-steps", "2", "--reach", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "runs/ablation/lag/distillation.md").read_text().splitlines()
    assert table[0].startswith("| variant, lag | steps to 0 (seeds) |")
    assert [row.split(" | ")[:2] for row in table[2:]] == [
        [f"| {name}, 0", "5"]
        for name in ("grpo", "teacher", "teacher_behavior", "teacher_and_reward")
    ]
