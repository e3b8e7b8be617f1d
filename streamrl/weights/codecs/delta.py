"""The difference of two versions of the same bytes: their XOR, compressed with zstd.

After an optimizer step of reinforcement learning most weights are the same bits again in bfloat16
(1 to 5 % differ, see slime's and TRL's delta weight sync), and XOR leaves zeros there, which zstd
all but removes. Lossless by construction.
"""

import torch
import zstandard


class DeltaCodec:
    """For byte ranges of at most `max_bytes`; one call at a time.

    Its scratch memory is allocated once: page faults would cost as much as the compression.
    """

    def __init__(self, max_bytes: int) -> None:
        self._scratch = torch.empty(max_bytes, dtype=torch.uint8)
        self._compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)

    def encode(self, base: torch.Tensor, data: torch.Tensor) -> torch.Tensor | None:
        """What turns `base` into `data`, all flat uint8; None if they are equal."""
        difference = self._scratch[: len(base)]
        torch.bitwise_xor(base, data, out=difference)
        if not difference.any():
            return None
        frame = bytearray(self._compressor.compress(difference.numpy().data))
        return torch.frombuffer(frame, dtype=torch.uint8)

    def decode(self, frame: torch.Tensor, base: torch.Tensor, into: torch.Tensor) -> None:
        """Fill `into` with what `frame` makes of `base`; they may be the same memory.

        Raises:
            ValueError: the frame is corrupt, or is not a difference of that many bytes.
        """
        difference = self._scratch[: len(base)]
        rest = difference.numpy().data
        try:
            reader = zstandard.ZstdDecompressor().stream_reader(frame.numpy().data)
            while rest and (count := reader.readinto(rest)):
                rest = rest[count:]
            is_complete = not rest and not reader.read(1)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        if not is_complete:
            raise ValueError(f"not {len(base)} bytes")
        torch.bitwise_xor(base, difference, out=into)
