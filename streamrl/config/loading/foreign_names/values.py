"""What a value of another system's setting is here.

The column `values` of a file has, by their value, ours: of the setting that `here` names, or of
several. `_` stands for all other values; in ours, `$` is the value and `${NAME}` that of another
name, and `$ * 60` is computed from left to right. `different` says that nothing here is the same,
`without` names a section that is left out. A value that has no rule is the same here, if `here` is
one setting that does as much. An exclamation mark in front says that the release's default is not
ours.
"""

import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import yaml

from streamrl.config.loading.foreign_names import SYSTEMS, ForeignName, foreign_names

WITHOUT = "without"
_DIFFERENT = "different"
_SETTING = re.compile(r"[a-z]+(?:\.[a-z_]+)+")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}|\$")
_OPERATORS = {"*": operator.mul, "/": operator.truediv, "+": operator.add}

Lookup = Callable[[str], Any]


def has_other_default(name: ForeignName) -> bool:
    """Whether the release's default differs from ours."""
    return name.values.startswith("!")


def default_of(name: ForeignName) -> Any:
    """The release's default."""
    return yaml.safe_load(name.default)


def translate(name: ForeignName, value: Any, lookup: Lookup) -> dict[str, Any] | None:
    """Our settings with their values; `lookup` has the value of another name of the system.

    {} where it holds here without a setting, None where nothing here is the same.

    Raises:
        LookupError: it depends on a name that `lookup` does not know, or is no number.
    """
    rule = _rule(name, value)
    if rule == _DIFFERENT and isinstance(value, list) and value:
        return _joined([translate(name, item, lookup) for item in value])
    if rule == _DIFFERENT:
        return None
    ours = _filled(rule, value, lookup)
    setting = _SETTING.match(name.here)
    return ours if isinstance(ours, dict) or setting is None else {setting[0]: ours}


def arithmetic(name: ForeignName, value: Any, lookup: Lookup) -> dict[str, str]:
    """How each computed setting of ours is derived, such as `num_generations 8 * 4`. Errors as in
    `translate`."""
    rule = _rule(name, value)
    computed_ones = rule.items() if isinstance(rule, dict) else ()
    return {
        setting: _REFERENCE.sub(
            lambda m: f"{m[1]} {lookup(m[1])}" if m[1] else f"{name.name} {value}", text
        )
        for setting, text in computed_ones
        if set(str(text).split()) & set(_OPERATORS)
    }


def answer(name: ForeignName, value: Any) -> str:
    """Our settings with their values as text; "" if the value has the same name here, or depends on
    another name's value."""
    unknown: dict[str, Any] = {}
    try:
        ours = None if _rule(name, value) == "$" else translate(name, value, unknown.__getitem__)
    except LookupError:
        return ""
    left_out = f"leave out {ours.pop(WITHOUT)}" if ours and WITHOUT in ours else ""
    settings = [f"{key}: {_shown(item)}" for key, item in (ours or {}).items()]
    return ", ".join([*settings, left_out] if left_out else settings)


def meant(setting: str, value: Any) -> str:
    """For a value that our setting refuses: its name here, if another system has it; otherwise
    ""."""
    for system in SYSTEMS:
        for name in foreign_names(system).values():
            is_part = setting in name.here.split(" and ") and value in texts_with_a_rule(name)
            is_asked = is_part or setting in (name.here, name.name)
            rule = _rule(name, value)
            is_same = "$" in (rule, rule.get(setting) if isinstance(rule, dict) else None)
            if is_asked and not is_same and rule != _DIFFERENT:
                ours = answer(name, value).removeprefix(f"{setting}: ")
                return f"{system}'s {_shown(value)} is {ours} here" if ours else ""
    return ""


def texts_with_a_rule(name: ForeignName) -> list[str]:
    """The texts that are known values of the name."""
    return [theirs for theirs in _rules(name.values) if isinstance(theirs, str) and theirs != "_"]


def _rule(name: ForeignName, value: Any) -> Any:
    rules = _rules(name.values)
    for theirs, ours in rules.items():
        if theirs == value and isinstance(theirs, bool) == isinstance(value, bool):
            return ours
    setting = _SETTING.fullmatch(name.here)
    is_same = name.status == "have" and setting and not name.name.endswith(".*")
    usual = _DIFFERENT if not is_same else {} if value is None else "$"
    return rules.get("_", usual)


@cache
def _rules(text: str) -> Mapping[Any, Any]:
    return yaml.safe_load(text.removeprefix("!")) or {}


def _filled(rule: Any, value: Any, lookup: Lookup) -> Any:
    """The rule with the values that it refers to filled in."""
    match rule:
        case dict():
            return {_filled(k, value, lookup): _filled(v, value, lookup) for k, v in rule.items()}
        case list():
            return [_filled(item, value, lookup) for item in rule]
        case str() if reference := _REFERENCE.fullmatch(rule):
            return lookup(reference[1]) if reference[1] else value
        case str() if "$" in rule:
            text = _REFERENCE.sub(lambda m: str(lookup(m[1]) if m[1] else value), rule)
            result = computed(text)
            if result == text and set(rule.split()) & set(_OPERATORS):
                raise LookupError(f"{text} is no number")
            return result
    return rule


def computed(text: str) -> Any:
    """`6 * 4 / 3` becomes 8; any other text stays."""
    first, *rest = text.split(" ")
    try:
        result = float(first)
        for symbol, number in zip(rest[::2], rest[1::2], strict=True):
            result = _OPERATORS[symbol](result, float(number))
    except (ValueError, KeyError, ZeroDivisionError):
        return text
    return int(result) if result.is_integer() else result


def _joined(parts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The translation of a list of values; None if one has none here, or two are different values
    of one setting."""
    joined: dict[str, Any] = {}
    for part in parts:
        if part is None or any(joined.get(key, item) != item for key, item in part.items()):
            return None
        joined |= part
    return joined


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
