"""What a response answers is read by one reader, however its numbers and words are written."""

import time
from dataclasses import replace
from fractions import Fraction

import pytest

from actors.rewards.answers import (
    answer_part,
    answered_number,
    marked_answer,
    words,
)
from actors.rewards.builtin import format_of_tags, math_at_once, numeric_answer
from actors.rewards.code.reward import solution_of
from actors.rewards.math_answer import math as math_of_siblings
from streamrl.interfaces import Episode, Prompt
from streamrl.types import FinishReason

# One of each kind that MATH (arXiv 2103.03874) has, and what people type instead.
KINDS = [
    *("-5", "0", "1/2", "1,000", "10,080", ".5", "x=5", "1,-2", "\\pi", "6 - 5i", "1111_2", "2k+2"),
    *(r"\$18.90", r"\$32,\!348", r"\frac{3}{56}", r"\dfrac{9}{7}", r"11\sqrt2", r"1 \frac{1}{2}"),
    *(r"\left( 3, \frac{\pi}{2} \right)", r"(6,31,-1)", r"[-2,7]", r"(0,9) \cup (9,36)"),
    *(r"x \in [-2,7]", r"(-\infty, 0)", r"\{1\pm\sqrt{5},-2\}", r"3\pm 2\sqrt{2}", "p - q"),
    *(r"90^\circ", r"8\%", r"5.4 \text{ cents}", r"12 \text{ cm}^2", "6:00 PM", r"0.\overline{3}"),
    *(r"\text{Evelyn}", r"\text{(C)}", r"\text{June 20}", "even", "left", "C", "y = 2x + 3"),
    *(r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"2.5\times 10^{3}", "1e-05", r"\tan x"),
]


def episode(response: str, answer: object = "42", prefill: str = "") -> Episode:
    row = {} if isinstance(answer, str) else {"reward_model": {"ground_truth": answer}}
    prompt = Prompt("question", answer if isinstance(answer, str) else "", row)
    return Episode(prompt, response, len(response), FinishReason.STOP, prefill=prefill)


def math(episode: Episode) -> float:
    (score,) = math_of_siblings([episode])
    return score.reward


SEVERAL = (
    *("(A), (B), and (D)", "(A) or (B)", "(A) and (C)", "(A)(C)", "A) B) C)", "A:B"),
    *("A. is wrong, B is right", "A. No, wait, it is B.", "A: no, B: yes", "A) 5, wait, it is c"),
)
FORMULAS = ("2^{10}", "2 + 3", r"2 \cdot 3", r"2\sqrt{3}", r"2\pi", "7 - 2", "2**3")
FORMULAS_OF_8 = (
    *("x + 8", "8!", "\N{SQUARE ROOT}8", "x > 8", "x^8", "8/x", "8 i", "|8-x|", "x, 8"),
    "8 bn",
    "\N{PLUS-MINUS SIGN}8",
)
LETTERS_C = (
    r"\boldsymbol{C}",
    r"\bm{(C)}",
    r"\mathbf{(C)}",
    r"\mathsf{C}",
    r"\textsf{C}",
    "Option C",
)
MEASURES_OF_8 = ("8 m/s", "8 km/h", "8 cm^2", "8 ft^{3}", r"8\ \mathrm{m}/\mathrm{s}", "8 g/mL")
NOT_8 = (
    *("at least 8", "at most 8", "more than 8", "up to 8", "half of 8", "twice 8", "root of 8"),
    *("8 hundredths", "8 thirds", "8 and a half", "8 squared", "8 plus x", "8 over x", "8 million"),
    *("8 or more", "8 is wrong", "anything but 8"),
)


@pytest.mark.parametrize("answer", KINDS)
def test_every_kind_of_answer_equals_itself_and_no_other_number(answer):
    assert math(episode(f"So \\boxed{{{answer}}}.", answer)) == 1
    assert math(episode(f"<answer>{answer}</answer>", answer)) == 1
    thought = f"<think>\\boxed{{{answer}}}</think>"
    assert math(episode(rf"{thought}\boxed{{987654}}", answer)) == 0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("-5", "-5", 1),
        ("so it is -5", "-5", 1),
        ("so it is 5", "-5", 0),
        ("1,000", "1000", 1),
        (r"\boxed{12\,345}", "12345", 1),
        (r"\boxed{12{,}345}", "12345", 1),
        ("\\boxed{\N{MINUS SIGN}5}", "-5", 1),
        (r"\boxed{0.00001}", "1e-05", 1),
        (r"\boxed{1}", "1e-05", 0),
        ("He pays 3 * 6 = 18 dollars.", "$18", 1),
        ("He pays 3 * 6 = 19 dollars.", "$3,500.", 0),
        ("\\boxed{-4}", "1\N{EN DASH}5", 0),
        ("It takes 3\N{EN DASH}5 days", "-2", 0),
        ("42 / 6 = 7.\nAnswer - 7", "7", 1),
        ("The answer cannot be determined", "The answer cannot be determined", 1),
        (r"\boxed{\approx 5}", "5", 1),
        (r"\boxed{\therefore x = 5}", "5", 1),
        ("#### \N{EN DASH}7\n\nI hope this helps with all 4.", "-7", 1),
        ("<answer>42</answer>", "2", 0),
        ("<think>2", "2", 0),
        ("#### 42", "so 6 * 7 = 42\n#### 42", 1),
        (r"\boxed{12\text{ cm}}", "12", 1),
        (r"\boxed{Left}", "left", 1),
        ("left", "left", 1),
        (r"\boxed{0.25}", ["1/2", "0.25"], 1),
        (r"\boxed{0.2}", ["1/2", "0.25"], 0),
        (r"\boxed{0.5}", '["1/2", "x"]', 1),
        (r"\boxed{0.5}", "['1/2', 'x']", 1),
        (r"\boxed{[1,2]}", "[1, 2]", 1),
        (r"\boxed{3\frac{1}{2}}", r"\frac{7}{2}", 1),
        (r"\boxed{-2\tfrac13}", r"-\frac{7}{3}", 1),
        (r"\boxed{13.2}", r"13\frac{1}{5}", 1),
        (r"\boxed{31/2}", r"3\frac{1}{2}", 0),
        (r"\boxed{3 1/2}", "3.5", 1),
        ("\\boxed{3\N{VULGAR FRACTION ONE HALF}}", r"\frac{7}{2}", 1),
        (r"\boxed{\frac{1}{2}3}", "1.5", 1),
        (r"\boxed{\frac{1}{-2}}", "-0.5", 1),
        ("#### 12 dollars", "12", 1),
        (r"\boxed{12 miles per hour}", "12", 1),
        ("<answer>The answer is 5</answer>", "5", 1),
        (r"\boxed{13 dollars}", "12", 0),
        (r"\boxed{12 thousand}", "12", 0),
        (r"\boxed{5 sqrt}", "5", 0),
        (r"\boxed{\text{June }20}", r"\text{June 20}", 1),
        (r"\boxed{\text{June }21}", "June 20", 0),
        ("\\boxed{30\N{DEGREE SIGN}}", "30", 1),
        ("\\boxed{(1,\N{INFINITY})}", r"(1,\infty)", 1),
        (r"\boxed{\varnothing}", r"\emptyset", 1),
        (r"\boxed{1.6 \times 10^{-19} \text{ J}}", r"3.2 \times 10^{-19} \text{ J}", 0),
        (r"\boxed{2^{-99}}", r"\frac{1}{2^{99}}", 1),
        (r"\boxed{12.5\%}", "0.125", 1),
        (r"\boxed{12.6\%}", "12.5", 0),
        (r"\boxed{2}", r"1, 2, \ldots, n", 0),
        (r"\boxed{0.1\overline{6}}", r"\frac{1}{6}", 1),
        (r"\boxed{0.16}", r"0.1\overline{6}", 0),
        (r"\boxed{6:00 \text{ p.m.}}", "6:00 PM", 1),
        (r"\boxed{6:00 \text{ a.m.}}", "6:00 PM", 0),
        ("B is too small. Answer: C", r"\text{(B)}", 0),
        ("The answer is 7.\n\nIt is \\boxed{8}.", "7", 0),
        (r"\boxed{42 000}", "42,000", 1),
        (r"\boxed{12~\text{square units}}", "12", 1),
        (r"\boxed{5 m/s}", r"5 \text{ m/s}", 1),
        ("The answer is (C) 8.", "B", 0),
        (r"\boxed{B. Paris}", "B. Paris", 1),
        ("The answer is not 5, the answer is 8, but 5 is tempting.", "5", 0),
        ("The answer is not 5. The answer is 8 cm, but many would say 5 cm.", "5", 0),
        (r"\boxed{\textbf{(C)}\ 2\sqrt{3}}", r"\sqrt{13}", 0),
        ("Answer: **C.** 12", "C", 1),
        *((f"<answer>{said}</answer>", "A", 0) for said in SEVERAL),
        (r"\boxed{\text{C. elegans}}", "C", 0),
        (r"\boxed{A.8}", "8", 0),
        (r"\boxed{M:N = 2:1}", "M", 0),
        *((rf"\boxed{{\text{{{formula}}}}}", "8", 0) for formula in FORMULAS_OF_8),
        (r"\boxed{12 \choose 5}", r"\binom{12}{5}", 1),
        (r"\boxed{12 choose 5}", "792", 1),
        (r"\boxed{12 choose 5}", "12", 0),
        (r"\boxed{\textbf{(A)}\ \text{No change}}", "A", 1),
        ("The answer is A. No the right one is c", "A", 0),
        ("The answer is: the total comes up to 14 dollars.", "14", 1),
        (r"\boxed{\text{up to }14}", "14", 0),
        ("<answer>3 hundred twelve</answer>", "300", 0),
        ("<answer>3 hundred people</answer>", "300", 1),
        (r"\boxed{5m^2}", "5", 0),
        (r"\boxed{5\text{ m}^2}", "5", 1),
        (r"\boxed{(A) No change}", "B", 0),
        ("The answer is (A) No change.", "A", 1),
        *((rf"\boxed{{{letter}}}", "C", 1) for letter in LETTERS_C),
        (r"\boxed{\mathbf{(D)}}", "C", 0),
        *((rf"\boxed{{{measure}}}", "8", 1) for measure in MEASURES_OF_8),
        ("\\boxed{90\N{DEGREE SIGN}C}", "90", 1),
        (r"\boxed{9 m/s}", "8", 0),
        *((rf"\boxed{{{other}}}", "8", 0) for other in NOT_8),
        *((rf"\boxed{{\text{{{other}}}}}", "8", 0) for other in NOT_8),
        (r"\boxed{1.2\text{ million people}}", "1200000", 1),
        (r"\boxed{2x + 1 < 5}", r"(-\infty, 2)", 0),
    ],
)
def test_math_of_what_people_write(response, answer, reward):
    assert math(episode(response, answer)) == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("1,234.5", "2469/2"), ("-3", "-3"), (".5", "1/2"), ("no", None), ("#### 7 then 8", "7")),
        *(("-$5", "-5"), (r"-\$5", "-5"), ("$-5", "-5"), ("- 5", "-5"), ("10-5", "5")),
        *(("\N{MINUS SIGN}5", "-5"), ("12{,}345", "12345"), (r"12\,345", "12345")),
        *(("it is \N{EN DASH}5", "-5"), ("5\N{EN DASH}7", "7"), ("so \N{EN DASH} 5", "5")),
        *(("\N{NON-BREAKING HYPHEN}5", "-5"), ("\N{FULLWIDTH HYPHEN-MINUS}5", "-5")),
        *(("12\N{NARROW NO-BREAK SPACE}345", "12345"), ("in 2020 300 came", "300")),
        *(("1,00,000", "100000"), ("1,2,3", "3"), ("1,234, then", "1234"), ("5%", "5")),
        *(("1/2", "1/2"), (r"\frac{1}{2}", "1/2"), (r"\boxed{-\frac34}", "-3/4"), ("1/0", None)),
        *(("1e-05", "1/100000"), ("1e999999", None)),
        *((r"2.5 \times 10^{3}", "2500"), (r"\boxed{\$18} for 2", "18"), (r"\boxed{x = 5}", "5")),
        *((r"\boxed{yes}, not 5", None), ("<think>5</think>so 7", "7"), ("<think>5", None)),
        *(("so it is 3 1/2", "7/2"), (r"#### -2\frac{1}{3}", "-7/3"), ("1,000 1/4", "4001/4")),
        *(("in step 3\n1/2", "1/2"), ("1/2 1/3", "1/3"), ("3\N{VULGAR FRACTION ONE HALF}", "7/2")),
        *((r"\frac{1}{-2}", "-1/2"), (r"-\frac{3}{4}", "-3/4")),
        (r"\boxed{0 of 5}", "0"),
        *((rf"\boxed{{{formula}}}", None) for formula in FORMULAS),
        (r"\boxed{2 + 3 = 5}", "5"),
        *((r"\boxed{90^{\circ}}", "90"), (r"\boxed{5^{th}}", "5"), ("#### 18!", "18")),
        *(("#### **18** (dollars)", "18"), (r"\boxed{11,\! 111}", "11111")),
        (r"\boxed{1} of <answer>\boxed{2} or 3</answer>", "2"),
    ],
)
def test_the_number_of_an_answer(text, number):
    assert answered_number(text) == (None if number is None else Fraction(number))


def test_letters_without_an_end_are_no_choice():
    assert math_at_once(episode("A. " * 5000, "12")) is None
    assert math(episode("A. " * 5000, "A")) == 0


def test_white_space_without_an_end_is_passed_over():
    assert answered_number("so 7" + "\n" * 200_000) == 7


@pytest.mark.parametrize(
    "text",
    [
        "\\begin{cases} x " * 6000,
        "\\sin" + " " * 50_000 + "3",
        "\\sin 3^" + " " * 50_000,
        "The answer is A." + "\n" * 50_000 + "actually",
        "answer is `" * 9000,
        "5 " * 50_000 + "€",
        "```py\n" * 9000 + " " * 50_000,
        *("```" + "a" * 50_000, "```" + " " * 50_000),
    ],
    ids=lambda text: text[:8].strip(),
)
def test_nothing_takes_long_to_read(text):
    start = time.process_time()
    assert not math_at_once(episode(text, "12"))
    solution_of(text)
    assert time.process_time() - start < 2


def test_a_number_of_any_length():
    assert answered_number("9" * 5000) == 10**5000 - 1


def test_the_opposite_of_an_answer_is_wrong():
    for answer in ("-$5", r"-\$5", "\N{MINUS SIGN}5"):
        assert numeric_answer(episode("#### -5", answer)).reward == 1
        assert numeric_answer(episode("#### 5", answer)).reward == 0
    assert numeric_answer(episode("2", "1/2")).reward == 0
    assert numeric_answer(episode("0.50001", "1/2"), tolerance=1e-4).reward == 1


@pytest.mark.parametrize(
    "vast", ["1^{1^{1^1}}", "2^{10^{7}}", "2^{1000000}", "10000!", "((3)!)!", "\\binom{100000}{1}"]
)
def test_a_vast_number_is_written_or_wrong(vast):
    assert math(episode(f"\\boxed{{{vast}}}", "5")) == 0
    assert math(episode(f"\\boxed{{{vast} + x}}", "x + 5")) == 0
    assert math(episode("\\boxed{5x}", f"{vast} x")) == 0
    assert math(episode(f"\\boxed{{{vast}}}", vast)) == 1
    assert math(episode(f"Of ${vast}$ the last digit is 3.", "3")) == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("\\boxed{7}\n\n#### Verification\nIt is 3 + 4.", 7),
        ("#### Step 2: add\n3 + 4 are 7.", 7),
        ("#### **Step 2**\n3 + 4 are 7.", 7),
        ("#### 1. Understanding\n3 + 4 are 7.", 7),
        ("#### **2) Adding**\n3 + 4 are 7.", 7),
        ("##### 3\n3 + 4 are 7.", 7),
        ("#### 7\nQuestion: 3 + 5?", 7),
        ("#### **-7** apples\n3", -7),
        ("3\n#### Answer: 7\n", 7),
        ("#### 7 = x", 7),
    ],
)
def test_a_heading_is_no_answer(text, number):
    assert answered_number(text) == number


def test_a_mark_without_an_end_is_none():
    assert marked_answer(r"\boxed{1} and \boxed{2") == "1"
    assert marked_answer(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert marked_answer("<answer>3") == "3"
    assert marked_answer("3") is None


def test_what_the_chat_template_has_opened_is_thought():
    opened = "<think>\n"
    assert numeric_answer(episode("it may be 42", prefill=opened)).reward == 0
    assert numeric_answer(episode("it may be 41</think>42", prefill=opened)).reward == 1
    assert answer_part("<think>\n\n</think>\n\n42").strip() == "42"


def test_what_a_channel_thinks_is_no_answer():
    """Of gpt-oss, whose text has no mark between the channels."""
    thought = {"role": "assistant", "reasoning_content": r"It may be \boxed{42}.", "content": ""}
    text = r"analysisIt may be \boxed{42}."
    for content, reward in (("", 0), (r"\boxed{41}", 0), ("It is 42.", 1)):
        message = {**thought, "content": content}
        said = replace(episode(f"{text}assistantfinal{content}"), messages=(message,))
        assert numeric_answer(said).reward == math(said) == reward


def test_the_format_counts_what_the_chat_template_has_opened():
    response = "a</think><answer>b</answer>"
    assert format_of_tags(episode(response)) == 0
    assert format_of_tags(episode(response, prefill="<think>\n")) == 1
    assert format_of_tags(episode(f"<think>{response}", prefill="<think>\n")) == 0


def test_words_are_no_formulas():
    assert words(r"\textbf{June  20}") == "jun 20"
    assert not any(map(words, ["2x", "(C)", r"\sin x", "sin x", "xy", "12", ""]))


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"\boxed{\left( 3, \dfrac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})", 1),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{2.5}", ["7", r"\frac{1}{2}"], 0),
        ("so it is felt", "left", 0),
        (r"\boxed{1 1/2}", r"\frac{11}{2}", 0),
        (r"\boxed{11/2}", "1 1/2", 0),
        (r"\boxed{\frac{1}{2}3}", r"\frac{1}{23}", None),
        (r"\boxed{2x + 1}", "1 + 2x", None),
        ("3 apples", "3", 1),
        ("3 apples", "4", None),
        ("3 xy", "3", None),
        ("3 of 4 apples", "3", None),
        ("the 3rd apple", "3", None),
        ("3", "", None),
        ("#### 42 dollars", "so 6 * 7 = 42\n#### 42", 1),
        ("#### 7", "so 6 * 7 = 42\n#### 42", 0),
    ],
)
def test_what_takes_no_math_verify_is_decided_at_once(response, answer, reward):
    decided = math_at_once(episode(response, answer))
    assert (None if decided is None else decided.reward) == reward


@pytest.mark.parametrize(
    ("response", "extracted"),
    [
        ("so it is $1,007.50 of 9", "9"),
        ("#### $1,007.50 of 9", "1007.5"),
        ("1/3", "1/3"),
        ("<think>7", ""),
        ("none", ""),
        (f"1{'0' * 5000}", "1E+5000"),
        (f"1/{'7' * 40}", "1.285714285714285714285714286E-40"),
    ],
)
def test_a_numeric_answer_says_which_number_it_has_read(response, extracted):
    assert numeric_answer(episode(response)).extracted == extracted


@pytest.mark.parametrize(
    ("response", "answer", "extracted"),
    [
        (r"so \boxed{\dfrac{1}{2}}", "0.5", r"\dfrac{1}{2}"),
        (r"so \boxed{2x + 1}", "1 + 2x", "2x + 1"),
        ("so it is 3 apples", "3", "3"),
        ("so $2x + 1$", "1 + 2x", "2x + 1"),
        ("I do not know", "3", ""),
        ("So the answer is (C).", "C", "(C)"),
        ("So the answer is (C).", "D", "(C)"),
    ],
)
def test_math_says_which_expression_it_has_read(response, answer, extracted):
    """At once, or in its process."""
    (score,) = math_of_siblings([episode(response, answer)])
    assert score.extracted == extracted


def test_what_is_stated_is_shown_before_the_numbers_on_the_way_to_it():
    for text, shown in (
        ("12 + 30 = 42. The answer is B.", "B"),
        ("3 * 3 = 9. The answer is Tuesday.", "Tuesday"),
        ("The answer is 5 apples.", "5"),
        ("So the answer is not 5. The answer is 8, but let me double-check.", "8"),
    ):
        (score,) = math_of_siblings([episode(text, "no")])
        assert score.extracted == shown
