"""Matrices in eight bits per weight: float8_e4m3fn values, one scale for each 128 x 128 block.

The blocks are those of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), which vLLM, verl and NeMo-RL
send too; scales are rounded up to powers of two (NeMo-RL's `use_weight_pow2_scale`), so that what a
receiver decodes is exact in bfloat16 and float32 alike: the one rounding is the sender's.

Invariant: |decoded - sent| <= max(|sent| / 16, largest of its block / 2**17, 2**-126), of weights
that are finite; the sender's rounding to bfloat16 would have been |sent| / 256.
"""

import torch

DTYPE = torch.float8_e4m3fn
BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
"""Suffix of the scales' name in a file, as in DeepSeek's checkpoints."""

_LARGEST = torch.finfo(DTYPE).max
_KEPT = {"lm_head", "wte", "wpe", "gate", "router", "lora_left", "lora_right"}


def is_sent_in_float8(name: str, parameter: torch.Tensor) -> bool:
    """True for matrices other than embeddings, the output head, routers and factors of LoRA.

    DeepSeek-V3 excepts those too; they, norms and biases are few bytes and suffer most from the
    rounding.
    """
    parts = name.split(".")
    is_kept = any(part in _KEPT or part.startswith("embed") for part in parts)
    return parameter.dim() == 2 and parameter.is_floating_point() and not is_kept


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def encode(matrix: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Write matrix [rows, columns] into values [rows, columns] and scales (`scale_shape`)."""
    if not matrix.numel():
        return
    blocks = _blocks(matrix.float(), scales.shape)
    _, exponent = torch.frexp(blocks.abs().amax((1, 3)) / _LARGEST)
    scales.copy_(torch.ldexp(torch.ones_like(scales), exponent.clamp(min=-126)))
    scaled = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
    values.copy_(scaled[: matrix.shape[0], : matrix.shape[1]])


def decode(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The matrix [rows, columns], bfloat16."""
    rows, columns = values.shape
    per_row = scales.bfloat16().repeat_interleave(BLOCK, 1)[:, :columns]
    matrix = values.bfloat16()
    for block, scale in enumerate(per_row):
        matrix[block * BLOCK : min(rows, (block + 1) * BLOCK)] *= scale
    return matrix


def _blocks(matrix: torch.Tensor, num_blocks: torch.Size) -> torch.Tensor:
    """[row blocks, BLOCK, column blocks, BLOCK], zeros where the matrix ends within a block."""
    rows, columns = (num * BLOCK for num in num_blocks)
    missing = (0, columns - matrix.shape[1], 0, rows - matrix.shape[0])
    padded = torch.nn.functional.pad(matrix, missing) if any(missing) else matrix
    return padded.reshape(num_blocks[0], BLOCK, num_blocks[1], BLOCK)
