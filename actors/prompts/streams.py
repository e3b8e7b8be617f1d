"""What is put around a stream of prompts."""

from collections.abc import Iterator
from dataclasses import replace

from streamrl.interfaces import Prompt, PromptSource


class NamedPrompts:
    """A stream whose rows say which source they are of."""

    def __init__(self, prompts: PromptSource, key: str, name: str) -> None:
        self._prompts, self._named = prompts, {key: name}

    def __getitem__(self, prompt_index: int) -> Prompt:
        prompt = self._prompts[prompt_index]
        return replace(prompt, row={**prompt.row, **self._named})


class FirstPrompts:
    """The first prompts of a stream, as a set."""

    def __init__(self, prompts: PromptSource, count: int) -> None:
        self._prompts, self._count = prompts, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Prompt:
        return self._prompts[number]

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, range(len(self)))
