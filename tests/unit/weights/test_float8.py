"""What a cast on send costs: a bound for every precision, and nothing but the sender's rounding."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from streamrl.weights.layout import Layout, Slot, manifest_of

# Half a unit in the last place of the precision; for what is too small, half its smallest step.
BOUNDS = {
    torch.float32: (0.0, 0.0),
    torch.bfloat16: (2**-8, 2**-134),
    torch.float16: (2**-11, 2**-25),
}
shapes = st.tuples(st.integers(1, 300), st.integers(1, 300))


def sent(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> tuple[Slot, torch.Tensor]:
    """The tensor's slot, and what a receiver reads from it."""
    (slot,) = Layout(manifest_of({name: tensor}, dtype), 1).slots
    raw = torch.zeros(slot.num_bytes, dtype=torch.uint8)
    slot.write(raw, tensor)
    return slot, slot.read(raw)


def matrix(shape: tuple[int, int], seed: int, exponent: int, is_wide: bool) -> torch.Tensor:
    """Normal weights; wide ones of very different sizes in one block."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random) * 2.0**exponent
    return values * torch.exp(4 * torch.randn(shape, generator=random)) if is_wide else values


@settings(max_examples=30)
@given(shapes, st.integers(0, 9), st.integers(-10, 3), st.sampled_from(sorted(BOUNDS, key=str)))
def test_a_cast_rounds_once(shape, seed, exponent, dtype):
    tensor = matrix(shape, seed, exponent, is_wide=False)
    _, received = sent("w", tensor, dtype)
    relative, smallest = BOUNDS[dtype]
    assert received.dtype == dtype
    assert ((received.float() - tensor).abs() <= (tensor.abs() * relative).clamp(smallest)).all()


@settings(max_examples=60)
@given(shapes, st.integers(0, 9), st.integers(-100, 60), st.booleans())
def test_float8_is_within_a_sixteenth_or_a_fraction_of_the_blocks_largest(
    shape, seed, exponent, is_wide
):
    tensor = matrix(shape, seed, exponent, is_wide)
    slot, received = sent("w", tensor, torch.float8_e4m3fn)
    assert slot.spec.dtype == "float8_e4m3fn"
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            block = (slice(row, row + 128), slice(column, column + 128))
            error = (received[block].double() - tensor[block].double()).abs()
            largest = tensor[block].abs().max().double()
            bound = (tensor[block].abs().double() / 16).clamp(min=largest / 2**17 + 2**-126)
            assert (error <= bound).all()


def test_what_was_in_float8_once_goes_through_again_unchanged():
    """So the engine's bfloat16 or float32 adds no rounding of its own."""
    _, once = sent("w", matrix((200, 300), 0, -5, is_wide=True), torch.float8_e4m3fn)
    _, twice = sent("w", once.float(), torch.float8_e4m3fn)
    assert once.dtype == torch.bfloat16
    assert torch.equal(once, twice)


def test_a_weight_that_is_no_number_is_not_hidden():
    tensor = torch.ones(4, 4)
    tensor[1, 2] = float("nan")
    _, received = sent("w", tensor, torch.float8_e4m3fn)
    assert received[1, 2].isnan()


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.layers.0.mlp.gate_proj.weight", (256, 128), "float8_e4m3fn"),
        ("model.layers.0.self_attn.q_proj.bias", (128,), "bfloat16"),
        ("model.layers.0.input_layernorm.weight", (128,), "bfloat16"),
        ("model.layers.0.mlp.gate.weight", (8, 128), "bfloat16"),
        ("model.embed_tokens.weight", (512, 128), "bfloat16"),
        ("lm_head.weight", (512, 128), "bfloat16"),
    ],
)
def test_only_matrices_between_embedding_and_head_are_sent_in_float8(name, shape, dtype):
    (spec,) = manifest_of({name: torch.zeros(shape)}, torch.float8_e4m3fn)
    assert (spec.dtype, spec.shape) == (dtype, shape)


def test_float8_takes_half_the_bytes_of_bfloat16():
    parameters = {"w": torch.zeros(1024, 1024)}
    sizes = [
        Layout(manifest_of(parameters, dtype), 1).num_bytes
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    ]
    assert sizes[1] / sizes[0] < 0.501
