"""Rows of a tensor by their indices, some of them repeatedly.

Invariant: the gradient of a row is summed in one order, whatever runs beside it.
"""

import torch


def rows(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[*I, ...] from [N, ...] for indices [*I], which are on the tensor's device."""
    if tensor.is_cuda:
        # There the gradient of `index_select` adds as threads come.
        return tensor[indices]
    # Several times as fast as indexing, which on a CPU takes each number on its own.
    chosen = tensor.flatten(1).index_select(0, indices.flatten())
    return chosen.view(*indices.shape, *tensor.shape[1:])
