"""The second set of parameters of the HF engine: received in place, or cast on the way."""

from collections.abc import Iterator

import pytest
import torch

from actors.engines.hf.engine import SpareWeights
from streamrl.weights.layout import Layout, manifest_of


def model(seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 5)).to(dtype)


def update(spare: SpareWeights, source: torch.nn.Module) -> bool:
    """Stage the source's parameters, as a receiver would; whether they came in place."""
    named = dict(source.named_parameters())
    layout = Layout(manifest_of(named), 1)
    landing = spare.landing(layout.manifest)

    def received() -> Iterator[tuple[str, torch.Tensor]]:
        for slot in layout.slots:
            tensor = named[slot.spec.name].detach()
            if landing is not None:
                tensor = slot.read(slot.of(landing)).copy_(tensor)
            yield slot.spec.name, tensor

    spare.stage(received())
    return landing is not None


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_each_swap_makes_the_staged_weights_those_of_the_model(sent):
    own = model(0)
    spare = SpareWeights(own)
    inputs = torch.randn(2, 5)
    for seed in range(1, 5):
        source = model(seed, sent)
        before = own(inputs)
        assert update(spare, source) == (sent == torch.float32)
        assert torch.equal(own(inputs), before)
        spare.swap()
        assert torch.equal(own(inputs), model(seed, sent).float()(inputs))
        assert all(p.dtype == torch.float32 for p in own.parameters())


def test_two_copies_take_turns_and_no_third_one_is_made():
    own = model(0)
    spare = SpareWeights(own)
    seen = []
    for seed in range(6):
        update(spare, model(seed))
        spare.swap()
        seen.append(next(own.parameters()).data_ptr())
    assert seen[0::2] == [seen[0]] * 3
    assert seen[1::2] == [seen[1]] * 3
    assert seen[0] != seen[1]


def test_an_update_that_stops_half_way_changes_nothing_and_the_next_one_does():
    own = model(0)
    spare = SpareWeights(own)
    before = [p.detach().clone() for p in own.parameters()]
    manifest = manifest_of(dict(own.named_parameters()))
    landing = spare.landing(manifest)
    assert landing is not None
    landing.fill_(255)
    assert all(torch.equal(p, b) for p, b in zip(own.parameters(), before, strict=True))
    update(spare, model(1))
    spare.swap()
    expected = model(1).parameters()
    assert all(torch.equal(p, e) for p, e in zip(own.parameters(), expected, strict=True))
