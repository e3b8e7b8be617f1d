"""How SGLang is made importable and started where there is no GPU."""

from pathlib import Path

import pytest

from actors.engines.sglang import server
from actors.engines.sglang.server import launch_command, launch_environment
from deploy.sglang_cpu import prepare, without_operators
from tests.engines import run_config

SOURCE = """import torch

@torch.library.register_fake("torchvision::nms")
def meta_nms(dets):
    return dets
"""


def test_only_the_lines_that_need_operators_become_comments():
    patched = without_operators(SOURCE)
    assert '\n# @torch.library.register_fake("torchvision::nms")\ndef meta_nms' in patched
    assert without_operators(patched) == patched


def test_an_environment_is_prepared_once_and_a_linked_cache_is_left_alone(tmp_path: Path):
    cached, file = tmp_path / "cached.py", tmp_path / "torchvision/_meta_registrations.py"
    cached.write_text(SOURCE)
    file.parent.mkdir()
    file.hardlink_to(cached)
    for _ in range(2):
        prepare(tmp_path)
        assert file.read_text() == without_operators(SOURCE)
    assert cached.read_text() == SOURCE
    kernels: dict[str, object] = {}
    exec((tmp_path / "sgl_kernel/__init__.py").read_text(), kernels)
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.some has no build"):
        kernels["__getattr__"]("some")(1)  # type: ignore[operator]


def command(**generator: object) -> str:
    config = run_config(Path("m"), max_num_seqs=4, max_model_len=94, **generator)
    return " ".join(launch_command(config, host="127.0.0.1", port=1, seed=0))


def test_without_a_gpu_the_kernels_and_the_cache_are_those_of_a_cpu(monkeypatch):
    monkeypatch.setattr(server, "has_gpu", lambda: False)
    assert "--device cpu --attention-backend torch_native" in command()
    assert "--max-total-tokens 400" in command()
    assert "--max-total-tokens 9" in command(engine_kwargs={"max_total_tokens": 9})
    assert "--sleep-on-idle" in command()
    environment = launch_environment(run_config(Path("m"), num_threads=2))
    assert environment == {"OMP_NUM_THREADS": "2", "SGLANG_USE_CPU_ENGINE": "1"}
    monkeypatch.setattr(server, "has_gpu", lambda: True)
    assert "--device" not in command()
    assert "--sleep-on-idle" not in command()
    assert launch_environment(run_config(Path("m"))) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f,GPU-2e")
    alone = launch_environment(run_config(Path("m"), device="cuda:1"))
    assert alone == {"CUDA_VISIBLE_DEVICES": "GPU-2e"}


def test_the_overlap_scheduler_runs_only_where_labels_are_exact_with_it():
    assert "--disable-overlap-schedule" not in command()
    assert "--disable-overlap-schedule" in command(sglang={"recompute_kv": False})
