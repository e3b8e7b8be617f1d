'''A user's own prompt stream, named as PATH.py:NAME: called once with the seed and
`data.source_kwargs`, it returns what a prompt index reads.

    # riddles.py
    from streamrl.interfaces import Prompt

    class Riddles:
        def __init__(self, seed, hardest=9):
            self.seed, self.hardest = seed, hardest

        def __getitem__(self, prompt_index):
            """A pure function of the seed and the index: no position is stored."""
            number = (self.seed + prompt_index) % self.hardest
            return Prompt(f"{number}+1=", str(number + 1))
'''

from collections.abc import Mapping
from typing import Any

from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt, PromptSource
from streamrl.user_code import attributed_to, load_user_code


class UserPrompts:
    """The stream of PATH.py:NAME; what it raises and what it returns is checked.

    Args:
        field: the setting that names it; errors begin with it.

    Raises:
        ConfigError: no such file or name, it does not take the arguments, or its first prompt is
            not a `Prompt`.
    """

    def __init__(self, field: str, entry: str, kwargs: Mapping[str, Any], seed: int) -> None:
        self._name = f"{field}: {entry}"
        make = load_user_code(field, entry)
        with attributed_to(self._name):
            self._source: PromptSource = make(seed=seed, **kwargs)
        self[0]

    def __getitem__(self, prompt_index: int) -> Prompt:
        with attributed_to(f"{self._name}: prompt {prompt_index}"):
            prompt = self._source[prompt_index]
        if not isinstance(prompt, Prompt):
            raise ConfigError(
                f"{self._name}: prompt {prompt_index} was {type(prompt).__name__}; it must be a "
                "streamrl.interfaces.Prompt"
            )
        return prompt
