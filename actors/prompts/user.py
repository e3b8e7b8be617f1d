'''A user's own prompts, named as PATH.py:NAME: called once with the arguments of the source, and
with the seed if it takes one, it returns a stream or a data set.

    # riddles.py
    from streamrl.interfaces import Prompt

    class Riddles:
        def __init__(self, seed, hardest=9):
            self.seed, self.hardest = seed, hardest

        def __getitem__(self, prompt_index):
            """A pure function of the seed and the index: no position is stored."""
            number = (self.seed + prompt_index) % self.hardest
            return Prompt(f"{number}+1=", str(number + 1))

What has a `__len__` as well, such as a `torch.utils.data.Dataset` or a `datasets.Dataset`, is a
data set: its rows are read like those of a file. A row is a mapping, or a `Prompt`.
'''

import inspect
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from actors.prompts.rows import RowColumns
from streamrl.data_files import Row, as_json_values
from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt
from streamrl.user_code import attributed_to, load_user_code


class UserPrompts:
    """The stream of PATH.py:NAME; what it raises and what it returns is checked.

    Raises:
        ConfigError: its first prompt is not a `Prompt`.
    """

    def __init__(self, name: str, source: Any) -> None:
        self._name, self._source = name, source
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


class UserDataSet:
    """The data set of PATH.py:NAME, whose rows are checked as they are read.

    Raises:
        ConfigError: it has no rows, or its first row has no prompt or no answer.
    """

    def __init__(self, name: str, source: Any, columns: RowColumns) -> None:
        self._name, self._source, self._columns = name, source, columns
        with attributed_to(name):
            self._size = len(source)
        if not self._size:
            raise ConfigError(f"{name}: holds no rows")
        self[0]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> Prompt:
        place = f"row {number + 1} of {self._name.rpartition(':')[2]}"
        with attributed_to(f"{self._name}: row {number + 1}"):
            row = self._source[number]
        if isinstance(row, Prompt):
            return row
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{self._name}: row {number + 1} was {type(row).__name__}; it must be a mapping or "
                "a streamrl.interfaces.Prompt"
            )
        read = Row(as_json_values(row), place)
        if not number:
            self._columns.check(read, self._name)
        return self._columns.prompt(read)

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, range(len(self)))


def open_user_source(
    field: str, entry: str, kwargs: Mapping[str, Any], seed: int, columns: RowColumns
) -> UserPrompts | UserDataSet:
    """What PATH.py:NAME makes.

    Args:
        field: the setting that names it; errors begin with it.

    Raises:
        ConfigError: no such file or name, it does not take the arguments, or its first prompt
            cannot be used.
    """
    name = f"{field}: {entry}"
    make = load_user_code(field, entry)
    with attributed_to(name):
        arguments = {"seed": seed, **kwargs} if _takes_seed(make) else kwargs
        source = make(**arguments)
    if isinstance(source, Sized):
        return UserDataSet(name, source, columns)
    return UserPrompts(name, source)


def _takes_seed(make: Any) -> bool:
    parameters = inspect.signature(make).parameters.values()
    return any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters)
