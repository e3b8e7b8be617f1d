"""Which characters of a text are whose token's.

Invariant: the pieces of the tokens, one after the other, are the beginning of the text.
"""

from collections.abc import Callable, Sequence

MAX_TOKENS = 1024
"""Of one message; decoding costs a call or two for each token."""
_INCOMPLETE = "\ufffd"


def piece_lengths(
    token_ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]
) -> tuple[int, ...]:
    """How many characters of `text`, which the tokens decode to, each of the first MAX_TOKENS adds.

    0 for a token that is a part of a character, whose last token has it. Empty if the tokens do not
    add up to the text, as with a tokenizer that cleans up spaces.
    """
    lengths: list[int] = []
    begin = end = position = 0
    before = ""
    for number in range(1, min(len(token_ids), MAX_TOKENS) + 1):
        # From a token before, since some tokenizers drop the space at the beginning of a text.
        window = decode(token_ids[begin:number])
        piece = window[len(before) :]
        if not piece or window.endswith(_INCOMPLETE):
            lengths.append(0)
            continue
        if text[position : position + len(piece)] != piece:
            return ()
        lengths.append(len(piece))
        position += len(piece)
        begin, end = end, number
        before = decode(token_ids[begin:end])
    return tuple(lengths)
