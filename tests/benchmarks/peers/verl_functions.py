"""Single functions of verl 0.6.0, loaded from its files without what verl imports beside torch.

Invariant: the code that runs is that of the file; empty stand-ins replace what it only names in
types and decorators. Called by: `learner_side` and bench_rollout_is, in a process of their own,
since the stand-ins stay in `sys.modules`.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

STAND_INS = (
    "omegaconf",
    "tensordict",
    "verl",
    "verl.protocol",
    "verl.utils",
    "verl.utils.device",
    "verl.utils.import_utils",
    "verl.trainer",
    "verl.trainer.config",
    "verl.trainer.config.algorithm",
    "verl.workers",
    "verl.workers.config",
    "verl.workers.config.actor",
)


class Record:
    """Stands in for any class; `from_dict` is all that verl's functions call."""

    @classmethod
    def from_dict(cls, tensors: object) -> "Record":
        return cls()


class StandIn(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Record


def load(verl: Path, file: str) -> ModuleType:
    """The module of a file of the folder `verl`, such as `trainer/ppo/core_algos.py`."""
    for name in STAND_INS:
        _install(StandIn(name))
    sys.modules["verl.utils.import_utils"].deprecated = _as_it_is  # type: ignore[attr-defined]
    sys.modules["verl.utils.device"].get_torch_device = _cpu  # type: ignore[attr-defined]
    _install(_load("verl.utils.torch_functional", verl / "utils" / "torch_functional.py"))
    if (groupwise := verl / "utils" / "groupwise.py").is_file():
        utils, module = sys.modules["verl.utils"], _load("verl.utils.groupwise", groupwise)
        utils.as_torch_index = module.as_torch_index  # type: ignore[attr-defined]
        utils.group_mean_std = module.group_mean_std  # type: ignore[attr-defined]
    return _load("verl_functions_loaded", verl / file)


def _cpu() -> torch.device:
    return torch.device("cpu")


def _as_it_is(*_: object) -> Callable[[Any], Any]:
    return lambda function: function


def _install(module: ModuleType) -> None:
    sys.modules[module.__name__] = module
    parent, _, name = module.__name__.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)


def _load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
