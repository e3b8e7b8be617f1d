"""The reward `judge`: a language model behind the OpenAI API reads the response and scores it.

Invariant: a missing score, or one outside the scale, is no reward: the judge is asked again, and
after the last retry the group fails.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct
from pydantic import AfterValidator, Field

from actors.rewards.answers import answer_part
from actors.rewards.forms import conversation, gold_of
from actors.rewards.remote.http import Service, ServiceSettings
from streamrl.config.section import Positive
from streamrl.errors import ConfigError, RolloutError, read_text
from streamrl.interfaces import Episode

PROMPT = """Judge how well the response answers the prompt.

Prompt:
{prompt}

Reference answer:
{answer}

Response:
{response}

Explain your judgment in a few sentences. End with a line "Score: N", N from 0 (useless) to 10."""


class JudgeMessage(Struct, frozen=True):
    content: str | None = None


class JudgeChoice(Struct, frozen=True):
    message: JudgeMessage


class ChatAnswer(Struct, frozen=True):
    """What `chat/completions` answers."""

    choices: list[JudgeChoice]


# What may follow a score, also a bold one.
_OUT_OF = re.compile(r"[*}\])]{0,4}\s?(?:[(]?(?:/|out of)\s?(\d+(?:\.\d+)?)|\\?%)")


def _pattern(text: str) -> str:
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise ValueError(f"was {text!r}, which is no regular expression: {error}") from error
    if compiled.groups != 1:
        raise ValueError(f"was {text!r}; it needs one group, which is the score")
    return text


class Judge:
    """Asks the judge once for each episode."""

    class Settings(ServiceSettings):
        """Arguments of `judge`; `url` is that of the API, such as http://host:8000/v1."""

        model: str
        """The model, as the service names it."""
        prompt: Annotated[str, Field(min_length=1)] = PROMPT
        """What the judge reads, or a file of it that ends in .txt or .md. `{prompt}`, `{response}`,
        `{answer}`, `{conversation}` and column names in braces are replaced."""
        system: str = ""
        """System message; empty for none."""
        score_pattern: Annotated[str, AfterValidator(_pattern)] = (
            r"(?i)\b(?:score|rating)\b(?:\W{0,4}[(\[]\s*\d+\s*(?:\W|to|out of)\s*\d+\s*[)\]])?"
            r"(?:\s+is\b)?\W{0,9}?(?:\\boxed\{)?"
            r"(-?(?:\d+(?:\.\d+)?|(?<![.\d])\.\d+)(?:e[-+]?\d+)?)(?![\d.,]*\d| ?(?:-|to) ?\d|e-?\d)"
        )
        """Regular expression with one group, the number. The last match at the beginning of a line
        counts, else the last match. The default reads "Score: 7", "Score (0-10): 7", "Rating:
        [[7]]" and JSON such as {"score": 7}. A score "out of" a number other than the upper end of
        the scale does not count."""
        scale: tuple[float, float] = (0.0, 10.0)
        """The scores that become the rewards 0 and 1."""
        temperature: Annotated[float, Field(ge=0)] | None = 0.0
        """Sampling temperature of the judge; null leaves it to the service, as reasoning models
        require."""
        max_tokens: Positive | None = 1024
        """Limit of the judge's answer; null leaves it to the service."""
        extra_body: dict[str, Any] = Field(default_factory=dict)
        """Further fields of the request."""

    def __init__(self, settings: Settings) -> None:
        low, high = settings.scale
        if low >= high:
            raise ConfigError(f"scale: was {list(settings.scale)}; the first is the lower one")
        self._settings = settings
        self._service = Service(settings)
        self._prompt = settings.prompt
        if "\n" not in settings.prompt and settings.prompt.endswith((".txt", ".md")):
            self._prompt = read_text(Path(settings.prompt), "prompt")

    async def score(self, episode: Episode) -> float:
        """Score an episode. Waits for the judge. Raises RolloutError if it does not answer or gives
        no score."""
        settings = self._settings
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        question = {"role": "user", "content": filled(self._prompt, episode)}
        limits = {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
        request = {
            "model": settings.model,
            "messages": [*system, question],
            **{name: value for name, value in limits.items() if value is not None},
            **settings.extra_body,
        }
        answer = await self._service.post("/chat/completions", request, ChatAnswer)
        said = "".join(choice.message.content or "" for choice in answer.choices[:1])
        return self._reward(answer_part(said))

    def _reward(self, text: str) -> float:
        low, high = self._settings.scale
        matches = list(re.finditer(self._settings.score_pattern, text))
        # Marks such as those of emphasis may precede it on the line.
        begins = [m for m in matches if not re.search(r"\w", text[: m.start()].rpartition("\n")[2])]
        found = (begins or matches)[-1:]
        try:
            score = float(found[0][1]) if found else None
        except ValueError:
            score = None
        out_of = _OUT_OF.match(text, found[0].end(1)) if found else None
        if out_of and float(out_of[1] or 100) != high:
            score = None
        if score is None or not low <= score <= high:
            ending = " ".join(text.split())[-80:]
            raise RolloutError(f"gave no score from {low:g} to {high:g}; it ended with {ending!r}")
        return (score - low) / (high - low)


def filled(template: str, episode: Episode) -> str:
    """The template with the names in braces replaced by their values; other braces stay."""
    values: Mapping[str, Any] = {
        **episode.prompt.row,
        "prompt": _text(episode.prompt.content),
        "response": episode.response,
        "answer": gold_of(episode.prompt),
        "conversation": _text(conversation(episode)),
    }
    return re.sub(r"\{(\w+)\}", lambda m: str(values.get(m[1], m[0])), template)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(f"{message['role']}: {message.get('content')}" for message in content)
