"""The learner gives tokens to the experts that the engine took, and trains the gate for them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from actors.engines.hf.records import ExpertWatch
from learners.batch.micro_batch import MicroBatch
from learners.batch.training_batch import TrainingBatch
from learners.parallel.ranks import Ranks
from learners.policy.loading import distribute
from learners.policy.network import Network
from learners.policy.policy import _WithoutAdapter
from streamrl.algorithms.routing import choosing, routers
from streamrl.config.learner import LearnerSettings
from streamrl.errors import ConfigError
from streamrl.types import RoutedExperts, Trajectory, TrajectoryGroup
from tests.model_families import ROUTED, UNPACKED, make_model
from tests.records import NUM_EXPERTS, TOP_K, random_experts
from tests.training import make_config, make_trainer, sibling_batch

CPU = torch.device("cpu")
SHOWN = ("Qwen3-MoE", "Mixtral", "gpt-oss", "DeepSeek-V3")
GROUPS = ((3, (4, 1, 6)), (17, (3, 8, 2)), (1, (1,)), (5, (2, 12)))
Record = Callable[[Trajectory], RoutedExperts | None]


def make_network(family: str, router_replay: Any = "off", **settings: Any) -> Network:
    network = Network(make_model(family), temperature=1.0)
    network.run_packed(family not in UNPACKED)
    own = LearnerSettings.model_validate({"dtype": "float32", **settings})
    distribute(network, None, own, router_replay=router_replay)
    return network


def with_record(batch: TrainingBatch, record: Record) -> TrainingBatch:
    group = TrajectoryGroup(
        group_id="",
        prompt_index=0,
        environment="test",
        trajectories=tuple(
            structs.replace(t, routed_experts=record(t)) for t in batch.trajectories
        ),
    )
    return TrainingBatch.of([group], policy_version=4)


def of_engine(family: str, dtype: torch.dtype = torch.float32) -> Record:
    """What the model itself takes of each token but the last."""
    model = make_model(family).to(dtype)
    watch = ExpertWatch(model)

    def record(trajectory: Trajectory) -> RoutedExperts:
        ids = torch.from_numpy(trajectory.token_ids).long()[None]
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        [experts] = watch.of_rows([ids.shape[1]], is_left_padded=False)
        return RoutedExperts.of(experts[:-1], ids.shape[1])

    return record


def computed(network: Network, *micro_batches: MicroBatch) -> list[torch.Tensor]:
    """Log-probabilities by response token, and the gradient of every parameter."""
    network.zero_grad()
    logprobs = torch.zeros(sum(len(m.responses) for m in micro_batches))
    for micro_batch in micro_batches:
        output = network(micro_batch).logprobs
        assert output is not None
        (output * torch.cos(micro_batch.responses.float())).sum().backward()
        logprobs[micro_batch.responses] = output.detach()
    return [logprobs, *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


def assert_alike(ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> None:
    """Within float32's rounding: weights changed by 6e-8 of themselves move these gradients by up
    to 1.6e-3 of their largest (Qwen3.5-MoE), other experts by more than their size."""
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine - theirs).abs().max() < 2e-3 * (1 + theirs.abs().max())


def differs(ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> bool:
    return bool((ours[0] - plain[0]).abs().max() > 1e-2)


def whole(batch: TrainingBatch) -> MicroBatch:
    return batch.micro_batch(range(len(batch)), CPU)


def one_by_one(batch: TrainingBatch) -> list[MicroBatch]:
    return [batch.micro_batch([i], CPU, shares_prompts=False) for i in range(len(batch))]


@pytest.mark.parametrize("family", ROUTED)
def test_experts_are_those_of_the_record(family: str):
    batch = sibling_batch(GROUPS)
    other = with_record(batch, random_experts)
    plain = computed(make_network(family), whole(batch))
    network = make_network(family, "replay")
    assert_alike(computed(network, whole(with_record(batch, of_engine(family)))), plain)
    metrics = network.router_records.metrics(Ranks())  # type: ignore[union-attr]
    assert metrics["router/mismatch_frac"] == 0.0
    packed = computed(network, whole(other))
    assert differs(packed, plain)
    twice = computed(make_network(family, "replay", gradient_checkpointing=True), whole(other))
    for mine, theirs in zip(twice, packed, strict=True):
        assert torch.equal(mine, theirs)
    network.run_packed(False)
    assert_alike(computed(network, *one_by_one(other)), packed)


def test_recording_alone_changes_nothing_and_counts():
    batch = with_record(sibling_batch(GROUPS), random_experts)
    network = make_network("Qwen3-MoE", "record")
    recorded = computed(network, whole(batch))
    for mine, theirs in zip(
        recorded, computed(make_network("Qwen3-MoE"), whole(batch)), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert network.router_records is not None
    metrics = network.router_records.metrics(Ranks())
    assert 0.3 < metrics["router/mismatch_frac"] < 0.7
    assert 0.25 < metrics["router/busiest_expert_share"] < 0.4
    assert 0.95 < metrics["router/load_entropy"] <= 1.0
    assert network.router_records.metrics(Ranks()) == {}


def test_a_step_counts_no_choices_of_a_part_that_was_discarded():
    config = make_config(algorithm={"advantage": "grpo", "router_replay": "record"})
    batches = [with_record(sibling_batch(GROUPS[i:]), random_experts) for i in range(2)]
    plain, again = make_trainer(config), make_trainer(config)
    again.accumulate(batches[0])
    again.discard()
    expected, found = plain.step(batches[1]), again.step(batches[1])
    for name in ("router/mismatch_frac", "router/busiest_expert_share", "router/load_entropy"):
        assert found[name] == expected[name]


def test_tokens_without_a_record_are_routed_freely():
    def half(trajectory: Trajectory) -> RoutedExperts:
        experts = of_engine("Mixtral")(trajectory)
        return RoutedExperts.of(experts.rows[:1], trajectory.num_tokens)

    batch = sibling_batch(GROUPS)
    plain = computed(make_network("Mixtral"), whole(batch))
    assert_alike(
        computed(make_network("Mixtral", "replay"), whole(with_record(batch, half))), plain
    )


def test_prompts_of_other_experts_are_not_shared():
    batch = with_record(sibling_batch(((20, (2, 2, 2)),)), random_experts)
    assert whole(batch).shared_prompts is not None
    first = batch.trajectories[0]

    def another(trajectory: Trajectory) -> RoutedExperts:
        experts = random_experts(trajectory)
        rows = experts.rows.copy()
        rows[4] = np.flip(rows[4], -1) if trajectory is first else (rows[4] + 1) % NUM_EXPERTS
        return RoutedExperts.of(rows, trajectory.num_tokens)

    other = with_record(batch, another)
    network = make_network("Qwen3-MoE", "replay")
    shared = whole(other).shared_prompts
    assert shared is not None
    assert len(shared.tokens) == 2 * 20 + 3
    assert_alike(computed(network, whole(other)), computed(network, *one_by_one(other)))


def weights_of(kind: str, router: Any, hidden: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The published rule, in float64."""
    scores = hidden.double() @ router.weight.double().T
    match kind:
        case "GptOssTopKRouter":
            return (scores + router.bias.double()).gather(1, experts).softmax(1)
        case "DeepseekV3TopkRouter":
            taken = scores.sigmoid().gather(1, experts)
            return taken / taken.sum(1, keepdim=True) * router.routed_scaling_factor
        case _:
            taken = scores.softmax(1).gather(1, experts)
            return taken / taken.sum(1, keepdim=True)


@pytest.mark.parametrize("family", SHOWN)
def test_weights_are_those_of_the_rule(family: str):
    model = make_model(family, norm_topk_prob=True)
    router: Any = next(iter(routers(model, "").values()))
    hidden, experts = torch.randn(50, 32), torch.rand(50, NUM_EXPERTS).argsort(1)[:, :TOP_K]
    choosing(router, lambda own: experts)
    _, weights, taken = router(hidden)
    assert torch.equal(taken, experts)
    expected = weights_of(type(router).__name__, router, hidden, experts)
    assert torch.allclose(weights.double(), expected, atol=1e-6)
    [gradient] = torch.autograd.grad((weights * torch.randn(2)).sum(), router.weight)
    assert gradient.abs().sum(1).min() > 0


@pytest.mark.parametrize("family", SHOWN)
def test_replay_takes_the_gap_between_a_bfloat16_engine_and_the_learner_down(family: str):
    """KL by k3 of the learner in float32 from the engine in bfloat16, with the same weights."""
    batch = sibling_batch(((6, [40] * 8),) * 4)
    engine = make_model(family).to(torch.bfloat16)
    behavior = torch.cat(
        [_response_logprobs(engine, trajectory) for trajectory in batch.trajectories]
    )
    recorded = with_record(batch, of_engine(family, torch.bfloat16))
    gaps = {}
    for setting in ("record", "replay"):
        network = make_network(family, setting)
        logprobs = network(whole(recorded)).logprobs
        assert logprobs is not None
        ratio = logprobs.detach() - behavior
        gaps[setting] = float((ratio.exp() - 1 - ratio).mean())
        assert network.router_records is not None
        metrics = network.router_records.metrics(Ranks())
        print(f"{family} {setting}: KL {gaps[setting]:.4f}, {metrics}")
    assert gaps["replay"] < gaps["record"] / 5


def test_a_pass_of_another_policy_asks_for_no_record():
    """Such as the reference of an adapter, which shares the network."""
    network, micro_batch = make_network("Mixtral", "replay"), whole(sibling_batch(GROUPS))
    free = network(micro_batch, with_records=False).logprobs
    plain = make_network("Mixtral")(micro_batch).logprobs
    assert free is not None
    assert torch.equal(free, plain)
    assert torch.equal(_WithoutAdapter(network)(micro_batch).logprobs, plain)


def _response_logprobs(model: Any, trajectory: Trajectory) -> torch.Tensor:
    ids = torch.from_numpy(trajectory.token_ids).long()
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs[torch.from_numpy(trajectory.response_mask[1:])]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("Qwen3", "qwen3 is no mixture of experts: no token is given to some of them"),
        ("DeepSeek-V2", "deepseek_v2 chooses its experts by DeepseekV2TopkRouter, whose weights"),
        ("Phi-MoE", "phimoe chooses its experts by PhimoeTopKRouter"),
    ],
)
def test_a_model_without_known_routers_is_refused(family: str, expected: str):
    with pytest.raises(ConfigError, match=f"algorithm.router_replay: was replay, and {expected}"):
        make_network(family, "replay")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (lambda t: None, "a trajectory came without the experts of its tokens"),
        (lambda t: random_experts(t) if t.num_tokens > 6 else None, "a trajectory came without"),
        (
            lambda t: RoutedExperts.of(np.zeros((t.num_tokens, 3, 2), np.int64)),
            "2 experts of up to number 0 in each of 3 layers; qwen3_moe at model.path has 2 of 4",
        ),
        (
            lambda t: RoutedExperts.of(np.full((t.num_tokens, 4, 2), 4)),
            "2 experts of up to number 4 in each of 4 layers",
        ),
    ],
)
def test_trajectories_of_an_engine_that_reports_no_fitting_experts_are_refused(
    record: Record, expected: str
):
    batch = with_record(sibling_batch(GROUPS), record)
    with pytest.raises(ConfigError, match=expected):
        make_network("Qwen3-MoE", "replay")(whole(batch))
