"""Teachers in the learner: whose log-probabilities each token gets, and what a step makes of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from learners.batch.training_batch import TrainingBatch
from learners.checkpoints.restore import load_trainer
from learners.policy.teachers import Teachers
from streamrl import wire
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.types import TopLogprobs, TrajectoryGroup
from streamrl.types.packed import PackedGroup, pack
from tests.tiny_model import VOCAB_SIZE, make_llama, make_tokenizer, save_llama
from tests.training import make_config, make_groups, make_teachers, make_trainer
from tests.unit.test_critic import save_value

NAMED = [{"name": name, "path": "t"} for name in "ab"]
TWO = [{"name": "a", "path": "t"}, {"name": "b", "path": "t", "weight": 3.0}]
URL = {"name": "far", "url": "http://127.0.0.1:1"}


def configure(**distillation: Any) -> RunConfig:
    learner = {"max_tokens_per_micro_batch": 60}
    return make_config(algorithm={"distillation": distillation}, learner=learner)


def teachers_of(config: RunConfig) -> Teachers:
    teachers = make_teachers(config)
    assert teachers is not None
    return teachers


def logprobs_under(scale: float, batch: TrainingBatch) -> torch.Tensor:
    """[R] of the tiny model with its head times `scale`, by a plain pass over each trajectory."""
    model = make_llama().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
        rows = []
        for t in batch.trajectories:
            ids = torch.from_numpy(t.token_ids).long()
            logprobs = (
                model(input_ids=ids[None], use_cache=False).logits[0].double().log_softmax(-1)
            )
            own = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
            rows.append(own[torch.from_numpy(t.response_mask)[1:]])
    return torch.cat(rows)


def recorded(group: TrajectoryGroup, value: float) -> TrajectoryGroup:
    """With this log-probability of each sampled token under the teachers by url."""
    members = tuple(
        structs.replace(t, teacher_logprobs=np.where(t.response_mask, value, 0).astype(np.float32))
        for t in group.trajectories
    )
    return structs.replace(group, trajectories=members)


def batch_of(groups: Sequence[TrajectoryGroup]) -> TrainingBatch:
    return TrainingBatch.of(groups, policy_version=4)


def test_they_are_those_of_a_plain_pass():
    batch = batch_of(make_groups())
    found = teachers_of(configure(teachers=[{"path": "t"}])).score(batch)[0]
    torch.testing.assert_close(found.double(), logprobs_under(2.0, batch), rtol=0, atol=2e-5)


def test_mixed_teachers_are_weighed_and_one_by_a_row_scores_its_own_alone():
    batch = batch_of(make_groups())
    first, second = logprobs_under(2.0, batch), logprobs_under(3.0, batch)
    mixed = teachers_of(configure(teachers=TWO)).score(batch)[0].double()
    torch.testing.assert_close(mixed, 0.25 * first + 0.75 * second, rtol=0, atol=2e-5)
    named = teachers_of(configure(teachers=NAMED, column="teacher")).score(batch)[0].double()
    is_first = batch.sequences.expand(torch.tensor([name == "a" for name in batch.teachers]))
    torch.testing.assert_close(named, torch.where(is_first, first, second), rtol=0, atol=2e-5)


def after(group: TrajectoryGroup) -> TrajectoryGroup:
    """With its responses after what teachers read."""
    assert group.teacher_prompt is not None
    return structs.replace(
        group, trajectories=tuple(t.after(group.teacher_prompt) for t in group.trajectories)
    )


def test_teachers_read_what_stands_in_the_place_of_the_prompt_if_there_is_a_template():
    groups = make_groups()
    teachers = teachers_of(configure(teachers=[{"path": "t"}], template="{{prompt}}"))
    found = teachers.score(batch_of(groups))[0].double()
    wanted = logprobs_under(2.0, batch_of([after(group) for group in groups]))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    plain = [structs.replace(group, teacher_prompt=None) for group in groups]
    own = teachers.score(batch_of(plain))[0].double()
    torch.testing.assert_close(own, logprobs_under(2.0, batch_of(groups)), rtol=0, atol=2e-5)


def test_what_a_generator_recorded_is_added_and_must_be_there():
    teachers = teachers_of(configure(teachers=[{"name": "a", "path": "t"}, {**URL, "weight": 3.0}]))
    batch = batch_of([recorded(group, -0.5) for group in make_groups()])
    wanted = 0.25 * logprobs_under(2.0, batch) - 0.5
    torch.testing.assert_close(teachers.score(batch)[0].double(), wanted, rtol=0, atol=2e-5)
    with pytest.raises(ConfigError, match="came without the log-probabilities of the teachers by"):
        teachers.score(batch_of(make_groups()))


def all_logprobs_under(scale: float, batch: TrainingBatch) -> torch.Tensor:
    """[R, V] of what a plain pass over each trajectory says, as in `logprobs_under`."""
    model = make_llama().double().eval()
    rows = []
    for t in batch.trajectories:
        ids = torch.from_numpy(t.token_ids).long()
        hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        logits = hidden @ (scale * model.get_output_embeddings().weight).T
        rows.append(logits.log_softmax(-1)[:-1][torch.from_numpy(t.response_mask)[1:]])
    return torch.cat(rows)


def with_likeliest(group: TrajectoryGroup, top_k: int) -> TrajectoryGroup:
    """As a teacher by url records them: those of the tiny model with its head times 2."""
    batch = batch_of([group])
    top = all_logprobs_under(2.0, batch).detach().topk(top_k)
    members, lengths = [], [t.num_response_tokens for t in group.trajectories]
    rows = zip(top.indices.split(lengths), top.values.split(lengths), strict=True)
    for t, (ids, values) in zip(group.trajectories, rows, strict=True):
        counts = np.where(t.response_mask, top_k, 0).astype(np.int32)
        columns = (ids.flatten().numpy().astype(np.int32), values.flatten().float().numpy())
        sets = TopLogprobs(counts, *columns)
        members.append(structs.replace(t, teacher_top_logprobs=sets))
    return recorded(structs.replace(group, trajectories=tuple(members)), -1.0)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("teacher", [{"path": "t"}, {"url": "http://127.0.0.1:1"}])
@pytest.mark.parametrize("max_tokens", [60, 10_000])
def test_the_gradient_over_candidates_is_that_of_the_formula_in_float64(
    teacher: dict[str, str], divergence: str, max_tokens: int
):
    """Packed into many micro-batches, or into one whose prompts are shared."""
    own = {"teachers": [teacher], "top_k": 4, "divergence": divergence, "coef": 0.5}
    sizes = {"max_tokens_per_micro_batch": max_tokens}
    trainer = make_trainer(
        make_config(algorithm={"distillation": own, "loss": "reinforce"}, learner=sizes)
    )
    batch = batch_of([with_likeliest(group, 4) for group in make_groups()])
    trainer.accumulate(batch)
    found = {name: p.grad.double() for name, p in trainer.policy.parameters().items()}
    model = make_llama().double().eval()
    rows = []
    top = all_logprobs_under(2.0, batch).detach().topk(4)
    for t in batch.trajectories:
        ids = torch.from_numpy(t.token_ids).long()
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        rows.append(logprobs[:-1][torch.from_numpy(t.response_mask)[1:]])
    mine, theirs = torch.cat(rows).gather(1, top.indices), top.values
    p, q = (mine, theirs) if divergence == "reverse_kl" else (theirs, mine)
    rest_p, rest_q = (1 - part.exp().sum(1) for part in (p, q))
    kl = (p.exp() * (p - q)).sum(1) + rest_p * (rest_p / rest_q).log()
    (0.5 * kl.mean()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)
    metrics = trainer.update()
    assert metrics["actor/teacher_kl"] == pytest.approx(float(kl.mean().detach()), rel=1e-4)
    assert metrics["actor/pg_loss"] == 0
    assert metrics["advantage/abs_mean"] == 0


def test_candidates_of_another_number_are_refused():
    far = {"url": "http://127.0.0.1:1"}
    teachers = teachers_of(configure(teachers=[far], top_k=3))
    few, many = ([with_likeliest(g, k) for g in make_groups()] for k in (3, 4))
    for groups in (make_groups(), many, [few[0], *many[1:]], [few[0], *make_groups()[1:]]):
        groups = [recorded(group, -1.0) for group in groups]
        with pytest.raises(ConfigError, match="top_k: was 3, and groups came with other candid"):
            teachers.score(batch_of(groups))


def test_a_place_may_have_fewer_candidates_and_a_trajectory_no_place():
    """A teacher gives some of its likeliest tokens no probability; a context holds prompt alone."""
    far = {"url": "http://127.0.0.1:1"}
    teachers = teachers_of(configure(teachers=[far], top_k=4))
    group = with_likeliest(make_groups()[0], 4)
    first, second, *others = group.trajectories
    sets = first.teacher_top_logprobs
    assert sets is not None
    last = int(np.flatnonzero(sets.counts)[-1])
    counts = np.where(np.arange(len(sets)) == last, 1, sets.counts).astype(np.int32)
    fewer = TopLogprobs(counts, sets.token_ids[:-3], sets.logprobs[:-3])
    nothing = np.zeros(second.num_tokens, np.bool_)
    silent = structs.replace(
        second,
        response_mask=nothing,
        behavior_logprobs=nothing.astype(np.float32),
        policy_versions=np.full(len(nothing), -1, np.int32),
        teacher_logprobs=nothing.astype(np.float32),
        teacher_top_logprobs=TopLogprobs.empty(len(nothing)),
    )
    first = structs.replace(first, teacher_top_logprobs=fewer)
    batch = batch_of([structs.replace(group, trajectories=(first, silent, *others))])
    _, top = teachers.score(batch)
    assert top is not None
    is_there = (top.logprobs > -torch.inf).sum(1)
    wanted = [4] * batch.sequences.num_tokens
    wanted[first.num_response_tokens - 1] = 1
    assert is_there.tolist() == wanted
    alone = structs.replace(group, trajectories=(first, silent))
    metrics = make_trainer(configure(teachers=[far], top_k=4)).step(batch_of([alone]))
    assert metrics["learner/num_nonfinite_sequences"] == 0


def test_a_group_keeps_the_candidates_and_its_bytes_are_counted():
    group = with_likeliest(make_groups()[0], 4)
    encoded = wire.encode(pack(group))
    found = wire.decode(encoded, PackedGroup).group()
    for ours, theirs in zip(found.trajectories, group.trajectories, strict=True):
        assert ours.teacher_top_logprobs is not None
        assert theirs.teacher_top_logprobs is not None
        for name in ("counts", "token_ids", "logprobs"):
            columns = (getattr(one.teacher_top_logprobs, name) for one in (ours, theirs))
            np.testing.assert_array_equal(*columns)
    far = {"url": "http://127.0.0.1:1"}
    counted = [configure(teachers=[far], top_k=top_k).group_bytes(1) for top_k in (0, 4, 32)]
    assert [number * 10 // counted[0] for number in counted] == [10, 10 + 2 + 16, 10 + 2 + 128]


@pytest.mark.parametrize(("largest_id", "id_bytes"), [(2**16 - 1, 2), (150_000, 3)])
def test_a_candidate_of_a_teacher_by_url_takes_its_id_and_two_bytes(largest_id: int, id_bytes: int):
    group = recorded(make_groups()[0], -1.0)
    plain, top_k, members = len(wire.encode(pack(group))), 32, []
    for t in group.trajectories:
        counts = np.where(t.response_mask, top_k, 0).astype(np.int32)
        ids = np.linspace(0, largest_id, counts.sum()).astype(np.int32)
        logprobs = np.full(len(ids), -2.75, np.float32)
        sets = TopLogprobs(counts, ids, logprobs)
        members.append(structs.replace(t, teacher_top_logprobs=sets))
    group = structs.replace(group, trajectories=tuple(members))
    added = len(wire.encode(pack(group))) - plain
    num_candidates = top_k * sum(t.num_response_tokens for t in members)
    wanted = 2 * group.num_tokens + (id_bytes + 2) * num_candidates
    assert wanted <= added < wanted + 16


def test_a_group_of_an_unknown_teacher_is_refused():
    teachers = teachers_of(configure(teachers=NAMED, column="teacher"))
    groups = [structs.replace(group, teacher="bb") for group in make_groups()]
    with pytest.raises(ConfigError, match="for teacher 'bb'; did you mean 'b'"):
        teachers.score(batch_of(groups))


def test_a_group_keeps_what_was_recorded():
    group = recorded(make_groups()[0], -1.5)
    first, *others = group.trajectories
    group = structs.replace(
        group, trajectories=(structs.replace(first, teacher_logprobs=None), *others)
    )
    found = wire.decode(wire.encode(pack(group)), PackedGroup).group()
    assert found.teacher == "a"
    np.testing.assert_array_equal(found.teacher_prompt, group.teacher_prompt)
    assert (found.trajectories[0].teacher_logprobs == 0).all()
    for ours, theirs in zip(found.trajectories[1:], others, strict=True):
        np.testing.assert_array_equal(ours.teacher_logprobs, theirs.teacher_logprobs)


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        (lambda mask: np.full(len(mask), -1, np.float32), "0 where response_mask is off"),
        (lambda mask: np.where(mask, np.nan, 0).astype(np.float32), "NaN or infinite"),
        (lambda mask: np.zeros(len(mask) - 1, np.float32), "differ in length"),
    ],
)
def test_a_trajectory_holds_one_log_probability_per_sampled_token(column: Any, sentence: str):
    trajectory = make_groups()[0].trajectories[0]
    with pytest.raises(ValueError, match=sentence):
        structs.replace(trajectory, teacher_logprobs=column(trajectory.response_mask))


@pytest.mark.parametrize("student", ["behavior", "proximal"])
@pytest.mark.parametrize("reward_coef", [0.0, 0.5])
def test_the_advantage_is_the_difference_beside_that_of_the_reward(
    student: str, reward_coef: float
):
    own = {"teachers": [{"path": "t"}], "coef": 2.0, "student": student}
    algorithm = {"distillation": {**own, "reward_coef": reward_coef}, "rollout_is": "token_is"}
    learner = {"max_tokens_per_micro_batch": 60}
    trainer = make_trainer(make_config(algorithm=algorithm, learner=learner))
    plain = make_trainer(make_config(algorithm={"rollout_is": "token_is"}, learner=learner))
    batch = batch_of(make_groups())
    advantages = {}
    for name, one in {"ours": trainer, "plain": plain}.items():
        found, metrics = one._targets.collect(batch, one._pack(batch))
        advantages[name] = found.advantages
        if name == "ours":
            taught = metrics
    student_logprobs = (
        batch.behavior_logprobs if student == "behavior" else logprobs_under(1, batch)
    )
    difference = logprobs_under(2.0, batch) - student_logprobs
    wanted = reward_coef * advantages["plain"] + 2.0 * difference
    torch.testing.assert_close(advantages["ours"].double(), wanted.double(), rtol=0, atol=1e-4)
    kl = batch.sequences.mean(-difference).mean()
    assert taught["reward/teacher_kl"] == pytest.approx(float(kl), abs=1e-5)


def test_a_sequence_whose_teacher_is_not_finite_leaves_the_step():
    config = configure(teachers=[{"path": "t"}])
    trainer = make_trainer(config)
    model = trainer._targets.teachers.policies["teacher"].model  # type: ignore[union-attr]
    groups = make_groups()
    token = int(groups[0].trajectories[0].token_ids[0])
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    metrics = trainer.step(batch_of(groups))
    assert 1 <= metrics["learner/num_nonfinite_sequences"] < 20
    assert all(p.isfinite().all() for p in trainer.policy.parameters().values())


def save_models(folder: Path) -> None:
    save_llama(folder / "model", vocab_size=VOCAB_SIZE + 8)
    save_value(folder / "teacher")
    for name in ("model", "teacher"):
        make_tokenizer().save_pretrained(folder / name)


def loaded(folder: Path, teacher: str) -> RunConfig:
    distillation = {"teachers": [{"path": str(folder / teacher)}]}
    return make_config(
        model={"path": str(folder / "model")}, algorithm={"distillation": distillation}
    )


def test_a_teacher_of_another_family_without_the_rows_that_pad_the_policy_teaches(tmp_path: Path):
    save_models(tmp_path)
    trainer, _ = load_trainer(loaded(tmp_path, "teacher"), None)
    ids = np.where([False, True, True, True], VOCAB_SIZE + 3, 5).astype(np.int32)
    first = make_groups()[0].trajectories[0]
    mask = np.array([False, True, True, True])
    padded = structs.replace(
        first,
        token_ids=ids,
        response_mask=mask,
        behavior_logprobs=np.where(mask, -1, 0).astype(np.float32),
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
    )
    group = structs.replace(make_groups()[0], trajectories=(padded, *[first] * 3))
    assert np.isfinite(trainer.step(batch_of([group]))["actor/loss"])


def test_another_tokenizer_is_refused_with_the_token(tmp_path: Path):
    save_models(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"teachers\.0\.path: .* another tokenizer .* 'extra'"):
        load_trainer(loaded(tmp_path, "teacher"), None)


def test_a_teacher_that_is_not_there_is_refused(tmp_path: Path):
    save_models(tmp_path)
    with pytest.raises(ConfigError, match=r"algorithm\.distillation\.teachers\.0\.path"):
        load_trainer(loaded(tmp_path, "nothing"), None)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"kl_reward": {"coef": 0.1}}, "the advantage is that of the teachers alone, so it cannot"),
        ({"advantage_config": {"whiten": True}}, "set algorithm.distillation.reward_coef"),
        ({"reward": {"norm_mean": "group"}}, "so it cannot act"),
        ({"reward": {"truncated": "penalize", "truncated_penalty": 0.5}}, "so it cannot act"),
        ({"loss": "topr"}, "tells trajectories apart by their rewards"),
    ],
)
def test_what_acts_on_rewards_alone_is_refused_beside_teachers_alone(
    section: dict[str, Any], sentence: str
):
    distillation = {"teachers": [{"path": "t"}]}
    with pytest.raises(ValueError, match=sentence):
        make_config(algorithm={"distillation": distillation, **section})
    make_config(algorithm={"distillation": {**distillation, "reward_coef": 1.0}, **section})


@pytest.mark.parametrize("setting", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}])
def test_a_teacher_by_url_needs_the_plain_distribution(setting: dict[str, Any]):
    with pytest.raises(ValueError, match=f"generator.{next(iter(setting))} .*from another distrib"):
        make_config(algorithm={"distillation": {"teachers": [URL]}}, generator=setting)
    make_config(algorithm={"distillation": {"teachers": [{"path": "t"}]}}, generator=setting)


@pytest.mark.parametrize(
    ("distillation", "sentence"),
    [
        ({"teachers": TWO, "column": "teacher"}, "'b' has the weight 3, and a prompt has one"),
        ({"teachers": [{**URL, "weight": 0.5}]}, "'far' has the weight 0.5, and a prompt has one"),
        ({"teachers": NAMED, "timeout_s": 9.0}, "timeout_s: was 9, and no teacher is asked by url"),
        ({"teachers": NAMED, "retries": 0}, "retries: was 0, and no teacher is asked by url"),
        ({"teachers": NAMED, "max_concurrent": 2}, "no teacher is asked by url, so it cannot act"),
    ],
)
def test_what_no_teacher_reads_is_refused(distillation: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        configure(**distillation)


@pytest.mark.parametrize("column", ["image_key", "video_key"])
def test_a_teacher_by_url_is_refused_beside_images(column: str):
    data = {"source": "rows.jsonl", "max_prompt_length": 10, column: "seen"}
    with pytest.raises(ValueError, match=rf"data\.{column}: a teacher by url reads token"):
        make_config(algorithm={"distillation": {"teachers": [URL]}}, data=data)
    make_config(algorithm={"distillation": {"teachers": [{"path": "t"}]}}, data=data)


@pytest.mark.parametrize(
    ("loss", "numbers"),
    [
        ("ppo", {"clip_ratio_low": 0.1}),
        ("dppo_tv", {"divergence_topk": 4}),
        ("vespo", {"k_pos": 1.0}),
        ("clip_cov", {"clip_cov_ratio": 0.1}),
    ],
)
def test_numbers_of_a_loss_without_advantages_are_refused(loss: str, numbers: dict[str, float]):
    """Over candidates alone; what is added to the loss whatever the advantage acts."""
    own: dict[str, Any] = {"teachers": [{"path": "t"}], "top_k": 4}
    section = {"loss": loss, "loss_config": numbers, "proximal": "behavior"}
    with pytest.raises(ValueError, match="every advantage is 0, so it cannot act"):
        make_config(algorithm={"distillation": own, **section})
    make_config(algorithm={"distillation": {**own, "reward_coef": 1.0}, **section})
    penalty = {"loss": "dppo_tv", "loss_config": {"log_ratio_coef": 0.1}, "proximal": "behavior"}
    make_config(algorithm={"distillation": own, **penalty})
