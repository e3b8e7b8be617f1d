"""A difference of two versions gives exactly the second one, or says that it does not."""

import contextlib

import pytest
import torch
from hypothesis import given, settings, strategies as st

from streamrl.weights.transports import difference_codec

GAPS = (0, 1, 254, 255, 256, 70_000)


def flat(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


@st.composite
def versions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Any bytes, and others of which any share has changed."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    base = torch.randint(256, (draw(st.integers(0, 5000)),)).byte()
    share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.5, 1.0]))
    changes = torch.randint(256, base.shape).byte() * (torch.rand(base.shape) < share)
    return base, base ^ changes


@settings(max_examples=200)
@given(versions())
def test_a_difference_gives_exactly_the_second_version(pair):
    base, data = pair
    frame = difference_codec.encode(base, data)
    assert (frame is None) == torch.equal(base, data)
    if frame is not None:
        into = torch.empty_like(base)
        difference_codec.decode(frame, base, into)
        assert torch.equal(into, data)
        difference_codec.decode(frame, base, base)
        assert torch.equal(base, data)


@settings(max_examples=200)
@given(versions(), st.integers(0, 2**32), st.integers(1, 255))
def test_a_frame_that_has_changed_raises_nothing_but_a_refusal(pair, place, change):
    """That it gives other bytes, the checksum of the result finds out."""
    base, data = pair
    if (frame := difference_codec.encode(base, data)) is None:
        return
    frame[place % len(frame)] ^= change
    into = torch.empty_like(base)
    with contextlib.suppress(ValueError):
        difference_codec.decode(frame, base, into)


@pytest.mark.parametrize("gap", GAPS)
def test_words_stand_any_gap_apart(gap):
    base = torch.zeros(2 * (gap + 1) * 4 + 3, dtype=torch.uint8)
    data = base.clone()
    data[2 * gap :: 2 * (gap + 1)] = 7
    frame = difference_codec.encode(base, data)
    difference_codec.decode(frame, base, base)
    assert torch.equal(base, data)


@pytest.mark.parametrize(
    ("cut", "message"),
    [(slice(0, 3), "too early"), (slice(0, 30), "bytes|frame|Src"), (slice(0, -9), "bytes|frame")],
)
def test_a_frame_that_was_cut_off_is_refused(cut, message):
    base = torch.zeros(1000, dtype=torch.uint8)
    for data in (torch.arange(1000).byte(), torch.arange(1000).byte() * (torch.rand(1000) < 0.01)):
        frame = difference_codec.encode(base, data)
        with pytest.raises(ValueError, match=message):
            difference_codec.decode(frame[cut].clone(), base, torch.empty_like(base))


def test_a_frame_for_more_bytes_is_refused():
    data = torch.zeros(1000).byte()
    data[::21] = 1
    frame = difference_codec.encode(torch.zeros(1000).byte(), data)
    few = torch.zeros(80, dtype=torch.uint8)
    with pytest.raises(ValueError, match="changes more than 80 bytes"):
        difference_codec.decode(frame, few, few)
    few = torch.zeros(96, dtype=torch.uint8)
    frame[:8] = torch.tensor([40, 0, 0, 0, 0, 0, 0, 0]).byte()
    with pytest.raises(ValueError, match="has not the 120 bytes"):
        difference_codec.decode(frame, few, few)


def test_a_step_at_the_learning_rate_of_rl_costs_two_bytes_for_each_word_that_changed():
    torch.manual_seed(0)
    master = 0.04 * torch.randn(2**20)
    before = master.bfloat16()
    after = (master + 1e-6 * torch.randn(2**20).clamp(-1, 1)).bfloat16()
    changed = int((before != after).sum())
    frame = difference_codec.encode(before.view(torch.uint8), after.view(torch.uint8))
    print(f"{changed / 2**20:.2%} changed, {len(frame) / changed:.2f} bytes for each")
    assert 0.001 < changed / 2**20 < 0.03
    assert len(frame) < 2 * changed
