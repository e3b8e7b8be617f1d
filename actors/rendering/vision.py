"""The images of a conversation in its token ids: as many placeholder tokens as the model reads.

Invariant: the ids that are recorded are those that the model reads, placeholders included.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AutoConfig

from streamrl.config.model import ModelSettings
from streamrl.types import Media
from streamrl.vision.patches import PatchReader
from streamrl.vision.places import Placeholders


@dataclass(frozen=True)
class PromptVision:
    """What of a model that sees images a renderer knows."""

    reader: PatchReader
    placeholders: Placeholders

    @classmethod
    def of(cls, model: ModelSettings) -> "PromptVision | None":
        """None of a model that sees none.

        Raises:
            ConfigError: there is no model, or it lacks its image processor.
        """
        trust = model.trust_remote_code
        reader = PatchReader.of(model.path, trust_remote_code=trust)
        if reader is None:
            return None
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=trust)
        return cls(reader, Placeholders.of(config))

    def expand(
        self, token_ids: Sequence[int], media: Sequence[Media], place: str
    ) -> tuple[int, ...]:
        """Token ids as the model reads them, from those of a rendered template.

        Raises:
            RolloutError: a medium is malformed, or a text contains a placeholder token.
        """
        sizes = [self.reader.size(medium, place) for medium in media]
        return self.placeholders.expand(token_ids, sizes, place)
