"""A vision-language model in the learner: packed with images as by transformers' own forward."""

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import distributed

from learners.batch.micro_batch import MicroBatch
from learners.batch.training_batch import TrainingBatch
from learners.parallel.mesh import full, make_mesh
from learners.policy import packing_check
from learners.policy.network import Network
from learners.policy.packing_check import choose_packing
from learners.policy.policy import Policy
from learners.policy.sharding import shard
from streamrl.config.learner import MeshSettings
from streamrl.errors import ConfigError
from streamrl.types import Media, TrajectoryGroup
from streamrl.types.media import distinct
from streamrl.vision.tower import VisionTower
from tests.ranks import run_ranks
from tests.tiny_vision import END, IMAGE, START, image, make_qwen, reader, save_qwen
from tests.training import make_config, make_trajectory

ROUNDING = 1e-4


def network(seed: int = 0, *, is_trained: bool = True) -> Network:
    model = make_qwen(seed)
    return Network(
        model, temperature=1.0, tower=VisionTower(model, reader(), is_trained=is_trained)
    )


@pytest.mark.parametrize("packed", [True, False])
def test_log_probabilities_with_images_are_those_of_transformers(packed):
    own = network()
    micro_batch = packing_check._random_micro_batch(own)
    assert sum(map(len, micro_batch.media)) > 3
    assert int((micro_batch.token_ids == IMAGE).sum()) > 30
    with torch.no_grad():
        expected = packing_check._plain_logprobs(own, micro_batch)
        own.run_packed(packed)
        computed = own(micro_batch).logprobs
    assert float((computed - expected).abs().max()) < ROUNDING


def test_the_check_at_start_runs_it_packed():
    own = network()
    choose_packing(own)
    assert own.is_packed


def batch_with(*media: tuple[Media, ...]) -> TrainingBatch:
    """A trajectory for each of `media`, of a prompt with these images and some responses."""
    size = reader().size
    rng = np.random.default_rng(0)
    trajectories = []
    for own in media:
        prompt = [5]
        for medium in own:
            prompt += [START, *[IMAGE] * size(medium).num_tokens, END]
        trajectory = make_trajectory(rng, len(prompt), 4)
        token_ids = rng.integers(2, 9, trajectory.num_tokens).astype(np.int32)
        token_ids[: len(prompt)] = prompt
        names = tuple(medium.id for medium in own)
        trajectories.append(structs.replace(trajectory, token_ids=token_ids, media=names))
    group = TrajectoryGroup(
        group_id="a",
        prompt_index=0,
        environment="test",
        trajectories=tuple(trajectories),
        media=distinct(medium for own in media for medium in own),
    )
    return TrainingBatch.of([group], 4)


def whole(batch: TrainingBatch) -> MicroBatch:
    return batch.micro_batch(range(len(batch)), torch.device("cpu"))


A, B, C = image(40, 24), image(16, 48, 1), image(40, 24, 2)
MEDIA = ((A,), (), (B, A), (C,), (A,))


def test_an_image_of_several_trajectories_goes_through_the_tower_once(monkeypatch):
    own = network()
    seen = []
    forward = own.model.model.visual.forward
    monkeypatch.setattr(
        own.model.model.visual,
        "forward",
        lambda *a, **k: seen.append(k["grid_thw"].tolist()) or forward(*a, **k),
    )
    own(whole(batch_with(*MEDIA)))
    assert seen == [[[1, 4, 4], [1, 6, 2], [1, 4, 4]]]


def test_what_is_left_out_takes_its_images_along():
    own, batch = network(), whole(batch_with(*MEDIA))
    kept = torch.tensor([False, True, True, False, True])
    with torch.no_grad():
        every = own(batch).logprobs
        some = own(batch.select(kept)).logprobs
    torch.testing.assert_close(some, every[batch.sequences.expand(kept)], atol=1e-5, rtol=1e-5)
    assert batch.select(~kept & kept).media == ((),)


def test_another_image_of_the_same_size_is_another_answer():
    own = network()
    with torch.no_grad():
        gap = own(whole(batch_with((A,)))).logprobs - own(whole(batch_with((C,)))).logprobs
    assert float(gap.abs().max()) > 1e-2


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_frozen_tower_gets_no_gradient_and_the_rest_the_same(is_trained):
    own = network(is_trained=is_trained)
    own(whole(batch_with(*MEDIA))).logprobs.sum().backward()
    for name, parameter in own.model.named_parameters():
        is_tower = ".visual." in name
        assert (parameter.grad is not None) == (is_trained or not is_tower), name
    reference = network()
    reference(whole(batch_with(*MEDIA))).logprobs.sum().backward()
    torch.testing.assert_close(own.model.lm_head.weight.grad, reference.model.lm_head.weight.grad)


# The second rank has no image, and its tower a gradient of 0.
OF_RANKS = (((A,), (B,)), ((), ()))


def gradients() -> dict[str, torch.Tensor]:
    own = network()
    shard(own, make_mesh(MeshSettings(), torch.device("cpu")), torch.float32)
    own(whole(batch_with(*OF_RANKS[distributed.get_rank()]))).logprobs.sum().backward()
    return {name: full(p.grad) for name, p in own.named_parameters()}


def test_gradients_are_summed_over_ranks_of_which_one_has_images(tmp_path):
    own = network()
    for media in OF_RANKS:
        own(whole(batch_with(*media))).logprobs.sum().backward()
    for rank in run_ranks(gradients, 2, tmp_path):
        for name, parameter in own.named_parameters():
            torch.testing.assert_close(rank[name], parameter.grad, rtol=1e-4, atol=1e-3)


def test_a_saved_model_sees_as_the_one_it_was_made_from(tmp_path):
    model = save_qwen(tmp_path / "model")
    config = make_config(model={"path": str(model)})
    policy = Policy.from_config(config)
    batch = whole(batch_with(*MEDIA))
    with torch.no_grad():
        expected = policy(batch).logprobs
    weights = {name: p.detach() for name, p in policy.parameters().items()}
    policy.save(tmp_path / "saved", config.model, weights)
    again = Policy.from_config(config, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again(batch).logprobs, expected)
    assert (tmp_path / "saved" / "preprocessor_config.json").read_bytes() == (
        model / "preprocessor_config.json"
    ).read_bytes()


def test_an_adapter_is_trained_beside_images(tmp_path):
    config = make_config(
        model={"path": str(save_qwen(tmp_path / "model"))},
        learner={"lora": {"rank": 2}, "freeze_vision_tower": True},
    )
    policy = Policy.from_config(config)
    output = policy(whole(batch_with(*MEDIA)))
    output.logprobs.sum().backward()
    assert set(policy.weights()) == set(dict(make_qwen().named_parameters()))
    assert any(p.grad is not None for p in policy.parameters().values())


@pytest.mark.parametrize("axis", ["sequence", "tensor"])
def test_ranks_that_share_tokens_or_matrices_are_refused(tmp_path, axis, monkeypatch):
    # The other rank is pretended.
    monkeypatch.setattr(distributed, "new_group", lambda **_: None)

    class OneAxis:
        device = torch.device("cpu")
        rank, world_size = 0, 2

        def size(self, name: str) -> int:
            return 2 if name == axis else 1

    config = make_config(model={"path": str(save_qwen(tmp_path))})
    with pytest.raises(ConfigError, match=rf"^learner\.mesh\.{axis}: was 2; it must be 1 for a mo"):
        Policy.from_config(config, mesh=OneAxis())
