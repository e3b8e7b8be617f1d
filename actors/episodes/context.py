"""All that the policy reads before a turn: token ids, and the images and videos in them.

Invariant: what was read and sampled stays as it is, token by token, until a new context begins.
Called by: episode.py, one object per turn.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from streamrl.interfaces import CompletionHandle, EnvironmentContext, Observation, Sampler
from streamrl.types import Completion, Media, SamplingParams
from streamrl.vision.parts import has_media


class Context(Struct, frozen=True):
    """What the policy has read, and what it has sampled since."""

    token_ids: tuple[int, ...] = ()
    media: tuple[Media, ...] = ()
    sampled: tuple[int, ...] = ()

    def followed_by(self, sampled: tuple[int, ...]) -> "Context":
        return structs.replace(self, sampled=sampled)

    def after(self, observation: Observation, start: EnvironmentContext) -> "Context":
        """With what the environment shows; the prompt's media belong to the prompt's tokens."""
        renderer, messages, tools = start.renderer, observation.messages, observation.tools
        new, media = tuple(observation.token_ids), observation.media
        if start.media and not media and new == start.prompt_token_ids:
            media = start.media
        if messages:
            media = (*media, *(renderer.media(messages) if has_media(messages) else ()))
        if observation.is_new_context or not self.sampled:
            shown = renderer.encode_messages(messages, tools) if messages else ()
            return Context((*new, *shown), media)
        known = (*self.sampled, *new)
        reply = renderer.encode_reply(messages, known, tools) if messages else ()
        return Context((*self.token_ids, *known, *reply), (*self.media, *media))


async def generate(
    engine: Sampler,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    handle: CompletionHandle | None,
    media: Sequence[Media],
) -> Completion:
    """A completion, of an engine that need not know of media where there are none. Waits for it."""
    if not media:
        return await engine.generate(token_ids, sampling, handle)
    return await engine.generate(token_ids, sampling, handle, media)
