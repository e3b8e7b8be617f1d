"""An engine that answers by script and remembers what it read, and a renderer one can read."""

import asyncio
from collections.abc import Sequence

import httpx2
import numpy as np

from streamrl.interfaces import CompletionHandle, Message, Prompt, ToolSchema
from streamrl.types import Completion, FinishReason, SamplingParams

END = ord(";")
SAMPLING = SamplingParams(max_new_tokens=8)


def client() -> httpx2.AsyncClient:
    """One that waits for an answer as long as a slow machine takes for it."""
    return httpx2.AsyncClient(timeout=120)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def text(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


class ScriptedEngine:
    """Answers the scripted texts in order; waits before each while `open` is not set."""

    policy_version = 3

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, str]] = []
        self.samplings: list[SamplingParams] = []
        self.open = asyncio.Event()
        self.open.set()
        self.num_running = 0
        self.failure: Exception | None = None
        """What it ends with once it has no more answers."""

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> Completion:
        self.num_running += 1
        try:
            await self.open.wait()
            if self.failure and not self.answers:
                raise self.failure
            answer = self.answers.pop(0)
        finally:
            self.num_running -= 1
        self.calls.append((text(prompt), answer))
        self.samplings.append(sampling)
        return Completion(
            token_ids=np.array(ids(answer), np.int32),
            logprobs=np.arange(len(answer), dtype=np.float32) - 9,
            policy_versions=np.full(len(answer), self.policy_version, np.int32),
            finish_reason=FinishReason.STOP if answer.endswith(";") else FinishReason.LENGTH,
        )


class PlainRenderer:
    """A message is "role:content;", and the policy's own begins with ">". Its answer is parsed as
    "thoughts|name(argument)" or as text; like many templates, it renders no thoughts."""

    prefill = ""

    def encode_messages(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[int, ...]:
        names = "".join(f"<{tool['function']['name']}>" for tool in tools)
        return ids(names + "".join(map(self._rendered, messages)) + ">")

    def encode_reply(
        self,
        messages: Sequence[Message],
        completion_token_ids: Sequence[int],
        tools: Sequence[ToolSchema] = (),
    ) -> tuple[int, ...]:
        end = () if completion_token_ids[-1] == END else (END,)
        return (*end, *self.encode_messages(messages))

    def messages(self, prompt: Prompt) -> tuple[Message, ...]:
        system = {"role": "system", "content": "be kind"}
        return (system, {"role": "user", "content": str(prompt.content)})

    def _rendered(self, message: Message) -> str:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        written = "".join(f"{call['name']}({call['arguments'].get('x', '')})" for call in calls)
        return f"{message['role'][0]}:{message.get('content') or ''}{written};"

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSchema] | None = ()) -> Message:
        thoughts, _, said = text(token_ids).rstrip(";").rpartition("|")
        thinking = {"reasoning_content": thoughts} if thoughts else {}
        if tools is None or "(" not in said:
            return {"role": "assistant", "content": said, **thinking}
        name, _, argument = said.partition("(")
        value = argument.rstrip(")")
        function = {"name": name, "arguments": {"x": None if value == "null" else value}}
        call = {"type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call], **thinking}

    def decode(self, token_ids: Sequence[int]) -> str:
        return text(token_ids).rstrip(";")

    def bytes_of(self, token_id: int) -> bytes | None:
        return self.decode([token_id]).encode()

    def encode_text(self, text: str) -> tuple[int, ...]:
        return ids(text)
