"""vLLM and SGLang on a GPU, with CUDA graphs, across updates by each route there is.

The learner is on the first GPU. By CUDA IPC vLLM's workers map its buffers there; by NCCL they are
on the second GPU. SGLang's generator receives in host memory.
"""

import asyncio
from importlib.util import find_spec

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from actors.engines import make_engine  # noqa: E402
from actors.engines.weight_targets import weight_locality  # noqa: E402
from streamrl.config.weights import WeightSettings  # noqa: E402
from streamrl.types import SamplingParams, WeightUpdate  # noqa: E402
from streamrl.weights.layout import Layout, manifest_of  # noqa: E402
from streamrl.weights.receiver import WeightReceiver  # noqa: E402
from streamrl.weights.sender import WeightSender  # noqa: E402
from tests.contract.test_engines import chosen, logprobs_of  # noqa: E402
from tests.engines import make_model, run_config  # noqa: E402

DEADLINE_S = 300.0
GRAPHS = {"vllm": {"enforce_eager": False}, "sglang": {"disable_cuda_graph": False}}


async def gaps_after_updates(folder, engine_name: str, backend: str, device: str) -> list[float]:
    """Each version's largest gap to a forward pass of its weights, and the route it came by."""
    make_model().save_pretrained(folder)
    config = run_config(
        folder,
        engine=engine_name,
        device=device,
        max_model_len=256,
        dtype="float32",
        **{engine_name: GRAPHS[engine_name]},
    )
    engine = make_engine(config, seed=0)
    models = [make_model(seed) for seed in (1, 2)]
    parameters = [{n: p.detach().cuda() for n, p in m.named_parameters()} for m in models]
    settings = WeightSettings(address="tcp://127.0.0.1:0", backend=backend)
    layout = Layout(manifest_of(parameters[0]), settings.bucket_bytes)
    sender = WeightSender(settings, layout, torch.device("cuda:0"), folder)
    is_loaded = asyncio.Event()

    async def load(update: WeightUpdate) -> object:
        report = await engine.load_weights(update)
        is_loaded.set()
        return report

    locality = weight_locality(config.generator)
    receiver = WeightReceiver(sender.address, "engine", load, locality=locality)
    running = [asyncio.create_task(part.run()) for part in (sender, receiver)]
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    gaps = []
    try:
        for version, model in enumerate(models, start=1):
            is_loaded.clear()
            sender.snapshot(parameters[version - 1], version)
            sender.publish()
            async with asyncio.timeout(DEADLINE_S):
                await is_loaded.wait()
            completion = await engine.generate([5, 6, 7], sampling)
            assert set(completion.policy_versions.tolist()) == {version}
            expected = chosen(logprobs_of(model, [5, 6, 7], completion), completion)
            gaps.append(float(np.abs(expected - completion.logprobs).max()))
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await engine.close()
        sender.close()
    return gaps


@pytest.mark.parametrize(
    ("engine", "backend", "device"),
    [
        ("vllm", "gloo", "cuda:0"),
        ("vllm", "shared", "cuda:0"),
        ("vllm", "nccl", "cuda:1"),
        ("sglang", "gloo", "cuda:0"),
    ],
    ids=["CUDA graphs of vLLM", "CUDA IPC into vLLM", "NCCL into vLLM", "CUDA graphs of SGLang"],
)
async def test_log_probabilities_follow_each_update(tmp_path, engine, backend, device):
    if find_spec(engine) is None:
        pytest.skip(f"needs {engine}")
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    gaps = await gaps_after_updates(tmp_path, engine, backend, device)
    assert max(gaps) < 1e-2, gaps
