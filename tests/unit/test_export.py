"""`streamrl export`: the policy of a checkpoint as a Hugging Face folder."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.make_model import make_tokenizer
from learners.session import LearnerState
from streamrl.cli.main import main
from streamrl.config import RunConfig, to_yaml
from streamrl.durable_files import write_file
from tests.model_families import make_model
from tests.training import make_batch
from tests.unit.test_checkpoint import make_run, make_trainer, save


def exported(config: RunConfig, *arguments: str) -> int:
    write_file(config.run.path / "config.yaml", to_yaml(config))
    return main(["export", str(config.run.path), *arguments])


def test_an_export_loads_in_transformers_in_its_dtype_and_with_its_tokenizer(tmp_path, capsys):
    config = make_run(tmp_path, checkpoint={"contents": ["model"]}, evaluate=False)
    trainer = make_trainer(config)
    for version in (1, 2):
        trainer.step(make_batch(version))
        save(config, trainer, LearnerState(version))
    # It needs neither the model that the run has started from nor its tokenizer.
    Path(config.model.path).rename(tmp_path / "gone")
    folder = tmp_path / "out"
    arguments = ("--output", str(folder), "--dtype", "bfloat16", "--max-shard-size", "20KB")
    assert exported(config, *arguments) == 0
    assert capsys.readouterr().out == f"{folder}: step 2, bfloat16, 0.0 MB\n"
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).vocab_size == make_tokenizer("abc").vocab_size
    for name, parameter in trainer.policy.parameters().items():
        assert torch.equal(loaded.get_parameter(name), parameter.bfloat16()), name
    assert exported(config, "--step", "1") == 0
    assert (config.run.path / "export" / "step-00000001" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("family", "suffix"),
    [
        ("AFMoE", "expert_bias"),
        ("DeepSeek-V3", "e_score_correction_bias"),
        ("ERNIE 4.5-MoE", "e_score_correction_bias"),
    ],
)
def test_what_no_step_changes_is_in_an_export_to_its_last_bit(tmp_path, family, suffix):
    """A frozen parameter or a buffer, which chooses experts: rounded to bfloat16 it chooses
    others."""
    model = make_model(family)
    state = {name: t for name, t in model.state_dict().items() if name.endswith(suffix)}
    for number, tensor in enumerate(state.values()):
        tensor.copy_(4.0 + number + torch.linspace(0, 1e-3, tensor.numel()).view(tensor.shape))
    model.save_pretrained(tmp_path / "model")
    make_tokenizer("abc").save_pretrained(tmp_path / "model")
    config = make_run(tmp_path, checkpoint={"contents": ["model"]}, evaluate=False)
    save(config, make_trainer(config), LearnerState(1))
    assert exported(config, "--dtype", "bfloat16") == 0
    folder = config.run.path / "export" / "step-00000001"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert state
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name
    written = load_file(folder / "model.safetensors")
    assert written["model.embed_tokens.weight"].dtype == torch.bfloat16
    if family == "ERNIE 4.5-MoE":
        assert written["model.layers.1.mlp.gate.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--step", "7"), r"--step: was 7, and the checkpoints of .*run are of: 1"),
        (("--output", "{folder}"), r"--output: .* exists already"),
        (
            ("--output", "{folder}/run/config.yaml/x"),
            r"--output: .* cannot be written: .*Not a dir",
        ),
        (("--max-shard-size", "5"), r"--max-shard-size: was '5', and must be a whole number of"),
    ],
)
def test_an_export_that_cannot_be_made_says_why(tmp_path, capsys, arguments, sentence):
    config = make_run(tmp_path)
    save(config, make_trainer(config), LearnerState(1))
    assert exported(config, *(word.format(folder=tmp_path) for word in arguments)) == 2
    assert re.search(sentence, capsys.readouterr().err)


def test_an_export_of_an_adapter_whose_model_has_gone_says_so(tmp_path, capsys):
    config = make_run(tmp_path, lora={"rank": 2})
    save(config, make_trainer(config), LearnerState(1))
    (tmp_path / "model").rename(tmp_path / "gone")
    assert exported(config, "--step", "1") == 2
    assert re.search(r"model\.path: no model at .*model', which", capsys.readouterr().err)
    assert exported(config, "--step", "1", "--adapter") == 0


def test_an_export_has_the_scale_of_its_checkpoint(tmp_path):
    saved_with, now = (make_run(tmp_path, lora={"rank": 2, "alpha": alpha}) for alpha in (8, 64))
    trainer = make_trainer(saved_with)
    trainer.step(make_batch())
    path = save(saved_with, trainer, LearnerState(1))
    assert exported(now, "--output", str(tmp_path / "out")) == 0
    expected, found = (load_file(f / "model.safetensors") for f in (path, tmp_path / "out"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_export_of_a_damaged_checkpoint_is_refused(tmp_path, capsys):
    config = make_run(tmp_path)
    path = save(config, make_trainer(config), LearnerState(1))
    (path / "shards" / "rank-00000.safetensors").write_bytes(b"")
    assert exported(config, "--step", "1") == 2
    assert "is damaged: shards/rank-00000.safetensors has 0 bytes" in capsys.readouterr().err
