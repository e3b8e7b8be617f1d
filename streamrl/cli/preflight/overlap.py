"""Held-out prompts that are trained, too: their scores tell nothing about new ones.

Counted for what users bring. Sources that make up their prompts keep theirs apart themselves.
"""

from collections.abc import Iterator, Sized

from actors.prompts import open_prompts
from actors.prompts.rows import PromptRows
from actors.prompts.tasks import TASKS
from streamrl.cli.preflight.findings import Finding, problem, warning
from streamrl.config.data import DataSettings
from streamrl.config.data.source import SourceSettings
from streamrl.data_files import has_rows, shown
from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt
from streamrl.user_code import is_user_code

_LARGEST_SCAN = 2000
"""Prompts of a user's own code, which may take any time."""


def check_overlap(data: DataSettings, held_out: PromptRows) -> Iterator[Finding]:
    """A warning if prompts of `data.source` are held out, whatever their answers are."""
    own = [source for source in data.sources if _is_own(source.path)]
    by_content = {_key(prompt): prompt for prompt in held_out if prompt.content} if own else {}
    trained: dict[str, Prompt] = {}
    try:
        for prompt in (prompt for source in own for prompt in _prompts(data, source)):
            if (key := _key(prompt)) in by_content:
                trained.setdefault(key, prompt)
    except ConfigError as error:
        yield problem(str(error))
        return
    if not trained:
        return
    count = sum(_key(prompt) in trained for prompt in held_out)
    key, example = next(iter(trained.items()))
    places = " and ".join(p.origin for p in (example, by_content[key]) if p.origin)
    yield warning(
        f"data.eval_source: {count} of the {len(held_out)} held-out prompts are also in "
        f"data.source, such as {shown(example.content)}{f' ({places})' if places else ''}: their "
        "scores tell nothing about new prompts"
    )


def _is_own(path: str) -> bool:
    return path not in TASKS and (has_rows(path) or is_user_code(path))


def _prompts(data: DataSettings, source: SourceSettings) -> Iterator[Prompt]:
    """Each once, in the source's own order."""
    changes = {"source": (source,), "source_kwargs": {}, "shuffle": False, "curriculum": None}
    prompts = open_prompts(data.model_copy(update=changes), seed=0)
    size = len(prompts) if isinstance(prompts, Sized) else _LARGEST_SCAN
    numbers = range(min(size, _LARGEST_SCAN) if is_user_code(source.path) else size)
    return map(prompts.__getitem__, numbers)


def _key(prompt: Prompt) -> str:
    return prompt.content if isinstance(prompt.content, str) else repr(prompt.content)
