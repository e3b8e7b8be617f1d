"""A device that computes on the CPU and refuses, as a GPU does, what mixes it with the CPU.

    with pretended() as device:
        model.to(device)

A tensor of it is a wrapper around one of the CPU, so numbers are computed, other than by
`pretended_gpu`. Invariant: an operation on tensors of both devices raises, but for those that CUDA
takes: numbers without dimensions in element-wise operations, indices, and copies. `.numpy()` of a
tensor raises too. A process asks for it before its first backward pass, when torch counts devices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

NAME = "pretended"
_ATEN = torch.ops.aten
_TAKE_BOTH = (
    _ATEN.copy_,
    _ATEN._to_copy,
    _ATEN.index,
    _ATEN.index_put,
    _ATEN.index_put_,
    _ATEN._index_put_impl_,
)


class PretendedTensor(torch.Tensor):
    """`held` has the numbers."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "PretendedTensor":
        made: PretendedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"PretendedTensor({self.held!r})"

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Pretending(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """On the CPU; what comes out is where the device or the tensors among the arguments are."""
    tensors: list[torch.Tensor] = []

    def held_by(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor.held if isinstance(tensor, PretendedTensor) else tensor

    given, on_cpu = _changed((args, kwargs), torch.Tensor, held_by)
    is_there = any(isinstance(tensor, PretendedTensor) for tensor in tensors)
    if is_there and func.overloadpacket not in _TAKE_BOTH:
        _require_one_device(func, tensors)
    device = kwargs.get("device")
    if device is not None:
        on_cpu["device"] = torch.device("cpu")
        is_there = torch.device(device).type == NAME
        if is_there and kwargs.get("generator") is not None:
            raise RuntimeError(f"{func}: a generator of the CPU for a tensor of {NAME}")
    elif func.overloadpacket is _ATEN.copy_:
        is_there = isinstance(args[0], PretendedTensor)
    if func.overloadpacket is _ATEN.histc:
        # CUDA counts integers, and the CPU does not.
        given = (given[0].float(), *given[1:])
    found = func(*given, **on_cpu)
    if not is_there:
        return found
    there = _changed(found, torch.Tensor, PretendedTensor)
    return return_and_correct_aliasing(func, args, kwargs, there)


def _changed(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """What is of the kind changed, in lists, tuples and mappings, too. torch's own function for it
    takes most of the time of a small operation."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {name: _changed(inner, kind, change) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_changed(inner, kind, change) for inner in value])
    return value


def _require_one_device(func: Any, tensors: list[torch.Tensor]) -> None:
    is_pointwise = torch.Tag.pointwise in func.tags
    for tensor in tensors:
        if not isinstance(tensor, PretendedTensor) and (tensor.ndim or not is_pointwise):
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {func} has one of {NAME}, and "
                f"one of {tensor.device} of the shape {tuple(tensor.shape)}"
            )


class _Module(backend_registration._DummyBackendModule):
    """What torch asks of `torch.pretended`."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@cache
def _registered() -> torch.device:
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    return torch.device(NAME, 0)


@contextmanager
def pretended() -> Iterator[torch.device]:
    """The device, which there is within the block."""
    device, before = _registered(), torch._C._only_lift_cpu_tensors()
    # Else `torch.tensor` copies numbers to a device where no mode sees it.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Pretending():
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
