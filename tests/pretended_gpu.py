"""A GPU that is not there: tensors without data, which say that they are on one.

`PretendedGpu`: what is made on `cuda` has shape and dtype, and who asks for its device or `is_cuda`
is told so; so code takes the branches of a GPU, forwards and backwards. Nothing is computed.

`NeverWaits`: an error at each place where the host would wait for the GPU, or where tensors of both
meet. What needs numbers (`item`, `nonzero`, a copy to the host) is one already, since there are
none.
"""

from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)


class WaitsForTheGpu(AssertionError):
    """The host, where it need not."""


class PretendedGpu(TorchFunctionMode):
    def __enter__(self) -> Any:
        self._patch = patch.object(torch.cuda, "get_device_capability", lambda _: CAPABILITY)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patch.stop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return args[0].is_meta
        if func == torch.Tensor.pin_memory:
            return args[0]
        args, kwargs = tree_map(_without_data, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if isinstance(result, torch.device):
            return GPU if result.type == "meta" else result
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor) and result.is_meta:
            raise WaitsForTheGpu(f"{func.__name__} of numbers of the host; see to_device")
        return result


def _without_data(argument: Any) -> Any:
    is_gpu = isinstance(argument, torch.device) and argument.type == "cuda"
    return torch.device("meta") if is_gpu or argument == "cuda" else argument


class NeverWaits(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_mixed = len({t.device for t in tensors if t.ndim or t.is_meta}) > 1
        if name == "aten::_to_copy" and kwargs.get("device", args[0].device) != args[0].device:
            is_mixed = not kwargs.get("non_blocking")
        if is_mixed:
            devices = [f"{tuple(t.shape)} on {t.device}" for t in tensors]
            raise WaitsForTheGpu(f"{name} of {', '.join(devices)}, meta being the GPU")
        # Torch does not know their shapes without data.
        match name:
            case "aten::segment_reduce":
                return args[0].new_empty(kwargs["lengths"].shape)
            case "aten::_segment_reduce_backward":
                return torch.empty_like(args[2])
        return func(*args, **kwargs)
