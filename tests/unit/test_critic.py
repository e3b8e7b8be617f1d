"""A critic with a model and micro-batches of its own beside the policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from learners.batch.packing import share
from learners.batch.training_batch import TrainingBatch
from learners.checkpoints.restore import load_trainer
from learners.checkpoints.writer import CheckpointWriter
from learners.parallel.mesh import Mesh, full, make_mesh
from learners.parallel.ranks import Ranks
from learners.policy.critic import Critic
from learners.session import LearnerState
from learners.trainer import Trainer
from streamrl.checkpoints.find import read_checkpoint
from streamrl.checkpoints.history import new_history
from streamrl.cli.check.model import check_model
from streamrl.config import RunConfig
from streamrl.config.learner import MeshSettings
from streamrl.errors import ConfigError
from streamrl.findings import Severity
from streamrl.types import Books, GroupHeader
from tests.model_families import make_model
from tests.ranks import run_ranks
from tests.tiny_model import VOCAB_SIZE, make_tokenizer, save_llama
from tests.training import make_batch, make_config, make_groups, make_trainer, poison, poisoned

SETTING = "algorithm.value.model_path"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the policy's model, and `value`, a smaller one of another family."""
    save_llama(tmp_path / "model", vocab_size=VOCAB_SIZE + 8)
    save_value(tmp_path / "value")
    for name in ("model", "value"):
        make_tokenizer().save_pretrained(tmp_path / name)
    return tmp_path


def save_value(folder: Path) -> None:
    """Without the eight rows that pad the policy's embedding."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    facts = Qwen3Config(vocab_size=VOCAB_SIZE, tie_word_embeddings=False, **sizes, **heads)
    Qwen3ForCausalLM(facts).save_pretrained(folder)


def configure(folder: Path, value: dict[str, Any], **learner: Any) -> RunConfig:
    return make_config(
        model={"path": str(folder / "model")},
        run={"folder": folder, "name": "run"},
        learner={"device": "cpu", "max_tokens_per_micro_batch": 70, **learner},
        algorithm={"advantage": "gae", "value": value},
        # With the usual eps AdamW makes a step of a gradient that is zero but for its rounding.
        optimizer={"eps": 1e-5},
    )


def of_another_model(folder: Path, **learner: Any) -> RunConfig:
    return configure(folder, {"model_path": str(folder / "value"), "lr": 0.01}, **learner)


def sizes_of_passes(trainer: Trainer) -> dict[str, list[int]]:
    """Tokens of each pass with gradient, filled as it goes."""
    assert trainer.critic is not None
    sizes: dict[str, list[int]] = {}
    for name, model in {"policy": trainer.policy, "critic": trainer.critic}.items():
        found = sizes.setdefault(name, [])

        def seen(_: Any, given: tuple[Any, ...], found: list[int] = found) -> None:
            if torch.is_grad_enabled():
                found.append(given[0].token_ids.numel())

        model.network.register_forward_pre_hook(seen)
    return sizes


def parameters_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer.critic is not None
    critic = {f"c.{name}": p for name, p in trainer.critic.parameters().items()}
    return {n: full(p).clone() for n, p in {**trainer.policy.parameters(), **critic}.items()}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_limit_of_its_own_cuts_its_passes_and_changes_no_gradient(updates: int, is_finite: bool):
    groups = make_groups()
    batch = TrainingBatch.of(
        groups if is_finite else poisoned(groups, (1, 0), (4, 2)), policy_version=4
    )
    found = {}
    for limit in (None, 70, 30):
        value = {"max_tokens_per_micro_batch": limit}
        learner = {"max_tokens_per_micro_batch": 70, "updates_per_batch": updates}
        algorithm = {"advantage": "gae", "value": value}
        trainer = make_trainer(
            make_config(algorithm=algorithm, learner=learner, optimizer={"eps": 1e-5})
        )
        if not is_finite:
            poison(trainer)
        sizes = sizes_of_passes(trainer)
        metrics = trainer.step(batch)
        found[limit] = (parameters_of(trainer), sizes, metrics["critic/vf_loss"])
    trained, sizes, loss = found[None]
    for limit in (70, 30):
        ours, passes, its_loss = found[limit]
        rows = {n: t.nan_to_num() for n, t in ours.items()}
        assert_close(rows, {n: t.nan_to_num() for n, t in trained.items()})
        assert its_loss == pytest.approx(loss, rel=1e-5)
        assert passes["policy"] == sizes["policy"]
        assert max(passes["critic"]) <= limit
    assert all(
        torch.equal(found[70][0][n].nan_to_num(), t.nan_to_num()) for n, t in trained.items()
    )
    assert len(found[30][1]["critic"]) > len(sizes["critic"])


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_model_of_another_family_and_size_learns_and_is_resumed(folder: Path, lora: Any):
    config = of_another_model(folder, lora=lora)
    trainer, _ = load_trainer(config, None)
    assert trainer.critic is not None
    assert trainer.critic.network.model.config.model_type == "qwen3"
    for seed in range(2):
        trainer.step(make_batch(seed))
    writer = CheckpointWriter(config, new_history())
    path = writer.save(trainer, LearnerState(2, Books(granted=2, trained=2))).result()
    writer.close()
    assert trainer.step(make_batch(2))["critic/grad_norm"] > 0
    again, _ = load_trainer(config, read_checkpoint(path))
    again.step(make_batch(2))
    trained = parameters_of(trainer)
    for name, tensor in parameters_of(again).items():
        assert torch.equal(tensor, trained[name]), name
    with pytest.raises(ConfigError, match="of another model: critic/"):
        load_trainer(configure(folder, {"lr": 0.01}, lora=lora), read_checkpoint(path))


@pytest.mark.parametrize("is_reward_model", [False, True])
def test_it_learns_what_is_expected(folder: Path, is_reward_model: bool):
    if is_reward_model:
        facts = AutoConfig.from_pretrained(folder / "value", num_labels=1, pad_token_id=0)
        Qwen3ForSequenceClassification(facts).save_pretrained(folder / "value")
    trainer, _ = load_trainer(of_another_model(folder), None)
    losses = [trainer.step(make_batch())["critic/vf_loss"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_each_model_runs_packed_or_not_as_it_can(folder: Path):
    make_model("Nemotron").save_pretrained(folder / "value")
    trainer, _ = load_trainer(of_another_model(folder), None)
    assert trainer.critic is not None
    assert trainer.policy.network.is_packed
    assert not trainer.critic.network.is_packed
    assert trainer.step(make_batch())["critic/grad_norm"] > 0


def steps(config: RunConfig, mesh: Mesh | None, ranks: Ranks) -> dict[str, torch.Tensor]:
    trainer, _ = load_trainer(config, None, mesh, ranks)
    for step in range(2):
        groups = {group.prompt_index: group for group in make_groups(step)}
        headers = [GroupHeader.of(group) for group in groups.values()]
        mine = [groups[h.prompt_index] for h in share(headers, ranks.count, ranks.index)]
        trainer.step(TrainingBatch.shared(headers, mine, step, ranks))
    return parameters_of(trainer)


def on_rank(folder: Path, learners: Sequence[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    mesh = make_mesh(MeshSettings(), torch.device("cpu"))
    ranks = Ranks.of(dist.new_group(backend="gloo"))
    return [steps(of_another_model(folder, **learner), mesh, ranks) for learner in learners]


def test_two_ranks_train_it_as_one_does(folder: Path):
    learners = ({}, {"sum_each_micro_batch": False, "gradient_checkpointing": True})
    for found in run_ranks(on_rank, 2, folder, folder, learners):
        for ours, learner in zip(found, learners, strict=True):
            assert_close(ours, steps(of_another_model(folder, **learner), None, Ranks()))


def test_an_id_that_pads_the_embedding_of_the_policy_is_the_last_one_of_the_critic(folder: Path):
    config = of_another_model(folder)
    group, *others = make_groups()
    for trajectory in group.trajectories:
        trajectory.token_ids[0] = VOCAB_SIZE + 7
    trainer, _ = load_trainer(config, None)
    assert trainer.step(TrainingBatch.of([group, *others], 4))["critic/grad_norm"] > 0


def refusal_of(folder: Path) -> str:
    """Of the learner; `check` says the same where the folder has a tokenizer."""
    config = of_another_model(folder)
    with pytest.raises(ConfigError) as refused:
        Critic.from_config(config)
    return str(refused.value)


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(folder: Path):
    words = {f"w{(i + 1) % VOCAB_SIZE}": i for i in range(VOCAB_SIZE)}
    other = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=other).save_pretrained(folder / "value")
    sentence = refusal_of(folder)
    assert sentence.startswith(
        f"{SETTING}: {folder / 'value'} has another tokenizer than the policy"
    )
    assert "name a model with the policy's tokenizer" in sentence
    problems = [f for f in check_model(of_another_model(folder)) if f.severity is Severity.PROBLEM]
    assert [problem.sentence for problem in problems] == [sentence]


def test_a_folder_without_a_model_or_with_too_short_a_context_is_refused(folder: Path):
    with pytest.raises(ConfigError, match=rf"{SETTING}: .*no tokenizer at"):
        Critic.from_config(configure(folder, {"model_path": str(folder / "none")}))
    missing = check_model(configure(folder, {"model_path": str(folder / "none")}))
    assert any(f.sentence.startswith(f"{SETTING}: there is no folder") for f in missing)
    config = of_another_model(folder)
    long = config.generator.model_copy(update={"max_new_tokens": 250, "max_model_len": 100_000})
    found = check_model(config.model_copy(update={"generator": long}))
    assert any(
        f.sentence.startswith(f"{SETTING}: ") and "has a context of" in f.sentence for f in found
    )


def test_settings_of_a_critic_need_one():
    with pytest.raises(ValueError, match=r"algorithm\.value\.lr 0\.1 has no critic to act on"):
        make_config(algorithm={"advantage": "grpo", "value": {"lr": 0.1}})
