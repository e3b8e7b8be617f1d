"""What an episode is made of: its prompt, the environment that answers the policy, its reward.

A user's own prompt source, environment and reward keep these interfaces; `actors.episodes` calls
them. A message is a mapping with a `role` and a `content`, as chat templates and the OpenAI API
have it, and with what else a template knows (`tool_calls`, `reasoning_content`, `name`). A content
may be a list of parts, of which images and videos are some: see `streamrl.vision.parts`.
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

    `origin` is for messages: where the row is found, such as "row 17 of train.jsonl".
    `environment` is the name of the entry of `environments` that plays it; "" where there is one.
    """

    content: str | tuple[Message, ...]
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    environment: str = ""
    folder: Path = Path()
    """Where the paths of its images begin."""


class PromptSource(Protocol):
    """The prompt stream: a pure function of the prompt, so no position need be stored."""

    def __getitem__(self, prompt_index: int) -> Prompt: ...


class Renderer(Protocol):
    """Between text or messages and token ids, as the run's tokenizer and chat template do it."""

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded; else there is text alone."""
        ...

    @property
    def prefill(self) -> str:
        """With what the chat template begins each turn of the policy, from an opened <think> on; ""
        where it opens none."""
        ...

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of the text as it stands, without a chat template or special tokens."""
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
        """Token ids between the end of a completion and the place where the next one begins."""
        ...

    def messages(self, prompt: Prompt) -> tuple[Message, ...]:
        """The conversation that the prompt opens, with the run's system prompt."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion, without special tokens."""
        ...

    def bytes_of(self, token_id: int) -> bytes | None:
        """What a token adds to the text as UTF-8 has it, which may be a part of a character; None
        where that is not known."""
        ...

    def media(self, messages: Sequence[Message]) -> tuple[Media, ...]:
        """The images and videos of a conversation, in order."""
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSchema] = ()) -> Message:
        """The assistant's message that a completion is, by the convention of its chat template.

        It has a `content`, and where they are there `reasoning_content` and `tool_calls`, whose
        arguments are JSON objects. A call that cannot be read leaves none: the content is then the
        whole text, and `parse_error` says why.

        Args:
            tools: those that it may call; their schemas give arguments that are written as text
                 their types.
        """
        ...


@dataclass(frozen=True)
class EnvironmentContext:
    """What an episode starts from."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    """The prompt as the chat template renders it."""
    renderer: Renderer
    seed: int = 0
    """The same one for every sibling of the group, and whenever the group is sampled again."""
    episode_index: int = 0
    """The place of the episode among its siblings, from 0."""
    prompt_messages: tuple[Message, ...] = ()
    """The prompt as messages, with `data.system_prompt`."""
    shared: Any = None
    """What the environment's `open_group` has opened for all siblings of the group."""
    media: tuple[Media, ...] = ()
    """The images and videos in `prompt_token_ids`, in order."""


@dataclass(frozen=True)
class Observation:
    """What the policy reads before its next turn: messages, which the renderer encodes, or token
    ids as they stand."""

    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    media: tuple[Media, ...] = ()
    """The images and videos in `token_ids`, in order; need not be given for those of the prompt."""
    tools: tuple[ToolSchema, ...] = ()
    """What the chat template describes to the policy; only of the first observation."""
    is_new_context: bool = False
    """Whether it takes the place of all that the policy has read so far, instead of following it:
    a summary, or the conversation of a sub-agent."""


@dataclass(frozen=True)
class Transition:
    """What an environment answers to a completion: what the policy reads next, or the end."""

    observation: Observation = Observation()
    done: bool = True
    reward: float = 0.0
    """Of this turn."""
    in_loss: bool = True
    """Whether the completion is trained on; what it led to is, either way."""
    num_tool_calls: int = 0
    """Those that the completion made."""
    is_valid: bool = True
    """Whether the completion had the form that the environment asks for."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the episode so far; a later transition's values replace an earlier one's."""


class Environment(Protocol):
    """One episode; used once. It may be a `RestorableEnvironment`, too."""

    async def start(self, context: EnvironmentContext) -> Observation:
        """What the policy reads first; usually `context.prompt_token_ids`."""
        ...

    async def step(self, completion: Completion) -> Transition:
        """The world's answer to one completion."""
        ...

    async def close(self) -> None:
        """Called once after the last step, also after an error, a limit or a cancellation.

        It has ten seconds.
        """
        ...


class RestorableEnvironment(Environment, Protocol):
    """One whose episode another generator can go on with, if its own is gone between two turns."""

    async def snapshot(self) -> Any:
        """Where the episode stands, of None, booleans, numbers, strings, bytes, lists and mappings;
        None: it cannot be gone on with. Called after each `step` that another turn follows."""
        ...

    async def restore(self, context: EnvironmentContext, snapshot: Any) -> None:
        """Called in the place of `start`, of a new environment: it stands where `snapshot` was
        taken, and the next call is the `step` after it.

        If it raises, the episode begins anew.
        """
        ...


@dataclass(frozen=True)
class Episode:
    """One finished run of an environment, as a reward sees it."""

    prompt: Prompt
    response: str
    """The text of the last turn."""
    num_response_tokens: int
    """Tokens that the policy sampled, of all turns."""
    finish_reason: FinishReason
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    """The whole conversation, the prompt included."""
    turn_rewards: tuple[float, ...] = ()
    """Those of the environment, one for each turn."""
    response_token_ids: tuple[int, ...] = ()
    """The ids of `response`."""
    prefill: str = ""
    """What stood of the last turn before the response: what the chat template or the prompt has
    begun, such as an opened <think>."""

    @property
    def turn(self) -> str:
        """The whole text of the last turn."""
        return self.prefill + self.response


@dataclass(frozen=True)
class Score:
    """The reward of an episode, with numbers that are recorded beside it."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    extracted: str | None = None
    """What the reward has read in the response, such as its answer: "" where it found none, None
    where it looks for none."""

    @classmethod
    def of(cls, score: "float | Score") -> "Score":
        """The score itself, or the number as one without metrics."""
        return score if isinstance(score, Score) else cls(score)


class Reward(Protocol):
    """Scores the siblings of one prompt together, so that it may compare them."""

    async def score(self, episodes: Sequence[Episode]) -> Sequence[float | Score]:
        """One finite number, or a score with one, per episode, in order.

        Raises:
            RolloutError: the group cannot be scored; it is dropped and counted.
        """
        ...
