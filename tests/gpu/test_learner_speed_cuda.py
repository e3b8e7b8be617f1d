"""On a GPU: phases by events, traces, memory snapshots, and compiled layers."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from learners.policy.fusion import compile_layers  # noqa: E402
from learners.policy.policy import Policy  # noqa: E402
from learners.trainer import Trainer  # noqa: E402
from tests.training import make_batch, make_config, make_network  # noqa: E402

PARTS = ("plan", "forward", "backward", "update")


def make_trainer(**sections: object) -> Trainer:
    return Trainer(make_config(**sections), Policy(make_network().cuda()))


def test_the_phases_are_most_of_a_step() -> None:
    trainer = make_trainer(learner={"peak_tflops": 1000.0})
    trainer.step(make_batch())
    metrics = trainer.step(make_batch(1))
    seconds = [metrics[f"learner/{name}_s"] for name in PARTS]
    assert all(value > 0 for value in seconds)
    assert sum(seconds) <= 1.1 * metrics["learner/train_s"]
    assert 0 < metrics["learner/mfu"] < 1


def test_a_chosen_step_leaves_a_trace_and_a_memory_snapshot(tmp_path) -> None:
    run = {"folder": tmp_path, "name": "run"}
    profiler = {"steps": [5], "memory": True}
    make_trainer(run=run, learner={"profiler": profiler}).step(make_batch())
    names = sorted(path.name for path in (tmp_path / "run" / "profiler").iterdir())
    assert names == ["step5-rank0.json.gz", "step5-rank0.pickle"]


def test_compiled_layers_compute_the_same() -> None:
    plain, compiled = make_network().cuda(), make_network().cuda()
    compile_layers(compiled)
    for seed in range(2):
        batch = make_batch(seed)
        for network in (plain, compiled):
            network.zero_grad()
            for micro_batch in batch.pack(100, network.device):
                (-network(micro_batch).logprobs.sum()).backward()
    pairs = zip(plain.parameters(), compiled.parameters(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
