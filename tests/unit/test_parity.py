"""Engine and learner on the same tokens: they agree in float32, less in bfloat16, and a model that
is another one, or a threshold that is too low, is refused with a sentence."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from learners.parity import statistics_of
from streamrl.cli import launch
from streamrl.cli.main import main
from streamrl.cli.parity import compare
from streamrl.cli.parity.compare import complaints, require_parity
from streamrl.cli.processes import run_commands
from streamrl.config import RunConfig, load_config
from streamrl.errors import StreamRLError
from streamrl.types import ParityReport
from tests.training import make_config

CONFIG = """
run: {{name: run, folder: {folder}}}
model:
  path: {folder}/model
  recipe:
    hidden_size: 32
    intermediate_size: 64
    num_layers: 2
    num_heads: 2
    alphabet: "0123456789c="
    warm_start_steps: 0
    initializer_range: 0.3
data: {{source: copy, source_kwargs: {{min_length: 2, max_length: 5}}, max_prompt_length: 8}}
generator: {{max_new_tokens: 40, ignore_eos: true, max_num_seqs: 8, temperature: 0.8, device: cpu}}
learner: {{max_tokens_per_micro_batch: 100, device: cpu}}
parity: {{num_prompts: 8}}
"""


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The commands that `parity` starts as processes run here; that costs no time to import."""

    def call(*arguments: str, **_: object) -> str:
        assert main(arguments) == 0
        return ""

    monkeypatch.setattr(compare, "call", call)
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(folder=tmp_path))
    return str(file)


def written(folder: Path) -> list[dict]:
    return json.loads((folder / "parity.json").read_text())["reports"]


def test_float32_agrees_bfloat16_less_and_a_threshold_between_them_refuses_one(
    config_file: str, tmp_path: Path, capsys
):
    out = tmp_path / "out"
    words = [
        "parity",
        config_file,
        "--dtypes",
        "float32,bfloat16",
        "--set=parity.max_mean_gap=1e-4",
    ]
    assert main([*words, "--out", str(out)]) == 1
    output = capsys.readouterr()
    assert "parity.max_mean_gap is 0.0001 nats, and" in output.err
    assert "between engine hf in bfloat16 and the learner in float32" in output.err
    assert "likely: generator.dtype bfloat16 is not learner.dtype float32" in output.err
    assert "in float32 and the learner" not in output.err
    assert "ratio error" in output.out
    exact, rough = written(out)
    assert exact["overall"]["max"] < 2e-5
    assert rough["overall"]["mean"] > 100 * exact["overall"]["mean"]
    for report in (exact, rough):
        assert report["num_prompts"] == 8
        assert report["overall"]["num_tokens"] == 8 * 40
        bins = report["by_position"]
        assert [(b["first"], b["last"]) for b in bins] == [
            (0, 0), (1, 2), (3, 6), (7, 14), (15, 30), (31, 39),
        ]  # fmt: skip
        assert [b["num_tokens"] for b in bins] == [8, 16, 32, 64, 128, 72]
        assert max(b["max"] for b in bins) == report["overall"]["max"]
        assert 0 <= report["overall"]["k3_kl"] < report["overall"]["ratio_error"]
    assert main([*words[:2], "--set=parity.max_mean_gap=1e-4", "--out", str(out)]) == 0


def test_a_learner_with_other_weights_is_refused(config_file: str, tmp_path: Path, capsys):
    assert main(["get-model", "--config", config_file]) == 0
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(other)
    samples, report = str(tmp_path / "samples"), tmp_path / "parity.json"
    assert main(["parity", config_file, "--sample", samples]) == 0
    swapped = ["--set", f"model.path={other}"]
    scoring = ["parity", config_file, "--score", samples, "--out", str(report)]
    assert main([*scoring, *swapped]) == 0
    (found,) = written(tmp_path)
    config = load_config(config_file, ["parity.max_gap=0.5"]).config
    (sentence,) = complaints(config, [as_report(found)])
    assert "parity.max_gap is 0.5 nats" in sentence
    assert "do not have the same weights" in sentence
    assert main(["parity", config_file, "--score", "nowhere", "--out", "x"]) == 2
    assert "cannot read nowhere" in capsys.readouterr().err


def test_a_launch_requires_parity_before_it_starts_a_daemon(
    config_file: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_commands, "call", compare.call)
    config = load_config(config_file, ["parity.max_gap=1e-9", "buffer.url=zmq://127.0.0.1:1"])
    monkeypatch.setattr(launch, "supervise", no_daemons)
    launch_config = config.config
    launch_config.run.path.mkdir()
    (launch_config.run.path / "config.yaml").write_text(Path(config_file).read_text())
    with pytest.raises(StreamRLError, match=r"parity\.max_gap is 1e-09 nats, and"):
        launch.run_here(launch_config, Console())
    looser = load_config(config_file, ["parity.max_gap=1e-3"]).config
    require_parity(looser, Console())


async def no_daemons(*_: object, **__: object) -> bool:
    raise AssertionError("the launch started daemons")


def as_report(found: dict) -> ParityReport:
    return msgspec.convert(found, ParityReport)


def test_statistics_of_known_gaps():
    found = statistics_of(np.array([0.0, np.log(2.0), -np.log(2.0)]), 3, 5)
    assert found.mean == pytest.approx(2 * np.log(2) / 3)
    assert found.max == pytest.approx(np.log(2))
    assert found.ratio_error == pytest.approx((1 + 0.5) / 3)
    assert found.k3_kl == pytest.approx((1 + 0.5 - 1) / 3)
    assert (found.first, found.last, found.num_tokens) == (3, 5, 3)


def test_a_gap_that_is_no_number_is_above_every_threshold(config_file: str):
    config: RunConfig = load_config(config_file, ["parity.max_mean_gap=1"]).config
    gaps = statistics_of(np.array([np.nan]), 0, 0)
    report = ParityReport(
        engine="hf",
        engine_dtype="float16",
        learner_dtype="float32",
        num_prompts=1,
        overall=gaps,
        by_position=(gaps,),
    )
    assert "nan were measured" in next(complaints(config, [report]))


def test_a_threshold_is_refused_where_agents_alone_play():
    entries = [{"name": "a", "environment": "agent"}, {"name": "b", "environment": "single_turn"}]
    agent = {"agent": {"command": ["true"]}}
    make_config(parity={"max_mean_gap": 0.1}, generator=agent, environments=entries)
    sentence = r"parity\.max_mean_gap 0\.1 .* every environment is agent"
    with pytest.raises(ValueError, match=sentence):
        make_config(parity={"max_mean_gap": 0.1}, generator=agent, environments=entries[:1])


@pytest.mark.parametrize("half", [["--sample", "a"], ["--score", "a", "--out", "b"]])
def test_a_mistake_in_the_configuration_is_said_before_a_half_is_imported(
    tmp_path: Path, half: list[str]
):
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path))
    words = ["parity", "run.yaml", *half, "--set", "learner.optimizer.lrr=1"]
    code = f"""
import sys
from streamrl.cli.main import main
print(main({words}), "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "2 False"
    assert "learner.optimizer.lrr" in done.stderr
