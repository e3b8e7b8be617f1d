"""A prompt as vLLM takes it: token ids, and the images in them.

vLLM puts the placeholders of an image in by its own processor, so it is given one for each image,
and its token ids are compared with ours afterwards: a completion to other ids is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from vllm.inputs import TokensPrompt, tokens_input

from actors.engines.model import ModelFacts
from streamrl.config.model import ModelSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.types import Media
from streamrl.vision.patches import PatchReader
from streamrl.vision.pixels import decode
from streamrl.vision.places import Placeholders


@dataclass(frozen=True)
class VllmPrompt:
    """Token ids as the model reads them; those that vLLM is given, if it has images."""

    token_ids: list[int]
    collapsed: list[int] = field(default_factory=list)
    images: tuple[Any, ...] = ()

    def salted(self, cache_salt: str) -> Any:
        """What vLLM's `generate` takes; only prompts of one salt share prefixes."""
        if not self.images:
            return tokens_input(self.token_ids, cache_salt=cache_salt)
        return TokensPrompt(
            prompt_token_ids=self.collapsed,
            multi_modal_data={"image": list(self.images)},
            cache_salt=cache_salt,
        )

    def require_same(self, read: Sequence[int] | None) -> None:
        """
        Raises:
            RolloutError: vLLM's model has read other token ids than those that are recorded.
        """
        if self.images and list(read or ()) != self.token_ids:
            raise RolloutError(
                f"vLLM read {len(read or ())} tokens of a prompt that has {len(self.token_ids)}: "
                "its image processor has other settings than that of model.path"
            )


@dataclass(frozen=True)
class VllmVision:
    """Of a model that sees images."""

    reader: PatchReader
    placeholders: Placeholders

    @classmethod
    def of(cls, model: ModelSettings, facts: ModelFacts) -> "VllmVision | None":
        """
        Raises:
            ConfigError: torchvision, which vLLM's processors need, is not installed.
        """
        if facts.placeholders is None:
            return None
        if find_spec("torchvision") is None:
            raise ConfigError(
                f"generator.engine vllm: {model.path} sees images, for which vLLM needs "
                "torchvision, and it is not installed: use generator.engine hf"
            )
        reader = PatchReader.of(model.path, trust_remote_code=model.trust_remote_code)
        assert reader is not None, "the facts say that it sees images"
        return cls(reader, facts.placeholders)

    def prompt(self, token_ids: list[int], media: Sequence[Media]) -> VllmPrompt:
        """
        Raises:
            RolloutError: a medium is malformed, has no place, or is a video.
        """
        if any(medium.kind == "video" for medium in media):
            raise RolloutError(
                "a prompt has a video, which vLLM would cut into frames of its own: use "
                "generator.engine hf"
            )
        sizes = [self.reader.size(medium) for medium in media]
        images = tuple(decode(medium.parts[0], "a medium") for medium in media)
        return VllmPrompt(token_ids, self.placeholders.collapse(token_ids, sizes), images)
