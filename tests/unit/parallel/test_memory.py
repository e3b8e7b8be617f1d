"""What takes less memory computes the same bits: recomputed layers, the host's memory, and limits
of its own for each pass without gradient."""

from typing import Any

import pytest
import torch

from learners import optimizer as optimizers
from learners.optimizer import keep_state_on_host
from learners.policy import sharding
from learners.policy.loading import load_network
from learners.policy.network import Network
from learners.policy.sharding import checkpoint_layers, require_gpu
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.config.learner import OffloadSettings
from streamrl.errors import ConfigError
from tests.tiny_model import save_llama
from tests.training import make_batch, make_config, make_network, make_policy, make_trainer

CPU = torch.device("cpu")


def gradients(network: Network) -> dict[str, torch.Tensor]:
    for micro_batch in make_batch().pack(100, CPU):
        output = network(micro_batch, with_entropy=True)
        (output.logprobs.square() + output.entropy).mean().backward()
    return {name: p.grad for name, p in network.model.named_parameters()}


@pytest.mark.parametrize("on_host", [False, True], ids=["here", "on the host"])
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_layers_have_the_same_gradients(on_host, is_training, every):
    network = make_network()
    network.train(is_training)
    checkpoint_layers(network, every, on_host=on_host)
    expected = gradients(make_network())
    for name, gradient in gradients(network).items():
        assert torch.equal(gradient, expected[name]), name


def saved_in_layers(network: Network) -> list[torch.Size]:
    """Of what a forward pass keeps between the first layer's beginning and the last one's end."""
    kept: list[torch.Size] = []
    decoder: Any = network.model.get_decoder()
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor
    )
    decoder.layers[0].register_forward_pre_hook(lambda *_: hooks.__enter__())
    decoder.layers[-1].register_forward_hook(lambda *_: hooks.__exit__())
    (micro_batch,) = make_batch().pack(10_000, CPU)
    network(micro_batch)
    return kept


def test_a_recomputed_layer_keeps_its_input_alone():
    network = make_network()
    assert len(saved_in_layers(network)) > 20
    recomputing = make_network()
    checkpoint_layers(recomputing)
    (micro_batch,) = make_batch().pack(10_000, CPU)
    hidden = torch.Size((1, micro_batch.token_ids.shape[1], 32))
    kept = [shape for shape in saved_in_layers(recomputing) if shape == hidden]
    assert len(kept) == len(recomputing.model.get_decoder().layers)


def test_every_second_layer_is_recomputed_where_it_is_asked_for():
    kept = []
    for every in (1, 2, None):
        network = make_network()
        if every:
            checkpoint_layers(network, every)
        kept.append(len(saved_in_layers(network)))
    assert kept == sorted(set(kept))


def test_inputs_of_recomputed_layers_go_to_the_host(monkeypatch):
    moved: list[torch.Size] = []

    class Spy(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: moved.append(tensor.shape) or pack(tensor)

    monkeypatch.setattr(sharding, "save_on_cpu", Spy)
    network = make_network()
    checkpoint_layers(network, on_host=True)
    (micro_batch,) = make_batch().pack(10_000, CPU)
    network(micro_batch)
    num_tokens = micro_batch.token_ids.shape[1]
    assert moved.count(torch.Size((1, num_tokens, 32))) == 2


def test_an_optimizers_state_comes_for_a_step_and_leaves_after_it(monkeypatch):
    events: list[str] = []
    monkeypatch.setattr(
        optimizers, "move_state", lambda _, to_host: events.append("leaves" if to_host else "comes")
    )
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.register_hook(lambda gradient: events.append("backward"))
    optimizer = torch.optim.AdamW([parameter])
    keep_state_on_host(optimizer)
    for _ in range(2):
        parameter.sum().backward()
        optimizer.step()
    assert events == ["backward", "comes", "leaves"] * 2


def test_moments_come_to_the_device_of_their_parameter():
    """The device `meta` stands for a GPU."""
    parameter = torch.nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    names = ("exp_avg", "exp_avg_sq")
    optimizer.state[parameter] = {"step": torch.tensor(1.0)} | {n: torch.zeros(3) for n in names}
    optimizers.move_state(optimizer, to_host=False)
    assert {n: t.device.type for n, t in optimizer.state[parameter].items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_steps_with_state_on_the_host_are_the_same():
    config = make_config(learner={"offload": {"optimizer": True}})
    trainers = [Trainer(config, make_policy()), Trainer(make_config(), make_policy())]
    for step in range(2):
        for trainer in trainers:
            trainer.step(make_batch(step))
    ours, theirs = (trainer.policy.parameters() for trainer in trainers)
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name])


@pytest.mark.parametrize("option", ["parameters", "optimizer", "activations", "reference"])
def test_offloading_from_the_cpu_is_refused(option, tmp_path):
    with pytest.raises(
        ConfigError, match=rf"learner\.offload\.{option} .* the learner runs on cpu"
    ):
        require_gpu(OffloadSettings(**{option: True}), CPU)
    require_gpu(OffloadSettings(**{option: True}), torch.device("cuda"))
    config = make_config(
        model={"path": str(save_llama(tmp_path))},
        algorithm={"kl_loss": {"coef": 0.1}},
        learner={"device": "cpu", "gradient_checkpointing": True, "offload": {option: True}},
    )
    with pytest.raises(ConfigError, match=rf"learner\.offload\.{option} "):
        load_network(config)


def sizes_of_passes(network: Network) -> list[tuple[bool, int]]:
    """Whether each forward pass has a gradient, and its tokens; filled as passes are made."""
    sizes: list[tuple[bool, int]] = []

    def note(module: torch.nn.Module, inputs: Any) -> None:
        sizes.append((torch.is_grad_enabled(), inputs[0].token_ids.shape[1]))

    network.register_forward_pre_hook(note)
    return sizes


def limited(config: RunConfig) -> tuple[dict[str, torch.Tensor], dict[str, list[tuple[bool, int]]]]:
    trainer = make_trainer(config)
    critic, reference = trainer.critic, trainer._targets.reference
    networks = {"policy": trainer.policy.network, "reference": reference.network}
    sizes = {
        role: sizes_of_passes(n) for role, n in (networks | {"critic": critic.network}).items()
    }
    trainer.step(make_batch())
    return dict(trainer.policy.parameters()), sizes


def test_passes_without_gradient_have_limits_of_their_own():
    algorithm = {"advantage": "gae", "kl_reward": {"coef": 0.1}}
    limits = {"proximal": 90, "reference": 120, "values": 250}
    learner = {"max_tokens_per_micro_batch": 40}
    alike, small = limited(make_config(algorithm=algorithm, learner=learner))
    ours, large = limited(
        make_config(algorithm=algorithm, learner={**learner, "max_tokens_per_forward_pass": limits})
    )
    total = sum(make_batch().lengths)
    for role, limit in {"policy": 90, "reference": 120, "critic": 250}.items():
        without = [size for has_gradient, size in large[role] if not has_gradient]
        assert sum(without) == total
        assert 40 < max(without) <= limit
        trained = [size for has_gradient, size in large[role] if has_gradient]
        assert trained == [size for has_gradient, size in small[role] if has_gradient]
        assert max((size for _, size in small[role]), default=0) <= 40
    for name, parameter in ours.items():
        assert torch.allclose(parameter, alike[name], atol=2e-5), name
