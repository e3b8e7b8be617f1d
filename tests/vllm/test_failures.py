"""What the generator's error says when vLLM does not start, or ends."""

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from actors.engines import make_engine
from actors.engines.vllm import arguments
from actors.engines.vllm.cpu import HEAD_WIDTHS
from actors.engines.vllm.engine import VllmProcesses
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, TransportError
from streamrl.interfaces import Engine
from streamrl.types import SamplingParams
from tests.engines import make_model, run_config, update_to

ONE = SamplingParams(max_new_tokens=1)


def config_of(folder: Path, **overrides: object) -> RunConfig:
    make_model(**overrides).save_pretrained(folder)
    return run_config(folder, engine="vllm", max_model_len=256)


async def open_and_sample(config: RunConfig) -> Engine:
    engine = make_engine(config, seed=0)
    try:
        await engine.generate([5], ONE)
    except BaseException:
        await engine.close()
        raise
    return engine


def test_every_head_width_that_vllm_names_is_taken():
    assert set(CPUAttentionBackend.get_supported_head_sizes()) <= set(HEAD_WIDTHS)


async def test_heads_that_no_kernel_takes_are_refused_before_vllm_starts(tmp_path):
    with pytest.raises(ConfigError, match="attention heads of width 16"):
        make_engine(config_of(tmp_path, head_dim=16), seed=0)


async def test_the_last_line_of_vllms_errors_is_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(arguments, "require_servable", lambda config, facts: None)
    with pytest.raises(TransportError) as failed:
        await open_and_sample(config_of(tmp_path, head_dim=24))
    message = str(failed.value)
    assert "Unsupported CPU attention configuration: head_dim=24" in message
    (log_file,) = (tmp_path / "default" / "logs").glob("vllm-*.log")
    assert f"(see {log_file})" in message


async def test_the_signal_that_ended_vllm_is_in_the_error(tmp_path):
    engine = await open_and_sample(config_of(tmp_path))
    (core,) = engine._processes._processes
    os.kill(core.pid, signal.SIGILL)
    with pytest.raises(TransportError, match="vLLM ended with SIGILL: "):
        await engine.generate([5], SamplingParams(max_new_tokens=200, ignore_eos=True))
    await engine.close()


async def test_a_vllm_that_ends_in_an_update_is_not_waited_for(tmp_path):
    engine = await open_and_sample(config_of(tmp_path))
    (core,) = engine._processes._processes
    pause = engine._llm.pause_generation

    async def pause_and_kill(**options: object) -> None:
        await pause(**options)
        os.kill(core.pid, signal.SIGKILL)

    engine._llm.pause_generation = pause_and_kill
    update = update_to(make_model(seed=1), 1, tmp_path / "one.safetensors")
    for _ in range(2):
        with pytest.raises(TransportError, match="vLLM ended with SIGKILL: "):
            async with asyncio.timeout(120):
                await engine.load_weights(update)
    await engine.close()


@pytest.mark.parametrize(
    ("codes", "ended"),
    [
        ((-9,), "ended with SIGKILL"),
        ((None, -9), "ended with SIGKILL"),
        ((-15, -4, -9), "ended with SIGILL"),
        ((0, -15), "ended with SIGTERM"),
        ((0, None), "ended"),
    ],
)
def test_what_vllm_ends_itself_did_not_fail_first(codes, ended, tmp_path):
    processes = VllmProcesses(tmp_path)
    processes._processes = tuple(
        SimpleNamespace(exitcode=code, join=lambda _: None) for code in codes
    )
    assert str(processes.death()).startswith(f"vLLM {ended}: ")
