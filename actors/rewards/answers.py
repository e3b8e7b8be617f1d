"""What a response answers, and the number that a text is.

A response marks its answer by a box (`\\boxed{...}` or `\\fbox{...}`, MATH), by a line after "####"
(GSM8K, arXiv 2110.14168) or by an element `<answer>`; the last mark counts. A Markdown heading is
no mark, and what a policy writes while it thinks is no answer.

Invariant: one reader of numbers serves every reward, tool and validation. A number is exact. Its
sign, thousands separators, fraction and exponent are read in every notation; what cannot be read is
no number. A whole number before a fraction below 1 is mixed: 3\\frac{1}{2} and 3 1/2 are 7/2.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache, partial
from unicodedata import normalize

from actors.rewards.units import FUNCTIONS, PARTS, Quantity, quantity, unit_of
from streamrl.interfaces import Episode

_THOUGHT = re.compile("</?think>")
_MARKS = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!#)####(?!#)|<answer>|\"answer\"\s*:\s*(?![\s{])")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# The word in the languages of MMMLU and MGSM (arXiv 2210.03057), as simple-evals lists them.
_ANSWER = (
    r"\b(?:answer|antwort|jawaban|jibu|réponse|respuesta|resposta|risposta|ответ)\b"
    "|答案|答え|답변|정답|الإجابة|उत्तर|উত্তর|సమాధానం|คำตอบ"
)
_STATES = re.compile(
    # "correct option" and the like need a bare letter: the text may only be explaining that option.
    rf"(?:{_ANSWER}|\b(?:correct|right) (?:option|choice)\b(?=[\s*]*(?:is|:)[\s*:(]*[A-Ja-j]\b))"
    r"(?: corre[ct]?t[ae]\b| finale?\b)?[\s*]*"
    r"(?:(?:is\b(?:\s+not\b(?:(?!\banswer\b|[.,;?!]\s)[^\n]){1,80}?,?\s*\bbut(?:\s+rather)?\b)?"
    r"|(?:ist|es|est|é|è|ni)\b|是|为|は|은)(?:[\s*]*[:\uff1a、])?|[:\uff1a])"
    # A formula may begin on the next line.
    r"(?:\s*(?:\\\[|\$\$)\s*\n)?",
    re.IGNORECASE,
)
# A reason after an answer, beginning at the first of several spaces; or the ending that Minerva's
# prompt asks for (arXiv 2206.14858).
_REASON = re.compile(
    r"(?<![\s,])[\s,]\s*(?:because\b|since\b|I hope (?:it is|this is|it's) correct\b).*",
    re.DOTALL | re.IGNORECASE,
)
# The sentence behind a letter, a number or a formula, if it does not take that back.
_NEXT_SENTENCE = re.compile(
    r"(?<=[\d$)}%*]|\b[A-J])[.;]\s+(?!(?:Also|And|Both|Incorrect|No|Not|Or|Wrong)\b)"
    r"(?=(?:I|[A-Z][a-z]\S*)\s)(?!.{0,200}\b(?i:but|however|rather|should)\b).*|。.*",
    re.DOTALL,
)
_BOLD = re.compile(r"(?<![\w)}])\*\*(\S[^*]*)\*\*")
_QUOTES = "\"'`\u201c\u201d\u2018\u2019"
_QUOTED = re.compile(rf"[{_QUOTES}]{{1,2}}([^{_QUOTES}]+)[{_QUOTES}]{{1,2}}")
_TAKEN_BACK = re.compile(
    r"\b(?:actually|correction|final|hmm|instead|meant?|oops|sorry|wait)\b|\bno,", re.IGNORECASE
)
# After "####": a line that begins otherwise is a heading if text follows it.
_SIGNS_OF_MINUS = "\N{MINUS SIGN}\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}"
_DASHES = "\N{EN DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}"
_CURRENCIES = "€£¥₹₩"
# "$" is not removed, since it counts as a unit.
_CURRENCY = re.compile(
    rf"(?:[{_CURRENCIES}]|\bRs\b\.?)\s?(?=[-+.\d])|(?<=\d)\s?[{_CURRENCIES}](?!\s?\d)"
)
_NUMBER_FIRST = re.compile(
    rf"(?!\**\d+[.)]\s+\S)\**[-{_SIGNS_OF_MINUS}{_DASHES}+${_CURRENCIES}(\\.\d]"
)
_MINUS = dict.fromkeys(map(ord, _SIGNS_OF_MINUS), "-")
# A dash between numbers is a range, and one before a space is punctuation.
_DASH = re.compile(rf"(?<!\d)[{_DASHES}](?! )")
_ONE_SIGN_FRACTIONS = {
    sign: f" {normalize('NFKC', chr(sign))}".replace("\N{FRACTION SLASH}", "/")
    for sign in (*range(0xBC, 0xBF), *range(0x2150, 0x215F))
}
# Wide signs, as in Chinese and Japanese: their comma is never within a number.
_WIDE = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5E)} | {0xFF0C: ", "}
_TYPED = _WIDE | _MINUS | _ONE_SIGN_FRACTIONS | {ord("\N{FRACTION SLASH}"): "/"}
# Signs that people type in formulas and math-verify does not read.
_SIGNS = str.maketrans(
    {"°": r"^\circ ", "·": r"\cdot ", "∈": r"\in ", "∞": r"\infty ", "√": r"\sqrt "}
    | {"∅": r"\emptyset "}
)
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+"), re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_IN_TEXT = r"(?i)\A(?:\\text\{\s*)?"
# Notations of people, with replacements that math-verify reads.
_COMMANDS = [
    (re.compile(typed), known)
    for typed, known in (
        (r"\\(?:text)?degree(?![a-zA-Z])", r"^\\circ "),
        # An angle in degrees, which math-verify would read as radians, in a sine for example.
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d\}?)?\s*(?:(?:\\left\s*)?[({]\s*)?)"
            r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*)?\\circ(?![a-zA-Z])\s*\}?",
            r"\1\\frac{\2\\pi}{180}",
        ),
        (r"\\binom\s*(\d|[a-zA-Z](?![a-zA-Z]))\s*(\d|[a-zA-Z])", r"\\binom{\1}{\2}"),
        # A letter in another type is that letter.
        (r"\\(?:(?:text|math)(?:bf|it|rm|sf)?|boldsymbol|bm|vec)\s*\{\s*([a-zA-Z])\s*\}", r" \1"),
        # A derivative: math-verify would take that of y for 0.
        (r"\\frac\s*\{\s*d\s*([a-zA-Z])\s*\}\s*\{\s*d\s*([a-zA-Z])\s*\}", r"D_{\1\2}"),
        (r"\\hat\s*\{\s*([ijk])\s*\}", r" \1"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        # For a set of numbers, the inequality that they satisfy.
        (
            r"\A\s*(?:\\left)?\\\{\s*([a-zA-Z])\s*(?:\\in\s*(?:\\mathbb\{?R\}?|R)\s*)?"
            r"(?:\\(?:mid|vert|colon)(?![a-zA-Z])|[|:])\s*"
            r"(?=[^|]*(?:[<>]|\\(?:[lg]e|neq?)))([^|]*?)(?:\\right)?\\\}\s*\Z",
            r"\2",
        ),
        (
            rf"{_IN_TEXT}(?:there (?:is|are) )?no (?:real )?solutions?(?: exists?)?\}}?\Z",
            r"\\emptyset",
        ),
        (rf"{_IN_TEXT}all real numbers\}}?\Z", r"\\mathbb{R}"),
    )
]
# A word after one of several numbers: math-verify ignores what follows it.
_COUNTED = re.compile(
    r"(?<=[\d}])\s*\\(?:text|mathrm|mbox)\{[\s~]*(?P<word>[a-zA-Z]{1,15})[\s.]*"
    r"(?:(?P<further>and|or)\s*\}|\}(?:\^\{?[23]\}?)?(?=\s*[,;]|\s*\\text\{\s*(?:and|or)\s))"
)
# Equations below each other, with or without a brace; an array needs a brace.
_SYSTEM = re.compile(
    r"(?P<brace>\\left\s*\\\{\s*)?\\begin\{(?P<name>cases|aligned|gathered|split|array)\}"
    r"(?:\{[lcr ]*\})?(?P<rows>.{1,600}?)\\end\{(?P=name)\}(?(brace)\s*\\right\s*\.)",
    re.DOTALL,
)
# Also ]0; 1[, an open interval.
_INTERVAL = re.compile(r"([\[\](])([^\[\](),;]{1,60})[,;]([^\[\](),;]{1,60})([\[\])])")
# A comma that separates no thousands.
_DECIMAL = re.compile(r"(?<=\d)\{,\}(?=\d)(?!\d{3}(?!\d))|(?<=\b0)\{,\}(?=\d)")
# Thousands separators other than commas; no plain space, which may separate two numbers.
_THIN = r"\\[,;: ]|~|[\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}]"
_THOUSANDS = re.compile(rf"(?<=\d)(?:{_THIN})(?=\d{{3}}(?!\d))")
# As in MATH: 11,\! 111.
_CLOSER = re.compile(r"(?<=,)(?:\\!)+\s*(?=\d)|\\!")
_TIMES = "\N{MULTIPLICATION SIGN}"
_PART = r"\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))"
# A fraction with digits right after it is a factor of them.
_FRACTION = re.compile(rf"\\[dtc]?frac{_PART}{_PART}(?!\d)")
_REPEATING = re.compile(
    r"(?<![\d,])(\d{0,99})\.(\d{0,99})\\(?:overline|bar)\s*(?:\{\s*(\d{1,99})\s*\}|(\d))"
)
_POWER = re.compile(
    # Begin at the first of many spaces: otherwise each of them would scan all that follow.
    rf"(?<!\s)\s*(?:\\times|\\cdot|[{_TIMES}*]|(?<=\d\s)x)\s*10\s*(?:\^|\*\*)\s*(?:\{{\s*([-+]?\d+)\s*\}}|([-+]?\d+))"
)
# Thousands, or lakhs and crores; any other comma separates numbers.
_COMMAS = r"\d{1,3}(?:,\d{3})+(?!,?\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!,?\d)"
_WHOLE = rf"{_COMMAS}|\d+"
_DIGITS = rf"(?:{_WHOLE})(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    # A sign after a word, a number or a bracket means subtraction.
    r"(?:(?<![\w)\]}.])(?P<sign>[-+])\s?)?(?P<currency>\$\s?)?(?P<inner>(?<=\$)[-+])?"
    rf"(?:(?P<whole>{_WHOLE}) (?=\d+\s?/))?"
    rf"(?P<number>{_DIGITS})(?:[eE](?P<exponent>[-+]?\d+)(?!\w))?"
    rf"(?:\s?/\s?(?P<denominator>{_DIGITS})(?![\d/]))?"
)
# Behind a number, of which another one is computed; not of 90^\circ, 5^{th} and **18** (dollars).
_OPERATOR = re.compile(
    r"\s*(?:_(?!\{?10\b)|\^(?!\s*\{?\s*(?:\\(?:circ|text|mathrm)|(?:st|nd|rd|th)\b))|-\s?\d"
    r"|\*\*\s?\d|[*+\N{MULTIPLICATION SIGN}]\s?[\d(\\]"
    r"|\N{SQUARE ROOT}|\\(?:cdot|times|sqrt|pi)(?![a-zA-Z]))"
)
_CHOOSE = re.compile(
    r"(?:\A|(?<=\{))\s*(\d{1,9}|[a-zA-Z])\s*(?:\\choose\b|\bchoose\b)\s*(\d{1,9}|[a-zA-Z])\s*(?=\}|\Z)"
)
_SPACED = re.compile(r"-?\d{1,3}(?: \d{3})+")
_SIZES = re.compile(r"\\(?:left|right)(?![a-zA-Z])\s*|\\[,;:]")
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_GAP = r"(?:\\(?:[ ,;:]|q?quad(?![a-zA-Z]))|[~\s]|\*\*(?=\s))"
_CHOICE = re.compile(
    # A lower-case letter after a full stop may belong to a name: C. elegans.
    rf"\s*(?:\(?([A-J])\)(?:{_GAP}+|(?=[\d\\$]))|([A-H]):{_GAP}+"
    rf"|([A-H])\.{_GAP}+(?![a-z]))"
    r"(?P<said>\S.{0,199})"
)
# A formula, a letter that is taken back, or several letters; "No change" is none of these.
_NO_CHOICE = re.compile(
    r"\s*(?:[*+/=<>^_&|,;:.!?')\]]|-\s|(?!No(?:\Z| (?!(?:it|rather|the) )[a-z]{2}))"
    r"(?i:and|but|incorrect|is|no|nor|not|or|wait|was|wrong)\b"
    r"|.*\b(?i:incorrect|wait|wrong)\b|.*(?<![a-zA-Z\\])(?:[A-Z]|[IVX]+)(?![a-zA-Z]))"
)
_LETTER = re.compile(r"\A(?:\(?([a-zA-Z])\)|[\[{<]{1,2}([A-J])[\]}>]{1,2})\Z")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|it|rm|sf|tt)|mbox|boldsymbol|bm|underline)\s*\{([^{}\\]*)\}"
)
_TEXTS = re.compile(rf"(?:{_TEXT.pattern}|[\d\s,.:'$\-])*")
_TIME = re.compile(r"0?(\d{1,2})(:\d\d)? ?([ap])\.? ?m")
_DATE = re.compile(r"\d\d?/\d\d?/\d{4}")
_ISO_DATE = re.compile(r"(\d{4})-(0?[1-9]|1[0-2])-(\d\d?)")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAY_FIRST = re.compile(r"(\d\d?) (?:of )?([a-z]{3,9})")
_MONTH_FIRST = re.compile(rf"({'|'.join(_MONTHS)})[a-z]* (\d\d?)(?:,? (\d{{4}}))?")
_ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b")
# The full stop of St. Louis.
_ABBREVIATED = re.compile(r"(?<=[^\W\d_])\.(?= )")
# After an answer, and not part of a LaTeX space.
_STOP = re.compile(r"(?<!\\)(?<!\\right)(?:[.,;。]|です|입니다)\Z")
# What may precede a value without changing it.
_LEADING = re.compile(
    r"\A(\$?)(?:\\(?:text)?color\s*\{[^{}]*\}|\\(?:approx|sim|therefore|Rightarrow|implies|bf|Large|large|small)(?![a-zA-Z])|≈|∴"
    r"|(?:[Oo]ption|[Cc]hoice) (?=\(?[A-J]\)?\Z))\s*"
)
# It needs a word of three letters: fewer letters may be a product of variables.
_PROSE = re.compile(r"(?=.*[^\W\d_]{3})[\w\s.,:;!'\"()\-]*", re.DOTALL)
# Except the letters of "a pair" and "Tom's", and of names such as "vitamin C".
_VARIABLE = re.compile(r"(?<![\w'\u2019-])[b-hj-rt-z](?![\w'\u2019-])")
# Words that are formulas.
_FORMULAS = FUNCTIONS | {"inf", "infinity", "pi"}
# Words (neither commands nor products of variables) and signs that belong to no formula.
_MORE = re.compile(
    rf"(?<![\\a-zA-Z])(?!(?:{'|'.join(_FORMULAS)})\b)[^\W\d_]{{3}}|\b(?:is|so|we)\b|,\s*or\b"
    r"|(?<=[\d$}%])\s\(|\$\^|</|:\)|\A[=*_]|(?:[!?=*]|\.\.)\Z"
    r"|[^\x00-\u03ff\u2000-\u218f\u2200-\u23ff\uff00-\uffef]"
)
_GAPS = re.compile(r"\\[,;: ]|\\q?quad(?![a-zA-Z])")
_DEGREES = re.compile(r"\^\{?\s*\\circ(?![a-zA-Z])\s*\}?")
# Digits and their base. They begin with a digit: a letter may be a name with an index.
_BASED = re.compile(r"\(?(\d[\dA-F]*)\)?_\{?(\d{1,2}|[a-z]{3,8})\}?")
_BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_BASES += ["eleven", "twelve"]
# Words that change the value of the number after them, or before them.
_CHANGED_BEFORE = re.compile(
    r"(?:\A\s*|\b(?:is|are|be) )up to\s*[$(]*\Z|(?<!left )"
    r"\b(?:above|anything but|at (?:least|most)|below|double|exceed(?:s|ing)|over|root|than|triple"
    r"|twice|under|(?:cube|factorial|half|reciprocal|root|square) of)\s*[$(]*\Z",
    re.IGNORECASE,
)
_CHANGED_BEHIND = re.compile(
    r"\s*(?:(?:(?:cubed|minus|plus|squared)(?! [a-z]{2})|and a half|bn|divided|dozen|factorial"
    rf"|is (?:incorrect|not|wrong)|mn|{PARTS})\b|(?:over|times) [b-z]\b"
    r"|(?!more or less)(?:\w+ )?or (?:above|below|fewer|greater|higher|less|lower|more)\b)",
    re.IGNORECASE,
)
_ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"\s*({'|'.join(_ZEROS)})\b", re.IGNORECASE)
# After a scale: three hundred and twelve.
_FURTHER = re.compile(
    rf"(?: and)? (?:one|{'|'.join((*_BASES, *_ZEROS))}|[a-z]+teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)\b",
    re.IGNORECASE,
)
# Words that change a number near them.
_CHANGING = frozenset({*_ZEROS, "bn", "dozen", "minus", "mn", "negative", "not"})
# Larger exponents would write out too many digits.
_MAX_EXPONENT = 1000


def answer_of(episode: Episode) -> str:
    """The episode's last turn without its thoughts. Thoughts marked by special tokens, as with
    gpt-oss, are not in the text of a turn, so the message tells them apart."""
    turn, last = episode.turn, episode.messages[-1] if episode.messages else {}
    if last.get("reasoning_content") and not _THOUGHT.search(turn):
        return str(last.get("content") or "")
    return answer_part(turn)


def answer_part(turn: str) -> str:
    """A turn without its thoughts; "" after an unfinished thought unless text precedes it."""
    _, ending, behind = turn.rpartition("</think>")
    return behind if ending else turn.partition("<think>")[0]


def marked_answer(text: str) -> str | None:
    """The answer at the last mark of a text; None without a mark. A box inside an <answer> counts.

    >>> marked_answer("<answer>so \\\\boxed{\\\\frac{1}{2}}</answer>")
    '\\\\frac{1}{2}'
    """
    return next((found for found in _marked(text) if found is not None), None)


def _marked(text: str) -> Iterator[str | None]:
    """Yield the marked answers, last first; None for a box without an end."""
    ends: dict[int, int] = {}
    begin = len(text)
    for mark in reversed(list(_MARKS.finditer(text))):
        behind = text[mark.end() :]
        if mark[0] == "####":
            line, _, rest = behind.lstrip().partition("\n")
            if _NUMBER_FIRST.match(line) or not rest.strip():
                yield bare(line)
        elif mark[0] == "<answer>":
            inside, _, _ = behind.partition("</answer>")
            yield bare(inside)
        elif mark[0].startswith('"'):
            yield _of_json(text, mark.end())
        else:
            # In most texts the last box has an end, so earlier braces are matched only if needed.
            if begin:
                begin = mark.start() if begin == len(text) else 0
                ends = _ends_of_braces(text, begin)
            end = ends.get(mark.end())
            yield None if end is None else bare(text[mark.end() : end])


def _of_json(text: str, begin: int) -> str | None:
    """The value at this place; None if it is no JSON."""
    try:
        return bare(str(json.JSONDecoder(strict=False).raw_decode(text, begin)[0]))
    except (ValueError, RecursionError):
        return None


def stated_answer(text: str) -> str | None:
    """What follows the last "answer is" or "answer:" on its line; None without one.

    >>> stated_answer("A is too short. The answer is **(B)**.")
    '(B)'
    """
    places = list(_STATES.finditer(text))
    if not places:
        return None
    behind = text[places[-1].end() :].strip()
    line, _, rest = behind.partition("\n")
    said = _REASON.sub("", behind if _TAKEN_BACK.search(rest) else line, count=1)
    # What a choice says, such as Paris, may be the answer of the row.
    if not (choice(bare(said)) or _TAKEN_BACK.search(said)):
        said = _NEXT_SENTENCE.sub("", said, count=1)
    return bare(said)


def given_answer(text: str) -> tuple[str, bool]:
    """The answer of a text, and whether that is all that the text answers: a marked answer, or a
    stated one without words. Else it is what the text states among other words, or all of it.

    >>> given_answer("So $x = 5$, and the answer is 5x."), given_answer("He pays $5")
    (('5x', True), ('He pays $5', False))
    """
    marked = marked_answer(text)
    within = text if marked is None else marked
    stated = stated_answer(within)
    is_whole = marked is not None or bool(stated and not _MORE.search(_TEXT.sub("", stated)))
    return stated or bare(within), is_whole


def bare(answer: str) -> str:
    """An answer without surrounding white space, bold type and quotes, and without a final full
    stop, comma or semicolon.

    >>> bare("**B.**"), bare("**B**."), bare("5;"), bare("`B`."), bare("1, 2, ...")
    ('B', 'B', '5', 'B', '1, 2, ...')
    """
    text = answer.strip()
    if not text.endswith(".."):
        text = _BOLD.sub(r"\1", _STOP.sub("", text)).removeprefix("**").removesuffix("**").strip()
        text = _STOP.sub("", text)
    if quoted := _QUOTED.fullmatch(text):
        text = quoted[1].strip()
    return _LEADING.sub(r"\1", text)


def _ends_of_braces(text: str, start: int) -> dict[int, int]:
    """For each opening brace from `start` on: where its content ends, by where the content
    begins."""
    begun: list[int] = []
    ends = {}
    for found in _BRACES.finditer(text, start):
        if found[0] == "{" or found[0].startswith(("\\boxed", "\\fbox")):
            begun.append(found.end())
        elif found[0] == "}" and begun:
            ends[begun.pop()] = found.start()
    return ends


def plain(text: str) -> str:
    """Numbers as people type them: without LaTeX between thousands and around currency signs, and
    with the keyboard's minus.

    >>> plain("-\\\\$32,\\\\!348"), plain("12{,}345"), plain("5 \\\\times 10^{-3}")
    ('-$32,348', '12,345', '5e-3')
    """
    text = _joined(text.replace("\\$", "$").replace("{.}", "."))
    text = _POWER.sub(lambda m: f"e{m[1] or m[2]}", text)
    return _FRACTION.sub(_typed_fraction, _REPEATING.sub(_typed_repeating, text))


def _typed_repeating(found: re.Match[str]) -> str:
    """A repeating decimal as a fraction."""
    once, again = found[1] + found[2], found[3] or found[4]
    above = int(once + again) - int(once or "0")
    return f"{above}/{10 ** len(found[2]) * (10 ** len(again) - 1)}"


def _typed_fraction(found: re.Match[str]) -> str:
    """A fraction as typed: a space before it if a digit precedes it, and its minus in front."""
    above, below = found[1] or found[2], found[3] or found[4]
    space = " " if found.string[: found.start()][-1:].isdigit() else ""
    sign = "-" if above.startswith("-") != below.startswith("-") else ""
    return f"{space}{sign}{above.lstrip('-')}/{below.lstrip('-')}"


def latex(text: str) -> str:
    """Like `plain`, but for a parser of formulas: it keeps fractions and powers, and drops
    currencies."""
    text = _joined(re.sub(r"\\\$\s?", "", text)).translate(_SIGNS)
    text = _RAISED.sub(partial(_apart, sign="^"), _LOWERED.sub(partial(_apart, sign="_"), text))
    text = _SYSTEM.sub(_equations, text)
    for command, known in _COMMANDS:
        text = command.sub(known, text)
    uncounted = partial(_uncounted, words=Counter(re.findall("[a-zA-Z]+", text)))
    text = _COUNTED.sub(uncounted, _INTERVAL.sub(_interval, text))
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    return re.sub(r"(?<![\w\\])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,4})(?!\w)", r"\1\\times 10^{\2}", text)


def _apart(found: re.Match[str], sign: str) -> str:
    """Small digits as an exponent or an index."""
    digits = normalize("NFKC", found[0]).translate(_MINUS)
    return f"{sign}{digits}" if len(digits) == 1 else f"{sign}{{{digits}}}"


def _equations(found: re.Match[str]) -> str:
    """The equations side by side; unchanged if an & separates more than their sides, as in a
    matrix."""
    rows = re.split(r"\\\\", re.sub(r"&\s*=|=\s*&", "=", found["rows"]))
    is_list = found["brace"] or found["name"] != "array"
    if not is_list or not all("=" in row and "&" not in row for row in rows if row.strip()):
        return found[0]
    return ", ".join(row.strip(" \n,;") for row in rows if row.strip())


def _uncounted(found: re.Match[str], words: Counter[str]) -> str:
    word = found["word"]
    # In "3 men or 5 men" the word adds nothing; in "5 men and 3 women" it matters.
    is_of_one = words[word] > 1 and len(word) > 1
    if word.casefold() in _FORMULAS | _CHANGING or not (is_of_one or unit_of(word)):
        return found[0]
    return " \\text{ and } " if found["further"] else ""


def _interval(found: re.Match[str]) -> str:
    begin = found[1].replace("]", "(")
    end = found[4].replace("[", ")")
    return f"{begin}{found[2]},{found[3]}{end}"


def _joined(text: str) -> str:
    """Numbers with their digits adjacent or with commas between, and with the keyboard's minus."""
    text = _DASH.sub("-", _DECIMAL.sub(".", text.translate(_TYPED))).replace("{,}", ",")
    return _THOUSANDS.sub("", _CURRENCY.sub("", _CLOSER.sub("", text))).replace("~", " ")


@lru_cache(maxsize=64)
def written(text: str) -> str:
    """A formula without what only changes its look: sizes of brackets and fractions, text commands,
    brackets around a letter, white space except between digits.

    >>> written("\\\\left( 3, \\\\dfrac{x}{2} \\\\right)"), written("1 1/2"), written("(C)")
    ('(3,\\\\frac{x}{2})', '1 1/2', 'C')
    """
    text = _TEXT.sub(r"\1", _SIZES.sub("", latex(text).strip("$")))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _SPACES.sub("", text.replace("\\varnothing", "\\emptyset"))
    return _LETTER.sub(r"\1\2", text)


def choice(text: str) -> tuple[str, str] | None:
    """The letter of a choice and the text after it; None for any other answer, or in doubt.

    >>> choice("\\\\textbf{(A)}\\\\ 12"), choice("B. Paris"), choice("(C)"), choice("(A) or (B)")
    (('A', '12'), ('B', 'Paris'), None, None)
    """
    is_text = _TEXT.match(text)
    found = _CHOICE.fullmatch(f"{is_text[1]}{text[is_text.end() :]}" if is_text else text)
    if found is None or _NO_CHOICE.match(_TEXT.sub(r"\1", found["said"])):
        return None
    *letters, said = found.groups()
    return next(filter(None, letters)), said


def words(text: str) -> str:
    """An answer that is a word, a name or a date, in a form to compare; "" for a formula or a
    number.

    >>> words("\\\\text{June  20}"), words("6:00 p.m."), words("(C)"), words("2x")
    ('jun 20', '6:00 pm', '', '')
    """
    if _TEXTS.fullmatch(text.strip()):
        text = _TEXT.sub(r"\1", text).strip("$ ")
    plainly = " ".join(text.split()).strip(" .!").casefold()
    if time := _TIME.fullmatch(plainly):
        return f"{time[1]}{time[2] or ':00'} {time[3]}m"
    if _DATE.fullmatch(plainly):
        return re.sub(r"\b0", "", plainly)
    plainly = _ABBREVIATED.sub("", _ORDINAL.sub("", plainly))
    plainly = plainly.removeprefix("an ").removeprefix("the ")
    if date := _date(plainly):
        return date
    if not re.fullmatch(r"[^\W\d_][\w ,.'\-]*", plainly) or _FORMULAS & set(plainly.split()):
        return ""
    return plainly if plainly == "no" or re.search(r"[^\W\d_]{3}", plainly) else ""


def _date(text: str) -> str:
    """The month, the day and the year, if any, of a date in words or of ISO 8601; else ""."""
    if iso := _ISO_DATE.fullmatch(text):
        return f"{_MONTHS[int(iso[2]) - 1]} {int(iso[3])} {iso[1]}"
    found = _MONTH_FIRST.fullmatch(_DAY_FIRST.sub(r"\2 \1", text))
    return f"{found[1]} {int(found[2])} {found[3] or ''}".strip() if found else ""


def number_in(text: str) -> Fraction | None:
    """The number that an answer begins with (after its last "=", if any); else its last number.
    None if a formula continues after the number, since its value is another.

    >>> number_in("x = -1,007 apples"), number_in("\\\\frac{1}{2}"), number_in("none")
    (Fraction(-1007, 1), Fraction(1, 2), None)
    """
    text = plain(text)
    behind = text.rpartition("=")[2].strip().lstrip("$( ")
    begins = _NUMBER.match(behind)
    if begins and (_OPERATOR.match(behind, begins.end()) or _is_factor(behind[begins.end() :])):
        return None
    found = (_value(begins) if begins else None, _last_number(behind), _last_number(text))
    return next((number for number in found if number is not None), None)


def _is_factor(behind: str) -> bool:
    """Whether a letter that is no unit follows a number."""
    return re.match(r"[a-zA-Zπ](?![\w'])", behind) is not None and unit_of(behind[0]) is None


def whole_number(text: str) -> Fraction | None:
    """The number that the whole text is, with or without a currency sign.

    >>> whole_number("$1,000"), whole_number("7\\\\text{ million}"), whole_number("7 cm")
    (Fraction(1000, 1), Fraction(7000000, 1), None)
    """
    text = _plainly(text).strip("$").removesuffix(".")
    found = _NUMBER.fullmatch(text.replace(" ", "") if _SPACED.fullmatch(text) else text)
    if found:
        return _value(found)
    beginning = _NUMBER.match(text)
    scale = beginning and _SCALE.fullmatch(text, beginning.end())
    return _scaled(beginning, scale) if beginning and scale else None


def counted(text: str) -> Fraction | None:
    """The only number of a text that otherwise consists of words, such as a unit.

    >>> counted("12 slices"), counted("They cost $12"), counted("12 xy"), counted("5 of 12 slices")
    (Fraction(12, 1), Fraction(12, 1), None, None)
    >>> counted("12 m/s"), counted("1.2 million people"), counted("at least 12 slices")
    (Fraction(12, 1), Fraction(1200000, 1), None)
    """
    measure = measured(text)
    if measure and measure.is_evident and (value := whole_number(measure.value)) is not None:
        return value
    number = _one_number(text)
    if number is None or _is_changed(number):
        return None
    before, behind = number.string[: number.start()], number.string[number.end() :]
    if before[-1:].isalnum() or behind[:1].isalnum():
        return None
    if scale := _SCALE.match(number.string, number.end()):
        behind = number.string[scale.end() :]
    if scale is None and not _PROSE.fullmatch(f"{before} {behind}"):
        return None
    words_beside = set(re.findall(r"\w+", f"{before} {behind}".casefold()))
    is_formula = _VARIABLE.search(f"{before} {behind}")
    if is_formula or words_beside & (_FORMULAS | _CHANGING):
        return None
    return _scaled(number, scale)


def measured(text: str) -> Quantity | None:
    """The value and the unit of an answer; None without a unit.

    >>> measured("5\\\\text{ cm}").unit == measured("5 km").unit, measured("5 apples")
    (False, None)
    """
    inner = _TEXT.sub(r"\1", text)
    plainly = _GAPS.sub(" ", _DEGREES.sub("°", plain(inner))).strip()
    # A letter in bold is no unit.
    is_text = inner != text and not re.search(r"(?:bf|it|symbol|bm)\s*\{\s*[a-zA-Z]\s*\}", text)
    # A dollar sign at the end closes a formula, so one at the beginning opens it.
    return quantity(plainly.strip("$") if plainly.endswith("$") else plainly, is_text=is_text)


def digits_to_base(text: str) -> tuple[str, int] | None:
    """The digits and the base of a number that is written with a base.

    >>> digits_to_base("(2516)_{\\\\text{eight}}"), digits_to_base("1011")
    (('2516', 8), None)
    """
    found = _BASED.fullmatch(written(text))
    if found is None or not (found[2].isdigit() or found[2] in _BASES):
        return None
    base = int(found[2]) if found[2].isdigit() else _BASES.index(found[2]) + 2
    return found[1].lstrip("0") or "0", base


def is_changed(text: str) -> bool:
    """Whether words beside the only number of a text change its value.

    >>> is_changed("at least 7"), is_changed("7 million"), is_changed("7 more apples")
    (True, True, False)
    """
    number = _one_number(text)
    return number is not None and (
        _SCALE.match(number.string, number.end()) is not None or _is_changed(number)
    )


def _is_changed(number: re.Match[str]) -> bool:
    text, end = number.string, number.end()
    if scale := _SCALE.match(number.string, number.end()):
        end = scale.end()
        if _FURTHER.match(text, end):
            return True
    before = _CHANGED_BEFORE.search(text[: number.start()])
    return bool(before or _CHANGED_BEHIND.match(text, end))


def _one_number(text: str) -> re.Match[str] | None:
    found = list(_NUMBER.finditer(_plainly(text)))
    return found[0] if len(found) == 1 else None


def _plainly(text: str) -> str:
    return plain(_TEXT.sub(r"\1", text)).strip()


def _scaled(number: re.Match[str], scale: re.Match[str] | None) -> Fraction | None:
    value = _value(number)
    return value if value is None or scale is None else value * 10 ** _ZEROS[scale[1].casefold()]


def shown_number(number: Fraction) -> str:
    """A number as people write it: a decimal if it is a finite one, else a fraction; the first 28
    digits of a long one.

    >>> shown_number(Fraction(1007)), shown_number(Fraction(-1, 4)), shown_number(Fraction(1, 3))
    ('1007', '-0.25', '1/3')
    """
    value = Decimal(number.numerator) / Decimal(number.denominator)
    is_long = max(abs(number.numerator), number.denominator) >= 10**28
    if Fraction(value) == number or is_long:
        return f"{value.normalize():f}" if abs(value.adjusted()) < 28 else f"{value.normalize()}"
    return str(number)


def answered_number(turn: str) -> Fraction | None:
    """The number that a turn answers with: that of its marked answer, or of what it states without
    words (none if that is another value, as in 7x); else the last number of what it states, if that
    begins with a number, or of all of it. None without a number.

    >>> answered_number("3 + 4 = 7, so #### 1,007"), answered_number("The answer is 2 * 4, so 8.")
    (Fraction(1007, 1), Fraction(8, 1))
    """
    text = answer_part(turn)
    answer, is_whole = given_answer(text)
    if is_whole:
        return counted(answer) if is_changed(answer) else number_in(answer)
    # A sentence behind "Answer:" may be the first one of a solution.
    number = _last_number(plain(answer)) if _NUMBER_FIRST.match(answer) else None
    return _last_number(plain(text)) if number is None else number


def _last_number(text: str) -> Fraction | None:
    """The last number that can be read."""
    values = map(_value, reversed(list(_NUMBER.finditer(text))))
    return next((value for value in values if value is not None), None)


def _value(found: re.Match[str]) -> Fraction | None:
    exponent = int((found["exponent"] or "0")[:8])
    if abs(exponent) > _MAX_EXPONENT:
        return None
    try:
        value = _exact(found["number"]) * Fraction(10) ** exponent
        value /= _exact(found["denominator"]) if found["denominator"] else 1
    except (InvalidOperation, ZeroDivisionError):
        return None
    if found["whole"] and value >= 1:
        return None
    value += _exact(found["whole"]) if found["whole"] else 0
    return -value if "-" in (found["sign"], found["inner"]) else value


def _exact(digits: str) -> Fraction:
    """The exact value, also of more digits than `int` accepts."""
    return Fraction(Decimal(digits.replace(",", "")))
