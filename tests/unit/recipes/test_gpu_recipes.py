"""The recipes for GPUs: their prompts, and what a launch would start on the machines they name."""

import json
import shutil
from pathlib import Path

import pytest

from actors.prompts import open_prompts
from actors.rewards.builtin import numeric_answer
from streamrl.cli.new import recipes
from streamrl.config import RunConfig, load_config
from streamrl.interfaces import Episode
from streamrl.placement.make_plan import make_plan
from streamrl.placement.plan import Plan
from streamrl.types import FinishReason
from tests.unit.placement.plans import one_host, several

ROOT = Path(__file__).parents[3]
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, True),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, False),
    "Qwen/Qwen2.5-14B-Instruct": (5120, 13824, 48, 40, 8, False),
}
"""Width, width of the MLP, layers, heads, key-value heads, tied embeddings."""


def with_model(name: str, folder: Path, *settings: str) -> RunConfig:
    """The recipe, with a folder that has the shape of its model."""
    file = recipes()[name] / "config.yaml"
    config = load_config(file, settings, environment={}).config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names = (*names, "num_key_value_heads", "tie_word_embeddings")
    shape = dict(zip(names, SHAPES[config.model.path], strict=True))
    vocab = 151_936 if shape["tie_word_embeddings"] else 152_064
    facts = {"model_type": "qwen2", "vocab_size": vocab, **shape}
    (folder / "config.json").write_text(json.dumps(facts))
    model = config.model.model_copy(update={"path": str(folder)})
    return config.model_copy(update={"model": model})


def seats(plan: Plan) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {p.name: (p.host, p.devices) for p in plan.processes if p.role != "buffer"}


@pytest.mark.parametrize(("model", "gib"), [("0.5B", 24), ("1.5B", 80)])
def test_one_gpu_is_shared_by_learner_engine_and_validator(tmp_path, model, gib):
    config = with_model("gsm8k", tmp_path, f"model.path=Qwen/Qwen2.5-{model}-Instruct")
    plan = make_plan(config, one_host(1, gib))
    assert set(seats(plan).values()) == {("here", (0,))}
    assert set(seats(plan)) == {"learner", "generator-0", "validator"}


def test_one_gpu_is_shared_by_learner_and_engine_of_the_tools(tmp_path):
    plan = make_plan(with_model("file_search", tmp_path), one_host(1, 80))
    assert seats(plan) == {"learner": ("here", (0,)), "generator-0": ("here", (0,))}


def test_eight_gpus_are_four_ranks_and_four_generators(tmp_path):
    plan = make_plan(with_model("gsm8k_8gpus", tmp_path), one_host(8, 80))
    generators = {f"generator-{i}": ("here", (4 + i,)) for i in range(4)}
    assert seats(plan) == {"learner": ("here", (0, 1, 2, 3)), **generators}


def test_two_hosts_are_a_learner_of_eight_ranks_and_eight_generators(tmp_path):
    config = with_model("gsm8k_2x8", tmp_path)
    buffer = config.buffer.model_copy(update={"curve": tmp_path / "keys"})
    plan = make_plan(config.model_copy(update={"buffer": buffer}), several(8, 8, gib=80))
    generators = {f"generator-{i}": ("host-1", (i,)) for i in range(8)}
    assert seats(plan) == {"learner": ("host-0", tuple(range(8))), **generators}


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_8gpus", "gsm8k_2x8"])
def test_the_data_and_the_reward_of_gsm8k_fit_each_other(name, tmp_path):
    """Rows of the data set, from a file in the place of the hub."""
    (sample,) = sorted((ROOT / "tests/data/gsm8k").glob("*.jsonl"))[:1]
    rows = shutil.copy(sample, tmp_path / "train.jsonl")
    config = load_config(recipes()[name] / "config.yaml", environment={}).config
    source = [s.model_copy(update={"path": str(rows)}) for s in config.data.source]
    local = config.data.model_copy(update={"source": source, "eval_source": source})
    prompt = open_prompts(local, config.run.seed)[0]
    assert prompt.content.endswith('output the final answer after "####".')
    assert numeric_answer(Episode(prompt, prompt.answer, 1, FinishReason.STOP)).reward == 1.0
    assert numeric_answer(Episode(prompt, "#### -7.25", 1, FinishReason.STOP)).reward == 0.0
