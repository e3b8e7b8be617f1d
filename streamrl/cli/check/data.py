"""Checks that prompts, reward, environment, tools and algorithm can be loaded, with the daemons'
own look-ups, and how well programs that a model writes are isolated.

Runs the user's files, as the generators do; those of `algorithm` are only read, since they import
torch.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec.structs import replace

from actors.environments import make_environment, require_rendering
from actors.prompts import open_held_out, open_prompts, shares
from actors.prompts.rows import PromptRows, for_teachers, text_of
from actors.prompts.tasks import TASKS, check_scorer
from actors.rendering.messages import template_errors
from actors.rewards import check_row, make_reward
from actors.sandbox.isolation import IsolationChoice
from actors.sandbox.sandbox import choose, why_not
from actors.tools import name_of
from actors.tools.toolset import TOOLS, make_sources
from streamrl.config import RunConfig
from streamrl.config.data import DataSettings, RewardSettings, SourceSettings
from streamrl.config.environments import EnvironmentEntry
from streamrl.config.model import NOTHING_TO_TEACH
from streamrl.data_files import has_rows, shown
from streamrl.errors import ConfigError, RolloutError, StreamRLError, did_you_mean, read_text
from streamrl.extras import not_installed, require
from streamrl.findings import DATA, Finding
from streamrl.interfaces import Prompt, PromptSource, ToolSchema
from streamrl.model_folder import local_folder
from streamrl.user_code import attributed_to, find_user_code, is_finite_number, is_user_code
from streamrl.vision.parts import has_media

if TYPE_CHECKING:
    from actors.rendering.renderer import ChatRenderer

    LoadRenderer: TypeAlias = Callable[[], ChatRenderer | None]

_SCANNED, _SCORED = 256, 16
_LARGEST_SCAN = 2000
"""The largest number of prompts to read from user code, which may take any time for each."""


def check_overlap(data: DataSettings, held_out: PromptRows) -> Iterator[Finding]:
    """Warn if prompts of `data.source` are also held out, whatever their answers. Sources that
    generate prompts keep the two apart themselves."""
    own = [
        source
        for source in data.sources
        if source.path not in TASKS and (has_rows(source.path) or is_user_code(source.path))
    ]
    by_content = {_key(prompt): prompt for prompt in held_out if prompt.content} if own else {}
    trained: dict[str, Prompt] = {}
    for prompt in (prompt for source in own for prompt in _prompts(data, source)):
        if (key := _key(prompt)) in by_content:
            trained.setdefault(key, prompt)
    if not trained:
        return
    count = sum(_key(prompt) in trained for prompt in held_out)
    key, example = next(iter(trained.items()))
    places = " and ".join(p.origin for p in (example, by_content[key]) if p.origin)
    yield DATA.warning(
        f"data.eval_source: {count} of the {len(held_out)} held-out prompts are also in "
        f"data.source, such as {_shown(example)}{f' ({places})' if places else ''}: their "
        "scores tell nothing about new prompts; leave them out of one of the two"
    )


def _prompts(data: DataSettings, source: SourceSettings) -> Iterator[Prompt]:
    """Each prompt of the source once, in the source's own order."""
    changes = {"source": (source,), "source_kwargs": {}, "shuffle": False, "curriculum": None}
    # The rows have been checked before.
    prompts = open_prompts(data.model_copy(update=changes), seed=0, are_checked=True)
    known = _size(prompts)
    size = _LARGEST_SCAN if known is None else known
    numbers = range(min(size, _LARGEST_SCAN) if is_user_code(source.path) else size)
    return map(prompts.__getitem__, numbers)


def _key(prompt: Prompt) -> str:
    """A key that is equal for prompts that differ only in case or white space."""
    text = prompt.content if isinstance(prompt.content, str) else repr(prompt.content)
    return " ".join(text.casefold().split())


def check_data(config: RunConfig) -> Iterator[Finding]:
    """Check prompts and tools with one shared renderer, as in a generator."""
    renderer = cache(partial(_renderer, config))
    yield from check_prompts(config, renderer)
    yield from DATA.up_to_refusal(check_tools(config, renderer))


def check_tools(config: RunConfig, load: "LoadRenderer") -> Iterator[Finding]:
    """Check the tools without starting a server. Loads the tokenizer, if available, for
    environments other than single_turn."""
    generator = config.generator
    given = [name for name in ("tools", "mcp_servers") if getattr(generator, name)]
    is_used = any(entry.environment == TOOLS for entry in config.entries)
    if is_used and not given:
        yield DATA.problem(
            "generator.tools: environment tools has none, and no generator.mcp_servers"
        )
    if given and not is_used:
        yield DATA.problem(
            f"generator.{given[0]}: nothing reads them; generator.environment: tools does"
        )
    schemas = [schema for source in make_sources(generator) for schema in source.schemas]
    environments = {entry.environment for entry in config.entries}
    by_messages = environments & {TOOLS, "agent"}
    if by_messages and _lacks_template(config):
        yield DATA.problem(
            f"data.chat_template: was {config.data.chat_template}, and environment "
            f"{min(by_messages)} talks by messages, for which the tokenizer has no chat template; "
            "name a Jinja file"
        )
        return
    renderer = load() if environments - {"single_turn"} else None
    if renderer is None:
        return
    require_rendering(config.entries, renderer)
    if not renderer.has_chat_template or not schemas:
        return
    for entry in config.entries:
        if entry.environment == TOOLS:
            own = config.model_copy(update={"data": entry.data})
            chosen = {*(entry.kwargs.get("tools") or map(name_of, schemas))}
            offered = [schema for schema in schemas if name_of(schema) in chosen]
            yield from _placed(entry, _check_room(own, offered, renderer))


def _renderer(config: RunConfig) -> "ChatRenderer | None":
    """Return the generators' renderer, which imports transformers; None if no tokenizer is
    available."""
    folder = local_folder("model.tokenizer", config.model.tokenizer_path)
    if folder is None or not folder.has_tokenizer:
        return None
    from actors.rendering.renderer import ChatRenderer

    try:
        return ChatRenderer.from_config(config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {folder.path} cannot be read: {error}") from error


def _check_room(
    config: RunConfig, schemas: Sequence[ToolSchema], renderer: "ChatRenderer"
) -> Iterator[Finding]:
    """Check that the longest of the first prompts leaves room for an answer once the chat template
    has added the tools to it."""
    try:
        prompts = open_prompts(config.data, config.run.seed, are_checked=True)
        first = [prompts[i] for i in range(min(_size(prompts) or _SCANNED, _SCANNED))]
        longest = max(first, key=lambda prompt: sum(map(len, _texts(prompt))))
        messages = renderer.messages(longest)
        whole, alone = (len(renderer.encode_messages(messages, t)) for t in (schemas, ()))
    except StreamRLError:
        # Either the prompts are wrong, which their own check reports, or they have images, which
        # only a generator reads.
        return
    wanted, room = config.generator.max_new_tokens, config.max_model_len - whole
    if room < wanted:
        yield (DATA.problem if room <= 0 else DATA.warning)(
            f"generator.tools: their schemas take {whole - alone} tokens, so that "
            f"{_shown(longest)} has {whole}; generator.max_model_len {config.max_model_len} leaves "
            f"{max(0, room)} for an answer, and generator.max_new_tokens was {wanted}: raise "
            "generator.max_model_len"
        )


_GYM = "reasoning_gym:"


def check_user_code(config: RunConfig) -> Iterator[Finding]:
    for entry in config.entries:
        yield from _placed(entry, DATA.refusal(make_reward, entry.data))
        yield from DATA.refusal(make_environment, entry)
        rewards = " + ".join(reward.reward for reward in entry.data.all_rewards)
        looked_at = f"data.reward: {rewards}; {entry.setting}: {entry.environment}"
        yield from _placed(entry, iter([DATA.ok(looked_at)]))
    for field, name in (
        ("algorithm.loss", config.algorithm.loss),
        ("algorithm.advantage", config.algorithm.advantage),
    ):
        if is_user_code(name):
            yield from DATA.refusal(find_user_code, field, name)


def check_prompts(config: RunConfig, load: "LoadRenderer") -> Iterator[Finding]:
    """Check the training prompts, the held-out ones if they are scored, and the template."""
    template = config.data.chat_template
    if isinstance(template, Path):
        yield from DATA.refusal(read_text, template, "data.chat_template")
    with suppress(ConfigError):  # Another check refuses the tokenizer's folder.
        yield from _unopened_answer(_template(config))
    for entry in config.entries:
        own = config.model_copy(update={"data": entry.data})
        source = entry.data.source
        if isinstance(source, str) and source.startswith(_GYM):
            yield from _placed(entry, _check_gym(entry.data, source.removeprefix(_GYM)))
            continue
        yield from _placed(entry, DATA.up_to_refusal(_check_training(own, load)))
        if own.is_evaluated or own.is_validated:
            yield from _placed(entry, DATA.up_to_refusal(_check_held_out(own)))
    if config.environments:
        yield from DATA.refusal(shares, config)


def _placed(entry: EnvironmentEntry, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Put the entry's place before each finding about its `data`, if the run has several
    entries."""
    for finding in findings:
        sentence = f"{entry.place}{finding.sentence}"
        sentence = re.sub(r"^(environments\.\d+)\.data\.(reward)", r"\1.\2", sentence)
        yield replace(finding, sentence=sentence)


def _check_training(config: RunConfig, load: "LoadRenderer") -> Iterator[Finding]:
    prompts = open_prompts(config.data, config.run.seed)
    first, sources = prompts[0], _listed(config.data.sources)
    yield from _check_first(config, first)
    yield from _check_gold(config.data, "data.source", prompts)
    yield from _check_recipe(config, prompts)
    yield from DATA.up_to_refusal(_check_lengths(config, prompts, load))
    if (size := _size(prompts)) is None:
        yield DATA.ok(f"data.source: {sources}, such as {_shown(first)}")
        return
    if (num_prompts := config.learner.groups_per_step) > size:
        yield DATA.warning(
            f"learner.groups_per_step: {num_prompts} is more than the {size} prompts of "
            f"{sources}: a step trains the same prompt {num_prompts / size:.3g} times"
        )
    yield DATA.ok(f"data.source: {sources}: {size} prompts, such as {_shown(first)}")


def _listed(sources: tuple[SourceSettings, ...]) -> str:
    return ", ".join(source.path for source in sources)


def _check_held_out(config: RunConfig) -> Iterator[Finding]:
    try:
        held_out = open_held_out(config.data)
    except ConfigError as error:
        off = "validation.every: 0" if config.is_validated else "run.evaluate: false"
        hint = f"; or set {off}" if config.data.eval_source is None else ""
        yield DATA.problem(f"{error}{hint}")
        return
    num_sources = len(config.data.eval_sources or config.data.sources)
    size, wanted = len(held_out), config.data.num_eval_prompts * num_sources
    if wanted > size:
        yield DATA.ok(
            f"data.num_eval_prompts: {_listed(config.data.eval_sources)} has {size}, not {wanted}"
        )
    setting = "data.eval_source" if config.data.eval_sources else "data.source"
    yield from _check_gold(config.data, setting, held_out)
    yield from check_overlap(config.data, held_out)


def _check_first(config: RunConfig, prompt: Prompt) -> Iterator[Finding]:
    """Check the first prompt, since all prompts of a source have the same form."""
    data = config.data
    rewards = {reward.reward for reward in data.all_rewards if not reward.data_source}
    if "task" in rewards and "dataset" not in prompt.row:
        yield DATA.problem(
            "data.reward: task is the scorer of reasoning_gym, and data.source "
            f"{_listed(config.data.sources)} has none; use exact_match, numeric_answer, regex or "
            "PATH.py:FUNCTION"
        )
    weighs, difficulty = config.algorithm.sample_weight.difficulty, prompt.row.get("difficulty")
    if weighs and not is_finite_number(difficulty):
        yield DATA.problem(
            f"algorithm.sample_weight.difficulty: {_shown(prompt)} has no number in a column "
            "difficulty, and every prompt would weigh the same"
        )
    yield from _check_taught(config, prompt)
    if isinstance(prompt.content, str):
        return
    if has_media(prompt.content):
        has_images = f"data.source: {_listed(data.sources)} has images, which"
        yield from DATA.refusal(require, has_images, "PIL")
        folder = None if config.model.missing else local_folder("model.path", config.model.path)
        if folder is not None and not folder.sees_images:
            yield DATA.problem(f"{has_images} the model at model.path {folder.path} does not see")
    if _lacks_template(config):
        yield DATA.problem(
            f"data.chat_template: was {data.chat_template}, and prompts are lists of messages, for "
            "which the tokenizer has no chat template; name a Jinja file"
        )


def _check_taught(config: RunConfig, prompt: Prompt) -> Iterator[Finding]:
    """Check that the prompt has a teacher, and that the teachers' template can be rendered for
    it."""
    settings = config.algorithm.distillation
    if settings is None:
        return
    known = [teacher.name for teacher in settings.teachers]
    if settings.column is not None and (name := prompt.row.get(settings.column)) not in known:
        yield DATA.problem(
            f"algorithm.distillation.column: {settings.column} of {_shown(prompt)} names teacher "
            f"{name!r}; {did_you_mean(str(name), known)}"
        )
    if settings.template is None:
        return
    try:
        for_teachers(settings.template, prompt)
    except RolloutError as error:
        yield DATA.problem(f"{error}, for {_shown(prompt)}")


def _lacks_template(config: RunConfig) -> bool:
    """Whether it is known that messages cannot be rendered."""
    recipe, template = config.model.missing, config.data.chat_template
    if template != "native":
        return template == "none"
    if recipe is not None:
        return not is_user_code(recipe.architecture)
    folder = local_folder("model.tokenizer", config.model.tokenizer_path)
    return folder is not None and folder.has_tokenizer and not folder.chat_template


def _check_gold(data: DataSettings, setting: str, prompts: PromptSource) -> Iterator[Finding]:
    """Check that the rewards can score each of the first rows."""
    known = _size(prompts)
    first = [prompts[i] for i in range(min(known or _SCORED, _LARGEST_SCAN))]
    yield from _check_covered(data, setting, first)
    rows = first[:_SCORED]
    for i, reward in enumerate(data.all_rewards):
        field = f"data.rewards.{i}" if data.rewards else "data.reward"
        kwargs_field = f"{field}.kwargs" if data.rewards else "data.reward_kwargs"
        own = [
            row
            for row in rows
            if not reward.data_source or _source(row, data) in reward.data_source
        ]
        refused = list(_refused(reward, own, kwargs_field))
        if not refused:
            continue
        of_all = f"{len(refused)} of the first {len(own)} rows" if len(own) > 1 else "the first row"
        sentence = f"{field}: {reward.reward} cannot score {of_all} of {setting}; {refused[0]}"
        if data.source == "environment":
            sentence += "; the reward environment is what the environment itself gives"
        yield (DATA.problem if len(refused) == len(own) else DATA.warning)(sentence)


def _check_covered(data: DataSettings, setting: str, rows: Sequence[Prompt]) -> Iterator[Finding]:
    """Check that a reward applies to each of these rows; the groups of a row without one fail."""
    if not all(reward.data_source for reward in data.all_rewards):
        return
    known = {name for reward in data.all_rewards for name in reward.data_source}
    missed = [row for row in rows if _source(row, data) not in known]
    if missed:
        place, source = missed[0].origin or _shown(missed[0]), _source(missed[0], data)
        yield (DATA.problem if len(missed) == len(rows) else DATA.warning)(
            f"data.rewards: none scores {len(missed)} of the first {len(rows)} rows of {setting}, "
            f"such as {place}, whose {data.data_source_key} is {source!r}; "
            f"{did_you_mean(source, known)}"
        )


def _refused(reward: RewardSettings, rows: Sequence[Prompt], kwargs_field: str) -> Iterator[str]:
    for row in rows:
        try:
            check_row(reward, row, kwargs_field)
        except RolloutError as error:
            yield str(error)
        except ConfigError:
            # The reward's arguments are wrong, which `check_user_code` has reported.
            return


def _source(row: Prompt, data: DataSettings) -> str:
    return str(row.row.get(data.data_source_key, ""))


def _check_recipe(config: RunConfig, prompts: PromptSource) -> Iterator[Finding]:
    """Check that the model to be made has a token for every character of the prompts, and can be
    taught their answers."""
    recipe = config.model.missing
    if recipe is None:
        return
    first = [prompts[i] for i in range(_SCANNED)]
    used = {c for row in first for text in _texts(row) for c in text}
    if lacking := "".join(sorted(used - set(recipe.alphabet))):
        yield DATA.problem(f"model.recipe.alphabet: lacks {lacking!r}, which prompts have")
    is_taught = recipe.warm_start_steps > 0 and recipe.warm_start_source is None
    if is_taught and not all(row.content and row.answer for row in first):
        yield DATA.problem(NOTHING_TO_TEACH)


def _check_lengths(
    config: RunConfig, prompts: PromptSource, load: "LoadRenderer"
) -> Iterator[Finding]:
    """Check whether any of the first prompts is too long or refused by the chat template."""
    data = config.data
    num_tokens = _tokenizer(config)
    if num_tokens is None:
        return
    known = _size(prompts)
    scanned = [prompts[i] for i in range(min(known or _SCANNED, _LARGEST_SCAN))]
    lengths = [sum(num_tokens(text) for text in _texts(prompt)) for prompt in scanned]
    longest, limit = max(lengths), data.max_prompt_length
    num_turns = max(len(_texts(prompt)) for prompt in scanned)
    template = _template(config)
    # A template may refuse a conversation that is more than one question, such as one with a system
    # prompt.
    asks = data.system_prompt is None and num_turns == 1
    may_refuse = "raise_exception" in template and not asks
    if data.truncation == "error" and longest > limit:
        prompt = scanned[lengths.index(longest)]
        yield DATA.problem(
            f"data.max_prompt_length: was {limit}, and a prompt has {longest} tokens "
            f"({prompt.origin or _shown(prompt)}); data.truncation left, right, drop or filter "
            "would take it"
        )
    elif data.truncation in ("drop", "filter") and min(lengths) > limit:
        is_all = known is not None and known == len(scanned)
        yield (DATA.problem if is_all else DATA.warning)(
            f"data.max_prompt_length: was {limit}; none of the first {len(scanned)} prompts fits, "
            f"the shortest has {min(lengths)} tokens"
        )
    elif template and (
        longest + num_turns * _around(template, data, num_tokens) > limit or may_refuse
    ):
        # The longest prompts, and the first one, which shows the form of all.
        order = sorted(range(len(scanned)), key=lengths.__getitem__, reverse=True)
        _require_rendered(load, [scanned[0], *(scanned[i] for i in order[:_SCORED])])


_AROUND, _SPECIAL = 256, 8
"""Tokens that a chat template is assumed to put around a prompt if Jinja alone cannot tell, and the
number of tokens that it may also take from the tokenizer."""


def _around(template: str, data: DataSettings, num_tokens: Callable[[str], int]) -> int:
    """Roughly how many tokens template and system prompt put around a message. Only a renderer,
    which imports transformers, knows exactly."""
    system = [("system", data.system_prompt)] if data.system_prompt else []
    with suppress(ValueError):
        return num_tokens(_filled(template, *system, ("user", ""))) + _SPECIAL
    return num_tokens(data.system_prompt or "") + _AROUND


def _filled(template: str, *turns: tuple[str, str]) -> str:
    """Render turns, each a role and a content, by Jinja alone.

    Raises:
        ValueError: the template cannot render them, or not without its tokenizer.
    """
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    messages = [{"role": role, "content": content} for role, content in turns]
    given = {"add_generation_prompt": True, "strftime_now": time.strftime}
    with template_errors():
        return jinja.from_string(template).render(messages=messages, **given)


def _unopened_answer(template: str) -> Iterator[Finding]:
    """Warn if the template writes a text in front of each answer, and does not end a prompt with
    it."""
    if not template or "add_generation_prompt" in template:
        return
    with suppress(ValueError):
        asked = _filled(template, ("user", "question"))
        whole = _filled(template, ("user", "question"), ("assistant", _ANSWER))
        opening, _, _ = whole.removeprefix(asked).partition(_ANSWER)
        if whole.startswith(asked) and opening.strip():
            yield DATA.warning(
                f"data.chat_template: it writes {opening!r} in front of an answer, and does not "
                "end a prompt with it, so the policy has to write it: add "
                "{% if add_generation_prompt %} with this text at its end"
            )


_ANSWER = "streamrlanswer"


def _require_rendered(load: "LoadRenderer", prompts: Sequence[Prompt]) -> None:
    """Encode prompts as the generators do.

    Raises:
        ConfigError: the chat template or the tokenizer refuses one of them.
    """
    renderer = load()
    # Ignore other failures of single prompts: a run drops their groups and counts them.
    with suppress(RolloutError):
        for prompt in prompts:
            has_images = not isinstance(prompt.content, str) and has_media(prompt.content)
            if renderer is not None and not has_images:
                renderer.encode(prompt)


def _template(config: RunConfig) -> str:
    """The chat template of the run; "" if prompts are rendered without one."""
    match config.data.chat_template:
        case "none":
            return ""
        case Path() as path:
            with suppress(ConfigError):  # Another check has refused the file.
                return read_text(path)
            return ""
    folder = local_folder("model.tokenizer", config.model.tokenizer_path)
    return folder.chat_template if folder is not None and config.model.missing is None else ""


def _tokenizer(config: RunConfig) -> Callable[[str], int] | None:
    """Return a function that counts the tokens of a text; None if there is no tokenizer.json."""
    if config.model.missing is not None:
        return len
    folder = local_folder("model.tokenizer", config.model.tokenizer_path)
    if folder is None or not (file := folder.path / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    with attributed_to(f"model.tokenizer: {file}"):
        tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _texts(prompt: Prompt) -> list[str]:
    if isinstance(prompt.content, str):
        return [prompt.content]
    return [text_of(turn["content"]) for turn in prompt.content]


def _check_gym(data: DataSettings, name: str) -> Iterator[Finding]:
    """Check a reasoning_gym source by the package's files, since it takes seconds to import."""
    if any(reward.reward == "task" and not reward.data_source for reward in data.all_rewards):
        yield from DATA.refusal(check_scorer, name)
    spec = find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        yield DATA.problem(str(not_installed(f"data.source: {data.source}", "reasoning_gym")))
        return
    sources = (file.read_text(encoding="utf-8") for file in Path(spec.origin).parent.rglob("*.py"))
    known = {found for text in sources for found in _GYM_NAME.findall(text)}
    if known and name not in known:
        hint = did_you_mean(name, known)
        yield DATA.problem(f"data.source: reasoning_gym has no {name!r}; {hint}")
    yield DATA.ok(f"data.source: reasoning_gym's {name}, which is not loaded here")


_GYM_NAME = re.compile(r"""DATASET_NAME\s*=\s*["'](\w+)["']""")


def _size(prompts: PromptSource) -> int | None:
    """Return the number of different prompts; None if the source does not know it."""
    return len(prompts) if isinstance(prompts, Sized) else None


def _shown(prompt: Prompt) -> str:
    """The text of the last message, since many prompts begin with the same system message."""
    return shown(_texts(prompt)[-1])


_HELD = {
    "namespaces": "programs have namespaces of their own",
    "landlock": "programs are held by Landlock and a filter of system calls; they can start no "
    "processes, and what they write to their folder is not bounded together",
    "none": "isolation is none: programs that a model wrote run with the files, processes and "
    "network of this user in reach",
}


def check_sandbox(config: RunConfig) -> Iterator[Finding]:
    """Check the isolation of programs, if the run has the reward `code` or the tool `python`. Runs
    one or two programs."""
    for place, kwargs in _users(config):
        wanted = kwargs.get("isolation", "auto")
        if wanted not in get_args(IsolationChoice):
            # The check of the arguments reports it.
            continue
        try:
            isolation = choose(wanted)
        except ConfigError as error:
            yield DATA.problem(f"{place}: {error}")
            continue
        sentence = f"{place}: {_HELD[isolation]}"
        if isolation == "none":
            yield DATA.warning(sentence)
        elif isolation == "landlock" and wanted == "auto":
            yield DATA.warning(f"{sentence} (no namespaces: {why_not('namespaces')})")
        else:
            yield DATA.ok(sentence)


def _users(config: RunConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the settings that make the run start programs, each with its arguments."""
    for entry in config.entries:
        alone = f"{entry.place}reward" if entry.place else "data.reward"
        name = f"{entry.place}data.rewards" if entry.data.rewards else alone
        for reward in entry.data.all_rewards:
            if reward.reward == "code":
                yield f"{name}: code", reward.kwargs
    for tool in config.generator.tools:
        if tool.tool == "python":
            yield "generator.tools: python", tool.kwargs
