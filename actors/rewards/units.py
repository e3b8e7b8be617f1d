"""Units of measure after a value: what they are multiples of, so that 5 cm equals 50 mm, not 5 m.

A unit is a product of powers of names, such as `km/h`, `square feet` or `g per mL`. Names that are
not in the tables are no units: "5 apples" has none.
"""

import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

FUNCTIONS = frozenset({"cos", "cot", "csc", "exp", "lg", "ln", "log", "sec", "sin", "sqrt", "tan"})
# Each unit as a multiple of a base unit.
_SYMBOLS: dict[str, tuple[int | str, str]] = {
    **{"m": (1, "m"), "g": (1, "g"), "s": (1, "s"), "h": (3600, "s"), "in": ("0.0254", "m")},
    **{"ft": ("0.3048", "m"), "yd": ("0.9144", "m"), "mi": ("1609.344", "m"), "min": (60, "s")},
    **{"sec": (1, "s"), "hr": (3600, "s"), "lb": ("453.59237", "g"), "oz": ("28.349523125", "g")},
    **{"V": (1, "V"), "A": (1, "A"), "K": (1, "K"), "mol": (1, "mol"), "eV": (1, "eV")},
    **{"\\Omega": (1, "ohm"), "Ω": (1, "ohm"), "°": (1, "deg"), "°C": (1, "Celsius")},
    **{"°F": (1, "Fahrenheit"), "\\$": (1, "$"), "$": (1, "$"), "rad": (1, "rad")},
}
_WORDS = {
    **{"meter": "m", "metre": "m", "gram": "g", "second": "s", "sec": "sec", "hour": "h"},
    **{"hr": "h", "minute": "min", "inch": "in", "foot": "ft", "feet": "ft", "yard": "yd"},
    **{"mile": "mi", "pound": "lb", "lb": "lb", "ounce": "oz", "degree": "°", "dollar": "$"},
    **{"ohm": "Ω", "newton": "N", "joule": "J", "watt": "W", "volt": "V"},
    **{"radian": "rad"},
}
_FURTHER = {
    **{"cent": (Fraction(1, 100), {"$": 1}), "day": (Fraction(86400), {"s": 1})},
    **{"week": (Fraction(604800), {"s": 1}), "mph": (Fraction("0.44704"), {"m": 1, "s": -1})},
    **{"N": (Fraction(1000), {"g": 1, "m": 1, "s": -2}), "Hz": (Fraction(1), {"s": -1})},
    **{"J": (Fraction(1000), {"g": 1, "m": 2, "s": -2})},
    **{"W": (Fraction(1000), {"g": 1, "m": 2, "s": -3})},
    **{"Pa": (Fraction(1000), {"g": 1, "m": -1, "s": -2})},
    **{name: (Fraction(1, 1000), {"m": 3}) for name in ("L", "l", "liter", "litre")},
}
_PREFIXES = {"k": 3, "c": -2, "m": -3, "d": -1, "M": 6, "G": 9, "n": -9}
_PREFIX_WORDS = {"kilo": "k", "centi": "c", "milli": "m", "deci": "d", "mega": "M"}
# Units that take prefixes.
_METRIC = frozenset({"m", "g", "s", "L", "l", "N", "J", "W", "V", "A", "Pa", "Hz", "mol", "eV"})
_METRIC_WORDS = frozenset({"meter", "metre", "gram", "second", "liter", "litre", "joule", "watt"})
_NAME = r"(?:°\s?[CF]?|\\Omega|Ω|[a-zA-Z]{1,12})"
_FACTOR = (
    rf"(?:(?:square|sq\.?|cubic|cu\.?)\s)?{_NAME}(?:\.(?=\s))?"
    r"(?:\^?[23]|\^\{-?[123]\}|[²³]|\s(?:squared|cubed))?"
)
# A space stands before a power such as s^{-2}.
_BETWEEN = r"(?:\s?(?:/|\bper\b|\\cdot|·)\s?|\s{1,2}(?=[a-zA-Z]{1,3}\^\{-))"
_UNIT = re.compile(
    rf"(?:(?<=[\dπ)}}])|(?<=\\pi))\s*(?P<unit>{_FACTOR}(?:{_BETWEEN}{_FACTOR}){{0,2}})\Z"
)
_FACTORS = re.compile(rf"\s?(?P<over>/|\bper\b)?(?:[\s·]|\\cdot)*(?P<factor>{_FACTOR})")
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_DOLLARS = re.compile(r"\\?\$\s?(?P<value>[^$]*\d)")
_TEXT = (
    r"\\(?:text(?:rm|bf|it)?|math(?:rm|bf|it)|mbox)\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
    r"(?:\s*\^\s*(?:\{-?\d\}|\d))?"
)
_TEXTS = re.compile(
    rf"(?<=[\w)}}\]%$!|])(?P<texts>(?:(?:\s|~|\\[,;: !]|/|\\cdot|\\quad){{0,4}}{_TEXT}){{1,4}})"
    r"(?=[\s.]*(?:\Z|\$|\\[)\]]))"
)
_WORDS_BEHIND = re.compile(
    r"(?:(?:(?<=[\d)\]}!|])|(?<=\\pi)|(?<=[^a-zA-Z\\][a-zA-Z]))\s"
    r"(?P<words>(?:[a-z]{2,12}\s){0,2}[a-z]{4,15})|(?<=\d)(?:st|nd|rd|th|\s?[aApP][mM]))\.?\Z"
)
# 5 m and 5cm, but not 5m, 5mg and 5 h^2, which may be formulas.
_NUMBER_OF = re.compile(
    r"[-\N{MINUS SIGN}\d.,]*\d(?:[eE][-+]?\d+"
    r"|\s?(?:\\times|\\cdot|[x*\N{MULTIPLICATION SIGN}])\s?10\s?\^\s?(?:\{\s?)?-?\d+\}?)?"
    r"(?:\s+(?![a-zA-Z]\^)|(?=[ck][a-zA-Z]|mm|m[lL]|ft|lb|hr|[a-zA-Z]{3}))"
)
_PERCENT = re.compile(
    r"(?<=\d)(?:\s|~|\\[,;: ]){0,4}"
    r"(?:\\?%|per ?cent|\\(?:text|mathrm)\s*\{[\s~]*(?:\\?%|per ?cent)\s*\})\.?\Z"
)
# $5$ cm, or $5 cm$.
_DELIMITED = re.compile(r"\$(?P<value>[^$]{1,200})\$(?P<words>\s?[a-zA-Z][^$]{0,47})?")
_PLAIN_WORDS = re.compile(r"(?:[a-z]{2,12}\s){0,2}[a-z]{3,15}")
# Not those of \mathbf, which are vectors and matrices.
_LETTER = re.compile(r"([^\W\d_\u3040-\ud7a3])(?:\s*\^\s*-?\d)?")
# Of these, a letter may be an argument or an atom.
_NAME_BEFORE = re.compile(
    rf"(?:\\(?:{'|'.join(FUNCTIONS)}|angle)"
    r"|\\(?:text|mathrm)\s*\{[^{}]*\}(?:_\{?\d+\}?)?)\Z"
)
_IDEOGRAPH = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")
# Parts of one.
PARTS = "(?:hal|thir|four|fif|six|seven|eigh|nin|ten|twelf|hundred|thousand|million)(?:ve|d|th)s"
# They change a value, or say when it is one.
_NO_MEASURE = re.compile(
    r"\b(?:and|are|cos|cubed|divided|dozen|factorial|for|hundred|if|is|less|log|million|billion"
    r"|minus|more|negative|not|or|over|plus|sin|sqrt|squared|tan|thousand|times|trillion"
    rf"|when|where|{PARTS})\b|[万萬亿億千百十半以或和不만억천백반]"
)
# A unit is at the end of a text, and at most this long.
_LONGEST = 48


class Unit(NamedTuple):
    """`factor` times a product of powers of the names."""

    factor: Fraction
    powers: tuple[tuple[str, int], ...]


class Quantity(NamedTuple):
    """A value as a text, and what it counts."""

    value: str
    unit: Unit
    is_evident: bool
    """Whether it can only be a unit: 5m may be a formula."""


def quantity(text: str, *, is_text: bool = False) -> Quantity | None:
    """The value and the unit of a text without font commands; None without a unit.

    Args:
        is_text: whether what follows the value was text within a formula.

    >>> quantity("5 cm").unit == quantity("5 meters").unit, quantity("5 cm").value
    (False, '5')
    >>> quantity("5 m").is_evident, quantity("5 m/s").is_evident, quantity("5 apples")
    (False, True, None)
    """
    if dollars := _DOLLARS.fullmatch(text):
        return Quantity(dollars["value"], Unit(Fraction(1), (("$", 1),)), True)
    start = max(0, len(text) - _LONGEST)
    found = _UNIT.search(text, start)
    unit = unit_of(found["unit"]) if found else None
    if found is None or unit is None:
        return None
    name = found["unit"]
    is_apart = found.start() < found.start("unit") and len(re.sub(r"[^a-zA-Z]", "", name)) > 1
    is_marked = not name[0].isascii() or "\\" in name or "/" in name
    is_evident = is_text or is_marked or is_apart
    return Quantity(text[: found.start()], unit, is_evident)


def unmeasured(formula: str) -> str:
    """A formula without the unit, or the words, that follow its value.

    >>> unmeasured("2\\\\sqrt{3}\\\\text{ cm}^2"), unmeasured("5 m"), unmeasured("2^{10} ways")
    ('2\\\\sqrt{3}', '5', '2^{10}')
    >>> unmeasured("3+4\\\\mathrm{i}"), unmeasured("2m"), unmeasured("\\\\frac{m}{M} g")
    ('3+4\\\\mathrm{i}', '2m', '\\\\frac{m}{M} g')
    """
    if delimited := _DELIMITED.fullmatch(formula):
        words = (delimited["words"] or "").strip(" .")
        if not words:
            return f"${unmeasured(delimited['value'])}$"
        is_name = _PLAIN_WORDS.fullmatch(words) and not _NO_MEASURE.search(words)
        return f"${delimited['value']}$" if is_name or unit_of(words) else formula
    formula = _PERCENT.sub("%", formula)
    formula = _TEXTS.sub(lambda found: "" if _is_measure(found) else found[0], formula)
    words = _WORDS_BEHIND.search(formula, max(0, len(formula) - _LONGEST))
    if words and not _NO_MEASURE.search(words[0]):
        return formula[: words.start()]
    found = quantity(formula)
    # math-verify reads degrees.
    if found is None or "°" in formula:
        return formula
    number = _NUMBER_OF.match(formula)
    is_of_number = number and number[0].strip() == found.value
    return found.value if found.is_evident or is_of_number else formula


def _is_measure(found: re.Match[str]) -> bool:
    texts = found["texts"]
    words = re.sub(r"\\(?:[a-zA-Z]+|.)|[{}~]", " ", texts).strip()
    if "\\Omega" in texts or words == ".":
        return True
    if letter := _LETTER.fullmatch(words):
        before = found.string[max(0, found.start() - _LONGEST) : found.start()]
        if re.search(r"(?:bf|it)\s*\{", texts) or _NAME_BEFORE.search(before):
            return False
        # Any letter behind a space, such as \mathrm{~S}, but not the numbers i and e.
        is_apart = re.search(r"\{[\s~]", texts) and letter[1] not in "ie"
        return bool(is_apart) or letter[1] in "CFHT" or unit_of(words) is not None
    is_name = re.search(r"[a-z]{2}|[AP]M\b", words) or _IDEOGRAPH.search(words)
    return unit_of(words) is not None or bool(is_name and not _NO_MEASURE.search(words))


@lru_cache(maxsize=256)
def unit_of(text: str) -> Unit | None:
    """The unit that a name or a product of names stands for; None if it is no unit.

    >>> unit_of("km/h") == unit_of("kilometers per hour"), unit_of("apples")
    (True, None)
    """
    factor, powers = Fraction(1), Counter[str]()
    for found in _FACTORS.finditer(text):
        sign = -1 if found["over"] else 1
        sign *= -1 if "-" in found["factor"] else 1
        words = re.findall(rf"{_NAME}|\d|[²³]", found["factor"])
        power = {"2": 2, "²": 2, "3": 3, "³": 3}.get(words[-1], 1)
        power *= next((_POWERS[word] for word in words if word in _POWERS), 1)
        names = [word for word in words if word not in _POWERS and not word.isdigit()]
        one = _named(names[0].replace(" ", "")) if len(names) == 1 else None
        if one is None:
            return None
        factor *= one[0] ** (sign * power)
        for name, own in one[1].items():
            powers[name] += sign * power * own
    return Unit(factor, tuple(sorted((n, p) for n, p in powers.items() if p))) if powers else None


def _named(name: str) -> tuple[Fraction, dict[str, int]] | None:
    """Factor and powers of one name, which may have a prefix and be a plural."""
    if name in _SYMBOLS:
        number, measures = _SYMBOLS[name]
        return Fraction(number), {measures: 1}
    if name in _FURTHER:
        return _FURTHER[name]
    if name[:1] in _PREFIXES and name[1:] in _METRIC and (one := _named(name[1:])):
        return one[0] * Fraction(10) ** _PREFIXES[name[0]], one[1]
    word = name.casefold()
    for singular in (word, word.removesuffix("s"), word.removesuffix("es")):
        if singular in _WORDS:
            return _named(_WORDS[singular])
        if singular in _FURTHER:
            return _FURTHER[singular]
        for prefix, letter in _PREFIX_WORDS.items():
            rest = singular.removeprefix(prefix)
            if rest in _METRIC_WORDS and rest != singular and (one := _named(rest)):
                return one[0] * Fraction(10) ** _PREFIXES[letter], one[1]
    return None
