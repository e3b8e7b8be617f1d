"""A configuration of another system as its keys and values: a YAML file with the files that its
`defaults` name, or a shell script with the arguments that it gives to a trainer.

What `${...}` stands for is filled in. Environment variables are not read: a file that is written
from this one must not have what is secret in them.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from functools import reduce
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from streamrl.config.loading.foreign_names.values import computed
from streamrl.config.loading.load import with_setting
from streamrl.config.loading.sources import Loader, Setting, fault, parse
from streamrl.config.section import leaves, overlaid
from streamrl.errors import ConfigError, read_text

Tree = Mapping[str, Any]
_OVERRIDE = re.compile(r"\+*([A-Za-z_][\w-]*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
# Beyond these, what `${...}` stands for is in itself.
_MAX_FILLED = 50
_MAX_LENGTH = 10_000


def read_keys(path: Path, default: Callable[[str], Any]) -> tuple[dict[str, Any], list[str]]:
    """The values by their dotted names, and the `defaults` of which no file was found.

    Args:
        default: the value of a name that the file does not have; LookupError if it is not known.

    Raises:
        ConfigError: the file cannot be read, or holds no keys.
    """
    if path.suffix == ".py":
        raise ConfigError(
            f"{path}: Python is not read; write the arguments that it gives to its trainer (for "
            "TRL, those of GRPOConfig) as a YAML file, one `name: value` a line, or give the shell "
            "script (.sh) that starts it"
        )
    missing: list[str] = []
    tree = _script(read_text(path)) if path.suffix == ".sh" else _yaml(path, missing)
    if not tree:
        raise ConfigError(f"{path}: has no settings; give a YAML file, or a shell script (.sh)")
    return dict(leaves(_filled(tree, (), tree, default))), missing


def _yaml(path: Path, missing: list[str], within: tuple[Path, ...] = ()) -> Tree:
    """The values of the file, which override those of its `defaults`, except the ones listed after
    `_self_`; `within` are the files whose defaults it is part of."""
    try:
        tree = yaml.load(read_text(path), Loader=Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {fault(error)}") from error
    if not isinstance(tree, dict):
        return {}
    defaults = tree.pop("defaults", None) or []
    if not isinstance(defaults, list) or not all(defaults):
        raise ConfigError(f"{path}: defaults: was {defaults!r}; it must be a list of files")
    if "_self_" not in defaults:
        defaults = [*defaults, "_self_"]
    chosen = {
        f"${{{key}}}": name for e in defaults if isinstance(e, dict) for key, name in e.items()
    }
    merged: Tree = {}
    for entry in defaults:
        merged = overlaid(
            merged, tree if entry == "_self_" else _of(entry, path, chosen, missing, within)
        )
    return merged


def _of(
    entry: Any,
    path: Path,
    chosen: Mapping[str, Any],
    missing: list[str],
    within: tuple[Path, ...],
) -> Tree:
    """The values of the file `folder/name@package` or `group@package: name`, placed below the
    package, by default its folder; `_here_` means the root."""
    group, name = next(iter(entry.items())) if isinstance(entry, dict) else (str(entry), "")
    file, _, package = str(group).partition("@")
    file = f"{file}/{name}" if name else file
    file = reduce(lambda text, key: text.replace(key, str(chosen[key])), chosen, file)
    found = path.parent / f"{file.removesuffix('.yaml')}.yaml"
    if not found.is_file():
        missing.append(file)
        return {}
    within = (*within, path)
    if any(map(found.samefile, within)):
        raise ConfigError(f"{path}: defaults: {file} is the file itself, or includes it")
    is_global = "# @package _global_" in read_text(found)
    keys = [] if is_global else (package or file.rpartition("/")[0].replace("/", ".")).split(".")
    keys = [key for key in keys if key and not key.startswith("_")]
    return reduce(lambda below, key: {key: below}, reversed(keys), _yaml(found, missing, within))


def _script(text: str) -> Tree:
    """The values given as `a.b=value` or `--name value`, with the script's variables filled in."""
    variables: dict[str, str] = {}
    tree: Tree = {}
    for line in text.replace("\\\n", " ").splitlines():
        line = _ARITHMETIC.sub(lambda found: _number(found[1], variables), line)
        words = _words(line, variables)
        script = _script_at(words)
        for position, word in enumerate(words):
            if found := _OVERRIDE.fullmatch(word):
                key, value = found[1], parse(found[2], word)
            elif found := _ASSIGNMENT.fullmatch(word):
                variables[found[1]] = found[2]
                continue
            elif word.startswith("--") and position != script:
                end = script if position < script else len(words)
                key, value = _option(word, words[position + 1 : end])
            else:
                continue
            tree = with_setting(tree, Setting((*key.split("."),), value, word))
    return tree


def _script_at(words: list[str]) -> int:
    """Where the options of a launcher end: at SCRIPT.py or the launcher's -m MODULE, not Python's
    own -m; 0 if there is neither."""
    starts = (
        position
        for position, word in enumerate(words)
        if (word.endswith(".py") and "=" not in word)
        or (word in ("-m", "--module") and "python" not in words[position - 1])
    )
    return next(starts, 0)


def _option(word: str, following: list[str]) -> tuple[str, Any]:
    """`--key=value`, or `--key` with the values that follow; without a value it means true."""
    key, equals, value = word[2:].partition("=")
    texts = (
        [value] if equals else list(takewhile(lambda text: not text.startswith("--"), following))
    )
    values = [parse(text, word) for text in texts]
    return key, values[0] if len(values) == 1 else values or True


def _number(text: str, variables: Mapping[str, str]) -> str:
    """The result of an expression like `len * 2`, with one kind of operator."""
    parts = re.findall(r"\w+|[*/+]", text.replace("$", ""))
    return str(computed(" ".join(variables.get(part, part) for part in parts)))


def _words(line: str, variables: Mapping[str, str]) -> list[str]:
    """The words of a command, with known variables filled in."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []
    return [
        _VARIABLE.sub(lambda v: variables.get(v[1] or v[3], v[2] or v[0]), word) for word in words
    ]


def _filled(
    value: Any,
    path: tuple[str, ...],
    tree: Tree,
    default: Callable[[str], Any],
    within: frozenset[str] = frozenset(),
) -> Any:
    """The value with `${...}` filled in; unchanged where that is unknown or refers to itself.
    `within` are the references being resolved."""
    if isinstance(value, Mapping):
        return {k: _filled(v, (*path, str(k)), tree, default, within) for k, v in value.items()}
    if isinstance(value, list):
        items = enumerate(value)
        return [_filled(v, (*path, str(i)), tree, default, within) for i, v in items]
    for _ in range(_MAX_FILLED):
        if not isinstance(value, str) or len(value) > _MAX_LENGTH:
            break
        found = _INTERPOLATION.search(value)
        if found is None or found[1] in within:
            break
        try:
            meant = _meant(found[1], path, tree, default)
        except LookupError:
            break
        is_whole = found[0] == value
        value = meant if is_whole else value.replace(found[0], str(meant))
        if isinstance(value, Mapping | list):
            return _filled(value, path, tree, default, within | {found[1]})
    return value


def _meant(text: str, path: tuple[str, ...], tree: Tree, default: Callable[[str], Any]) -> Any:
    """The value of a reference: a key, relative if it starts with dots, `oc.select:key,otherwise`
    or `oc.env:NAME,otherwise`. Raises LookupError if it is unknown."""
    resolver, colon, rest = text.partition(":")
    key, comma, otherwise = rest.partition(",") if colon else (text, "", "")
    if resolver not in ("oc.env", "oc.select") and colon:
        raise LookupError(text)
    relative = key.lstrip(".")
    depth = len(key) - len(relative)
    parts = [*(path[:-depth] if depth else ()), *relative.split(".")]
    try:
        if resolver == "oc.env":
            raise LookupError(key)
        found: Any = reduce(lambda below, part: below[part], parts, tree)
    except (LookupError, TypeError):
        if comma:
            return parse(otherwise, text)
        return default(".".join(parts))
    return found
