"""The images of a conversation in its token ids: as many placeholder tokens as the model reads.

Invariant: the ids that are recorded are those that the model reads, placeholders included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoConfig

from streamrl.config.model import ModelSettings
from streamrl.interfaces import Prompt
from streamrl.types import Media
from streamrl.vision.parts import has_media, loaded
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
        folder = Path(model.path)
        if folder.is_dir() and not (folder / "config.json").is_file():
            # A tokenizer alone renders text.
            return None
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


def sees_media(prompt: Prompt) -> bool:
    """Whether its messages hold images or videos."""
    return not isinstance(prompt.content, str) and has_media(prompt.content)


def load_media(prompt: Prompt) -> Prompt:
    """The prompt with its media read.

    Raises:
        RolloutError: a file cannot be read, or holds no image within the limits.
    """
    if isinstance(prompt.content, str):
        return prompt
    place = prompt.origin or "a prompt"
    return replace(prompt, content=loaded(prompt.content, place, prompt.folder))
