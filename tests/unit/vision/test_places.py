"""Where media stand among token ids, also where a policy sampled placeholder tokens."""

import pytest
from hypothesis import given, strategies as st

from streamrl.errors import RolloutError
from streamrl.vision.places import MediaPlace, Placeholders, Size

P, Q = 8, 9
TOKENS = Placeholders(image=P, video=Q)


def test_each_placeholder_becomes_as_many_tokens_as_its_medium_has():
    sizes = [Size("image", 3), Size("video", 2)]
    ids = TOKENS.expand([1, P, 2, Q], sizes, "a row")
    assert ids == (1, P, P, P, 2, Q, Q)
    assert TOKENS.find(ids, sizes) == (MediaPlace("image", 1, 4), MediaPlace("video", 5, 7))
    assert TOKENS.collapse(ids, sizes) == [1, P, 2, Q]


@pytest.mark.parametrize("ids", [(1, P, P), (1,), (Q,)])
def test_a_text_that_holds_placeholders_is_refused(ids):
    with pytest.raises(RolloutError, match=r"^a row: the chat template wrote . placeholders for 1"):
        TOKENS.expand(ids, [Size("image", 2)], "a row")


def test_placeholders_that_a_policy_sampled_are_text():
    sizes = [Size("image", 2), Size("image", 3)]
    ids = (P, P, 1, P, 2, Q, Q, P, P, P, 3, P)
    assert TOKENS.find(ids, sizes) == (MediaPlace("image", 0, 2), MediaPlace("image", 7, 10))


def test_media_without_a_place_are_refused():
    with pytest.raises(RolloutError, match="no place for 3 tokens of an image"):
        TOKENS.find((1, P, P, 2), [Size("image", 3)])


SIZES = st.lists(st.builds(Size, st.sampled_from(["image", "video"]), st.integers(1, 5)))


@given(SIZES, st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_every_medium_between_text_is_found_again(sizes, text):
    rendered = list(text)
    for size in sizes:
        rendered += [P if size.kind == "image" else Q, *text]
    ids = TOKENS.expand(rendered, sizes, "a row")
    found = [Size(place.kind, place.stop - place.start) for place in TOKENS.find(ids, sizes)]
    assert found == sizes
    assert TOKENS.collapse(ids, sizes) == rendered
