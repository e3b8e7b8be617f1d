"""The steps of an update that all engines share, and requests that end with their engine."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from actors.engines.requests import InFlightRequests, answered
from actors.engines.updates import StagedWeights, UpdatableEngine
from streamrl.errors import RolloutError, WeightTransferError
from streamrl.types import (
    Completion,
    FilesEndpoint,
    FinishReason,
    RoutedExperts,
    SamplingParams,
    WeightUpdate,
)
from streamrl.weights.layout import manifest_of
from tests.model_families import make_model


def model(width: int = 3) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 5))


def update_of(source: torch.nn.Module, version: int) -> WeightUpdate:
    manifest = manifest_of(dict(source.named_parameters()))
    endpoint = FilesEndpoint(path="nowhere")
    return WeightUpdate(
        policy_version=version, learner_id="h", manifest=manifest, endpoint=endpoint, key=b""
    )


class Recorder(UpdatableEngine):
    """Records its steps, with the version at each."""

    def __init__(self) -> None:
        super().__init__({name: tuple(p.shape) for name, p in model().named_parameters()})
        self.steps: list[tuple[str, int]] = []
        self.arrives = True

    async def _receive(self, update: WeightUpdate) -> None:
        self.steps.append(("receive", self.policy_version))
        if not self.arrives:
            raise WeightTransferError("lost")
        await asyncio.sleep(0.01)

    async def _apply(self, update: WeightUpdate, on_loaded: Callable[[], None]) -> float:
        self.steps.append(("load", self.policy_version))
        on_loaded()
        self.steps.append(("resume", self.policy_version))
        return 0.25


async def test_the_version_changes_in_the_pause_and_the_times_are_reported():
    engine = Recorder()
    report = await engine.load_weights(update_of(model(), 3))
    assert engine.steps == [("receive", 0), ("load", 0), ("resume", 3)]
    assert (engine.policy_version, report.pause_s) == (3, 0.25)
    assert report.transfer_s >= 0.01
    await engine.load_weights(update_of(model(), 4))
    assert engine._pause_s == 0.5


async def test_a_manifest_of_another_model_is_refused():
    engine = Recorder()
    with pytest.raises(WeightTransferError, match=r"0\.weight"):
        await engine.load_weights(update_of(model(width=4), 1))
    assert engine.steps == []


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3-MoE", "Qwen3"])
def test_inference_libraries_are_given_the_tensors_of_the_models_files(family: str, tmp_path):
    source = make_model(family)
    source.save_pretrained(tmp_path)
    parameters = {name: p.detach() for name, p in source.named_parameters()}
    staged = StagedWeights(str(tmp_path), trust_remote_code=False)
    staged.fill(manifest_of(parameters), parameters.items())
    found = dict(staged)
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


async def test_an_update_that_does_not_arrive_is_not_loaded():
    engine = Recorder()
    engine.arrives = False
    with pytest.raises(WeightTransferError, match="lost"):
        await engine.load_weights(update_of(model(), 1))
    assert engine.steps == [("receive", 0)]
    assert (engine.policy_version, engine._pause_s) == (0, 0.0)


async def test_requests_that_are_all_canceled_fail_with_the_engines_error():
    def over() -> None:
        raise RolloutError("the engine is closed")

    requests = InFlightRequests[int](over)
    waiting = [asyncio.create_task(requests.run(asyncio.sleep(60, 1))) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert len(requests) == 2
    await requests.cancel_all()
    for task in waiting[1:]:
        with pytest.raises(RolloutError, match="closed"):
            await task
    assert await requests.run(asyncio.sleep(0, 7)) == 7


@pytest.mark.parametrize("keep_routed_experts", [False, True])
@pytest.mark.parametrize("has_experts", [False, True])
async def test_a_stopped_request_has_what_was_sampled_if_it_can_be_replayed(
    keep_routed_experts: bool, has_experts: bool
):
    stop, num_sent = asyncio.Event(), 0
    rows = np.zeros((2, 1, 1), np.int16)

    async def send() -> Completion:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 2:
            stop.set()
        return Completion(
            token_ids=np.array([3, 4], np.int32),
            logprobs=np.zeros(2, np.float32),
            policy_versions=np.zeros(2, np.int32),
            finish_reason=FinishReason.ABORT,
            routed_experts=RoutedExperts.of(rows, 3) if has_experts else None,
        )

    sampling = SamplingParams(max_new_tokens=9, keep_routed_experts=keep_routed_experts)
    answer = await answered(send, sampling, stop)
    assert num_sent == 2, "an update has ended it before"
    assert answer.finish_reason is FinishReason.DEADLINE
    is_kept = has_experts or not keep_routed_experts
    assert answer.token_ids.tolist() == ([3, 4] if is_kept else [])
