"""LoRA on the weight channel: two small factors for each matrix that training changes.

    matrix = base + left right      left [rows, rank] holds the scale, right [rank, columns]

Invariant: the manifest's names alone say that an update holds factors; the base is what the engine
loaded at its start, the model that the learner trains factors for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from streamrl.errors import WeightTransferError
from streamrl.types import TensorSpec

LEFT, RIGHT = ".lora_left", ".lora_right"

Tensors = Iterable[tuple[str, torch.Tensor]]


def is_of_factors(manifest: Iterable[TensorSpec]) -> bool:
    """Whether the update holds factors for some matrices of the base, rather than a whole model."""
    return any(spec.name.endswith((LEFT, RIGHT)) for spec in manifest)


def require_fitting_factors(
    manifest: Iterable[TensorSpec], own: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuses factors of another model; `own` is the engine's shapes by name.

    Raises:
        WeightTransferError: naming the first factor without a matrix, or that does not fit it.
    """
    shapes = {spec.name: spec.shape for spec in manifest}
    for name in shapes:
        matrix = own.get(matrix_of(name), ())
        left, right = (shapes.get(matrix_of(name) + half, ()) for half in (LEFT, RIGHT))
        made = left[:1] + right[1:]
        if len(matrix) != 2 or made != matrix or left[1:] != right[:1]:
            raise WeightTransferError(
                f"factor {name}: the learner's are {left} and {right}, the engine's matrix "
                f"{matrix or 'does not exist'}"
            )


def matrix_of(name: str) -> str:
    """The matrix that a factor belongs to; other names as they are."""
    return name.removesuffix(LEFT).removesuffix(RIGHT)


def merged(
    tensors: Tensors, base: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Merge factors into their matrices, in float32; other tensors are passed on.

    Each left factor must be followed by its right one.
    """
    left: torch.Tensor | None = None
    for name, tensor in tensors:
        if name.endswith(LEFT):
            # Copied, since it is valid only until the next tensor.
            left = tensor.float().clone()
        elif left is not None:
            matrix = base(matrix_of(name)).float()
            right = tensor.to(matrix.device, torch.float32)
            yield matrix_of(name), torch.addmm(matrix, left.to(matrix.device), right)
            left = None
        else:
            yield name, tensor
