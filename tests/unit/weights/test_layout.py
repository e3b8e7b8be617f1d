"""Both ends cut a model into the same bytes."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.transports.shared_memory import SendBuffers

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=8)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64])


@given(shapes, st.lists(dtypes, min_size=8, max_size=8), st.integers(1, 500))
def test_what_is_written_into_the_bytes_is_read_from_the_buckets(shapes, dtypes, bucket_bytes):
    parameters = {
        f"p{i}": torch.randn(shape).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    layout = Layout(manifest_of(parameters), bucket_bytes)
    buffers = SendBuffers(layout, "cpu")
    buffers.write(parameters, 3)
    with buffers.reading() as held:
        assert held is not None
        version, data = held.policy_version, held.data
        read = {
            name: tensor.clone()
            for bucket in layout.buckets
            for name, tensor in bucket.views(data[bucket.start : bucket.stop])
        }
    assert version == 3
    assert read.keys() == parameters.keys()
    assert all(torch.equal(read[name], parameters[name]) for name in parameters)


def test_a_bucket_is_no_larger_than_asked_unless_one_tensor_is():
    sizes = [10, 10, 300, 10, 40]
    layout = Layout(manifest_of({f"p{n}{i}": torch.zeros(n) for i, n in enumerate(sizes)}), 512)
    assert [[slot.spec.shape[0] for slot in b.slots] for b in layout.buckets] == [
        [10, 10],
        [300],
        [10, 40],
    ]


def test_a_cast_on_send_changes_floating_point_tensors_only():
    parameters = {"weight": torch.randn(4), "steps": torch.arange(4)}
    manifest = manifest_of(parameters, torch.bfloat16)
    assert [spec.dtype for spec in manifest] == ["bfloat16", "int64"]
    buffers = SendBuffers(Layout(manifest, 1024), "cpu")
    buffers.write(parameters, 0)
    with buffers.reading() as held:
        assert held is not None
        views = dict(buffers.layout.buckets[0].views(held.data))
    assert torch.equal(views["weight"], parameters["weight"].bfloat16())


def test_a_reader_keeps_its_version_while_newer_ones_are_written():
    parameters = {"weight": torch.zeros(4)}
    buffers = SendBuffers(Layout(manifest_of(parameters), 1024), "cpu")
    with buffers.reading() as held:
        assert held is None
    buffers.write({"weight": torch.full((4,), 1.0)}, 1)
    with buffers.reading() as held:
        assert held is not None
        for version in (2, 3):
            buffers.write({"weight": torch.full((4,), float(version))}, version)
        assert held.policy_version == 1
        assert held.data[:16].view(torch.float32).tolist() == [1.0] * 4
    with buffers.reading() as held:
        assert held is not None
        assert held.policy_version == 3
        assert held.data[:16].view(torch.float32).tolist() == [3.0] * 4
