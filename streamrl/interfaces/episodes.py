"""The parts of an episode: its prompt, the environment that answers the policy, its reward.

A user's own prompt source, environment and reward keep these interfaces; `actors.episodes` calls
them. A message is a mapping with a `role` and a `content`, as in chat templates and the OpenAI API,
and whatever else a template knows (`tool_calls`, `reasoning_content`, `name`). A content may be a
list of parts, including images and videos: see `streamrl.vision.parts`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from streamrl.types import Completion, FinishReason, Media

Message = Mapping[str, Any]
ToolSchema = Mapping[str, Any]
"""A tool's name, description and parameters, in the form of an OpenAI function tool."""


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt stream: a string or chat messages, and what its reward may need.

    `origin` is for error messages: where the row is found, such as "row 17 of train.jsonl".
    `environment` is the name of the entry of `environments` that plays it; "" if there is only one.
    """

    content: str | tuple[Message, ...]
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    environment: str = ""
    folder: Path = Path()
    """The folder that paths of its images are relative to."""


class PromptSource(Protocol):
    """The prompt stream: a pure function of the prompt index, so no position need be stored."""

    def __getitem__(self, prompt_index: int) -> Prompt: ...


class Renderer(Protocol):
    """Converts between text or messages and token ids, by the run's tokenizer and chat template."""

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded; otherwise only text can."""
        ...

    @property
    def prefill(self) -> str:
        """The text with which the chat template begins each turn of the policy, from an opened
        <think> on; "" if it opens none."""
        ...

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of the plain text, without a chat template or special tokens."""
        ...

    def encode_messages(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        """Token ids of a conversation up to the place where the policy's next turn begins."""
        ...

    def encode_reply(
        self,
        messages: Sequence[Message],
        completion_token_ids: Sequence[int],
        tools: Sequence[ToolSchema] = (),
    ) -> tuple[int, ...]:
        """Token ids between the end of a completion and the beginning of the next."""
        ...

    def messages(self, prompt: Prompt) -> tuple[Message, ...]:
        """The conversation that the prompt opens, with the run's system prompt."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, without special tokens."""
        ...

    def bytes_of(self, token_id: int) -> bytes | None:
        """The UTF-8 bytes that a token adds to the text, possibly part of a character; None if
        unknown."""
        ...

    def media(self, messages: Sequence[Message]) -> tuple[Media, ...]:
        """The images and videos of a conversation, in order."""
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSchema] | None = ()) -> Message:
        """Parse a completion into the assistant's message, by the convention of its chat template.

        It has a `content` and, if present, `reasoning_content` and `tool_calls`, whose arguments
        are JSON objects. If any call cannot be read there are none: the content is then the whole
        text, and `parse_error` says why.

        Args:
            tools: those that it may call; their schemas give arguments that are written as text
                 their types. None: what has the form of a call is text.
        """
        ...


@dataclass(frozen=True)
class EnvironmentContext:
    """What an episode starts from."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    """The prompt's token ids, as the chat template renders it."""
    renderer: Renderer
    seed: int = 0
    """The same for every sibling of the group, and whenever the group is sampled again."""
    episode_index: int = 0
    """The index of the episode among its siblings, from 0."""
    prompt_messages: tuple[Message, ...] = ()
    """The prompt as messages, including `data.system_prompt`."""
    shared: Any = None
    """What the environment's `open_group` has opened for all siblings of the group."""
    media: tuple[Media, ...] = ()
    """The images and videos in `prompt_token_ids`, in order."""


@dataclass(frozen=True)
class Observation:
    """What the policy reads before its next turn: messages, which the renderer encodes, or plain
    token ids."""

    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    media: tuple[Media, ...] = ()
    """The images and videos in `token_ids`, in order; may be left out for those of the prompt."""
    tools: tuple[ToolSchema, ...] = ()
    """The tools that the chat template describes to the policy; only for the first observation."""
    is_new_context: bool = False
    """Whether it replaces all that the policy has read so far, as a summary or a sub-agent's
    conversation does."""


@dataclass(frozen=True)
class Transition:
    """An environment's answer to a completion: what the policy reads next, or the end."""

    observation: Observation = Observation()
    done: bool = True
    reward: float = 0.0
    """Of this turn."""
    in_loss: bool = True
    """Whether the completion is trained on; the rest of the episode is either way."""
    num_tool_calls: int = 0
    """Those that the completion made."""
    is_valid: bool = True
    """Whether the completion had the form that the environment requires."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the episode so far; a later transition's values replace earlier ones."""


class Environment(Protocol):
    """The environment of one episode; used once. It may also be a `RestorableEnvironment`."""

    async def start(self, context: EnvironmentContext) -> Observation:
        """What the policy reads first; usually `context.prompt_token_ids`."""
        ...

    async def step(self, completion: Completion) -> Transition:
        """The environment's answer to one completion."""
        ...

    async def close(self) -> None:
        """Called once after the last step, also after an error, a limit or a cancellation.

        It must end within ten seconds.
        """
        ...


class RestorableEnvironment(Environment, Protocol):
    """An environment whose episode another generator can continue, if its own is lost between two
    turns."""

    async def snapshot(self) -> Any:
        """The state of the episode, made of None, booleans, numbers, strings, bytes, lists and
        mappings; None if it cannot be continued. Called after each `step` that another turn
        follows."""
        ...

    async def restore(self, context: EnvironmentContext, snapshot: Any) -> None:
        """Called on a new environment instead of `start`: restore the state in which `snapshot` was
        taken; the next call is the following `step`.

        If it raises, the episode begins again.
        """
        ...


@dataclass(frozen=True)
class Episode:
    """One finished episode, as a reward sees it."""

    prompt: Prompt
    response: str
    """The text of the last turn."""
    num_response_tokens: int
    """Tokens that the policy sampled in all turns."""
    finish_reason: FinishReason
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    """The whole conversation, including the prompt."""
    turn_rewards: tuple[float, ...] = ()
    """The environment's rewards, one per turn."""
    response_token_ids: tuple[int, ...] = ()
    """The token ids of `response`."""
    prefill: str = ""
    """The beginning of the last turn that the chat template or the prompt provided, such as an
    opened <think>."""

    @property
    def turn(self) -> str:
        """The whole text of the last turn."""
        return self.prefill + self.response


@dataclass(frozen=True)
class Score:
    """The reward of an episode, with further numbers to record."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    extracted: str | None = None
    """What the reward read in the response, such as its answer; "" if it found none, None if it
    looks for none."""

    @classmethod
    def of(cls, score: "float | Score") -> "Score":
        """The score itself, or a number as a score without metrics."""
        return score if isinstance(score, Score) else cls(score)


class Reward(Protocol):
    """Scores the siblings of one prompt together, so it may compare them."""

    async def score(self, episodes: Sequence[Episode]) -> Sequence[float | Score]:
        """One finite number, or a `Score`, per episode, in order.

        Raises:
            RolloutError: the group cannot be scored; it is dropped and counted.
        """
        ...
