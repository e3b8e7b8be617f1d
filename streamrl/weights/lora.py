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
    for name, shape in shapes.items():
        matrix = own.get(matrix_of(name), ())
        other = shapes.get(matrix_of(name) + (RIGHT if name.endswith(LEFT) else LEFT), ())
        fits = len(shape) == len(other) == len(matrix) == 2 and (
            (shape[0], other[1]) == matrix and shape[1] == other[0]
            if name.endswith(LEFT)
            else (other[0], shape[1]) == matrix
        )
        if not fits:
            raise WeightTransferError(
                f"factor {name}: the learner's is {shape} beside {other}, the engine's matrix "
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
