"""What waits in the host's memory frees the GPU's, and changes no bit of the gradient."""

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from learners.parallel.mesh import make_mesh  # noqa: E402
from learners.policy.loading import distribute  # noqa: E402
from learners.policy.network import Network  # noqa: E402
from streamrl.config.learner import LearnerSettings, MeshSettings  # noqa: E402
from tests.training import make_batch  # noqa: E402

GPU = torch.device("cuda", 0)


def peak_and_gradients(**learner: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes at most during a pass, parameters included; and the gradients, on the CPU."""
    gc.collect()  # Layers that are recomputed hold themselves: those of the call before.
    held = torch.cuda.memory_allocated()
    settings = LearnerSettings(device="cuda:0", **learner)
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=8, **sizes)).to(GPU)
    network = Network(model, temperature=1.0)
    distribute(network, make_mesh(MeshSettings(), GPU), settings)
    (micro_batch,) = make_batch(num_groups=200).pack(100_000, GPU)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    network(micro_batch).logprobs.sum().backward()
    torch.cuda.synchronize()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        gradients[name] = whole.cpu()
    return torch.cuda.max_memory_allocated() - held, gradients


def test_inputs_of_layers_on_the_host():
    recomputed = {"gradient_checkpointing": True}
    here, expected = peak_and_gradients(**recomputed)
    there, gradients = peak_and_gradients(**recomputed, offload={"activations": True})
    assert there < here
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


def test_parameters_on_the_host():
    here, expected = peak_and_gradients()
    there, gradients = peak_and_gradients(offload={"parameters": True})
    assert there < here
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4)
