"""Answers in the forms of public data sets; each line has had a wrong verdict."""

import time
from fractions import Fraction

import pytest

from actors.rewards.answers import answered_number, marked_answer
from actors.rewards.builtin import numeric_answer
from actors.rewards.math_answer import math
from streamrl.errors import RolloutError
from streamrl.interfaces import Episode, Prompt
from streamrl.types import FinishReason

UNION = r"(-\infty,-2)\cup(2,\infty)"
ROOTS = r"\frac{-1\pm\sqrt{5}}{2}"
SYSTEM = r"\left\{\begin{array}{l} x=1, \\ y=2 \end{array}\right."
PIECES = r"\begin{cases} x^2 & x>0 \\ 0 & x \le 0 \end{cases}"
COLUMN = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"


# Of which 5 is a part.
OF_5 = (
    *("5x", "$5x + 1$", "x + 5", "$5!$", "x^5", "5 or 6", "5, 6", "(3, 5)", "x < 5"),
    "x = 3 or x = 5",
)
# What people write around an answer.
AROUND_5 = (
    *("5!", "5 \U0001f389", "x = **5**.", "12 - 7 = **5**", "$\\approx 5$.", "5 m^2."),
    *("5?", "5...", "\u2192 5", "= 5.", "*5*.", "5 :)", "$x = 5$ cm$^2$.", "5, or 500%."),
    *("10/2 (500%).", "\n\\[\n5\n\\]\nin 12 steps", "\n$$\nx = 5.\n$$"),
)
MARKS = (
    *("答案\uff1a", "答案是", "Réponse :", "La respuesta es", "**Antwort:**", "Ответ:", "정답:"),
    *("Jibu:", "La respuesta correcta es", "A resposta final é", "정답은", "答えは、"),
)


def episode(response: str, answer: str) -> Episode:
    return Episode(Prompt("question", answer), response, len(response), FinishReason.STOP)


def verdict(response: str, answer: str) -> float:
    (score,) = math([episode(response, answer)])
    return score.reward


# The answer, what equals it, and what does not.
BOXED = [
    # Intervals and solved inequalities: another inequality may be the question.
    ("[2,5)", [r"2 \le x < 5", r"5 > x \ge 2", "[2;5["], ["2 < x < 5", "2x < 10", "[2,5]"]),
    (r"(-\infty,3)", ["x<3", "3 > x", r"]-\infty;3["], [r"x \le 3", "x > 3", "x < y", "2x < 6"]),
    (UNION, [r"x<-2 \text{ or } x>2", r"(-\infty,-2),(2,\infty)"], ["-2<x<2", "|x| > 2"]),
    (r"x<-2 \text{ or } x>2", [UNION, "x > 2, x < -2"], ["(-2,2)"]),
    (r"(-\infty,1)\cup(1,\infty)", [r"x \neq 1"], [r"x \neq 2", "x > 1"]),
    (r"m \in (-\infty, 1)", ["m < 1"], ["x < 1", "m > 1"]),
    (r"(-\infty,\frac12)", [r"x < \int_0^1 x dx"], [r"x > \int_0^1 x dx"]),
    (r"x > 50\%", ["x > 0.5", r"(\frac{1}{2}, \infty)"], [r"x > 5\%"]),
    ("0<a<1", ["(0,1)"], ["0 < x < 1", r"0<a\le 1"]),
    (r"\{x \mid \frac{1}{2} < x \leq 2\}", [r"(\frac12,2]", "0.5 < x \\le 2"], ["[0.5,2]"]),
    ("(1,2]", [r"\left\{x \in \mathbb{R} | 1 < x \le 2\right\}"], [r"\{x | 1 < x < 2\}"]),
    ("(1,4)", [], ["(1,3),(2,4)"]),
    (r"(-\infty,\infty)", ["all real numbers"], [r"x>2 \text{ and } x<5"]),
    (r"\emptyset", [r"\text{There is no solution}", "No solution exists"], ["0"]),
    # Units on both sides.
    (r"5\text{ cm}", ["50 mm", r"0.05\,\mathrm{m}", "5"], ["5 m", r"5\text{ cm}^2", "5 inches"]),
    (r"12 \text{ cm}^2", ["12 square centimeters", r"1200 \text{ mm}^2"], [r"12 \text{ cm}^3"]),
    (r"72 \mathrm{~km} / \mathrm{h}", ["20 m/s", "72 kilometers per hour"], ["72 mph"]),
    (r"120 \text{ minutes}", [r"2 \text{ hours}", "2 h"], [r"2 \text{ minutes}"]),
    (r"10\pi \text{ cm}", [r"10\pi"], [r"10\pi \text{ m}"]),
    (r"\$18.90", ["1890 cents", "18.9 dollars"], ["1890"]),
    (r"5.4 \text{ cents}", [r"\$0.054"], [r"\$5.4"]),
    (r"100 ^\circ\text{C}", ["100 °C"], ["100 °F"]),
    (r"25\text{ J}", [r"25 \text{ N}\cdot\text{m}", "0.025 kJ"], ["25 N", "25 W"]),
    ("15", ["15cm^2", "15ft²", "15 m²"], ["16cm^2"]),
    (r"5 \Omega", ["5"], ["6"]),
    ("5", [r"5 \Omega"], [r"6 \Omega"]),
    ("1.5", ["1.5 in."], ["1.5x"]),
    ("90", [r"90\degree"], [r"91\degree"]),
    (r"3\text{ cm}, 4\text{ cm}", [r"3 \text{ cm and } 4 \text{ cm}", "4, 3"], [r"3\text{ cm}"]),
    ("3", [], [r"3 \text{ cm and } 4 \text{ cm}", r"3 \text{ men or } 5 \text{ men}"]),
    ("7", ["7 e-mails", "7 o'clock", "7 vitamin C tablets"], [r"7 \text{ more than } x"]),
    ("12", ["She can't buy more; 12 apples"], ["12 of x"]),
    # A letter or a word may be part of each number.
    (r"1+2\mathrm{i}, 1-2\mathrm{i}", ["1+2i, 1-2i"], ["3, -1"]),
    (r"2\text{a}, 3\text{b}", [r"2\text{a}, 3\text{b}"], ["2, 3"]),
    (r"15\text{ nickels}, 20\text{ dimes}", [], [r"20\text{ nickels}, 15\text{ dimes}"]),
    (r"\text{£}5", ["5 pounds", "£5", r"\$5"], ["£6", "5 cm^2 x"]),
    ("5", ["5 €", "€ 5", r"5\text{ €}", "¥5", "Rs. 5"], ["-€5", "€5 million"]),
    ("€", ["€"], ["£"]),
    # Thousands, and colors.
    (r"11,\! 111,\! 100", ["11111100", "11,111,100"], ["11", "11111"]),
    ("5", [r"\color{red}{5}", r"\textcolor{blue}{5}", r"\underline{5}"], [r"\color{red}{6}"]),
    # The unit of complex numbers, and angles.
    ("2i", ["(1+i)^2"], ["2", "3i"]),
    (r"\frac{1-i}{2}", [r"\frac{1}{1+i}"], [r"\frac{1+i}{2}"]),
    (r"-\frac12+\frac{\sqrt3}{2}i", [r"e^{2\pi i/3}"], [r"e^{\pi i/3}"]),
    ("0.5", [r"\sin 30^\circ", r"\cos(60^{\circ})", r"2\sin^2 30°"], [r"\sin 30"]),
    # Numbers to a base.
    ("1011_2", ["1011", r"(1011)_{2}", "01011_2"], ["1011_3", "11_{10}", "1111_2"]),
    ("4343_6", [r"4343_{\text{six}}"], [r"4343_{\text{seven}}", "4344_6"]),
    ("12", [r"12_{\text{ten}}"], ["12_7", r"12_{\text{seven}}", "12_2"]),
    # Decimal commas.
    ("3{,}5", ["3.5", r"\frac72"], ["35", "3{,}6"]),
    ("0{,}125", [r"\frac18"], ["125"]),
    # Letters that may be units, and those in another type.
    ("2d", ["2 d"], ["2", "2t"]),
    ("v_{0} t", ["v_0t", "tv_0"], ["v_{0}", "v_{0} h"]),
    (r"\frac{1}{2}x^2 + c", [r"\frac{x^2}{2} + c"], [r"\frac{1}{2}", r"\frac{1}{2}x^3 + c"]),
    (r"\frac12", [r"\frac12\text{ of it}", r"\frac12 miles"], [r"\frac{1}{2}t", r"\frac12x+m"]),
    (r"3+4\mathrm{i}", ["4i+3"], ["7", r"3-4\mathrm{i}"]),
    (r"2\mathrm{e}^{3}", ["2e^3"], ["2", r"2\mathrm{e}^{4}"]),
    (r"x\mathrm{e}^{x}", ["xe^x"], ["x", "e^x"]),
    (
        r"2\mathbf{i} - 3\mathbf{j}",
        [r"2\hat{i}-3\hat{\mathbf{j}}"],
        ["2", r"2\mathbf{i}+3\mathbf{j}"],
    ),
    (r"3\text{ apples and } 4\text{ pears}", [], ["3", r"3\text{ apples and } 5\text{ pears}"]),
    ("10\\pi", ["10\\pi units", r"10\pi~\mathrm{cm}^{2}", r"10\pi\text{ (exactly)}"], ["10"]),
    ("5", ["5th", "x = 5 years"], ["5mg", "5 h^2"]),
    ("5", ["5 AM"], ["5K"]),
    ("5m", ["5 m"], ["5"]),
    ("-1.6e-19", [r"-1.6\times10^{-19}\,\mathrm{C}", r"-1.6 \times 10^{-19} m"], ["-1.6e-18 J"]),
    ("12", [r"12\text{个}", r"12\text{ 厘米}"], [r"12\text{万}", r"12\text{个半}"]),
    (r"2\mathbf{A}", ["2A"], ["2"]),
    (r"\sin\mathrm{A}", [r"\sin A"], [r"\sin"]),
    (r"\mathrm{H}_3\mathrm{N}", ["H_3N"], ["H_3"]),
    ("0.25", [r"25\,\%", "25 percent", r"25\text{ percent}", r"25\text{\%}"], ["2.5%", "25"]),
    (r"\frac{dy}{dx} = 2x", ["2x"], [r"\frac{dy}{dx} = x"]),
    (r"2\sqrt{3}", [], [r"2\sqrt3 minus three", r"2\sqrt3\text{ or more}", r"2\sqrt3 hundredths"]),
    # Powers of units, and angles.
    ("9.8 m/s^2", [r"9.8\,\mathrm{m\,s^{-2}}", "9.8 m s^{-2}"], ["9.8 m s^{-1}"]),
    (r"12 \mathrm{~kJ} \mathrm{~mol}^{-1}", ["12000 J/mol", "12"], ["12 J/mol", "12 kJ"]),
    (r"45^\circ", ["45 degrees"], ["45 rad", r"45\text{ radians}"]),
    # Letters with an index, ratios, negative percentages.
    ("U2", ["U_2"], ["2U", "U"]),
    (r"\ln 2 + \log_2 x", [r"\ln2+\log_2x"], [r"\ln 2"]),
    ("3:4:5", ["3 : 4 : 5"], ["3:5:4", r"\frac{3}{20}"]),
    ("-12.3%", ["-12.3", "-0.123", r"-12.3\text{ percent}"], ["12.3", "-1.23"]),
    # Formulas without LaTeX.
    ("10^-4 eV", ["10^{-4}", "1e-4 eV", "10\u207b\u2074"], ["10^{-8}", "10^4", "10"]),
    ("2**10", ["1024", "2^{10}"], ["20"]),
    ("5 x 10^3", ["5000"], ["500", "5"]),
    ("e^-x", ["exp(-x)", "e^{-x}"], ["e^x"]),
    ("pi/4 + sqrt(2)", [r"\frac{\pi}{4} + \sqrt2", "π/4 + √2"], ["pi/2 + sqrt(2)", "pi/4"]),
    (r"\sin 2x", ["sin(2x)", "sin 2x"], ["cos 2x", "sin(x)"]),
    ("x_1^{12}", ["x\u2081\u00b9\u00b2", "x1^12"], ["x\u2082\u00b9\u00b2", "x_1^1"]),
    ("3\u20444", ["0.75"], ["4/3"]),
    # Dates are no differences.
    (
        "2020-01-15",
        ["2020-1-15", "January 15, 2020", r"\text{15 Jan. 2020}"],
        ["2020-15-01", "2004", "2021-01-15", "January 16, 2020", "January 2020"],
    ),
    ("1/15/2020", ["01/15/2020"], ["1/30/1010"]),
    # Wide signs.
    ("3.5", ["\uff13\uff0e\uff15", "\uff17\uff0f\uff12"], ["35", "\uff13\uff0c\uff15"]),
    ("B", ["\uff22", "\uff08B\uff09"], ["\uff08C\uff09"]),
    # Several choices, and one with what it says.
    ("ABD", ["A, B, D", "A, B and D"], ["ABC", "A, B", "A or B or D"]),
    (r"\mathrm{(B)}\ 27", ["B", "27", "(B)"], ["C", "28", "(C) 27"]),
    (r"\textbf{(B)}\ 2\sqrt{3}", [r"\sqrt{12}"], [r"\sqrt{13}"]),
    ("C", [r"\text{The answer is C}", "The correct option is (C)", "choice C", "C)"], ["C or D"]),
    # Words and times.
    (r"\text{Yes}", ["Yes, it does"], ["No, yes", "Yes, no", "Yes, but only for x > 0"]),
    ("No", [r"\text{No}, it is not"], ["no solution", "Yes"]),
    ("circle", ["the circle"], ["ellipse"]),
    ("St. Louis", ["St Louis"], ["Louis"]),
    ("June 20", ["June 20th", "the 20th of June"], ["June 2nd", "June 20, 2020"]),
    ("6:00 PM", ["6 p.m."], ["6 AM"]),
    # Signs within, vectors.
    (r"\frac{\pm1\pm i}{2}", [], [r"\frac{1+i}{2}, \frac{-1-i}{2}"]),
    (ROOTS, [r"\frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}"], [r"\frac{-1+\sqrt5}{2}"]),
    (COLUMN, ["(1,2)", r"\langle 1, 2 \rangle"], ["(2,1)", r"\begin{pmatrix}1&2\end{pmatrix}"]),
    ("5", [], [r"\begin{pmatrix} 5 \\ 5 \end{pmatrix}"]),
    (SYSTEM, ["x=1, y=2", r"\begin{aligned} x &= 1 \\ y &= 2 \end{aligned}"], ["x=1, y=3"]),
    ("x=1, y=2", [r"\begin{cases} x=1 \\ y=2 \end{cases}"], [r"\begin{cases} x=1 \end{cases}"]),
    (PIECES, [PIECES], [PIECES.replace("x^2", "x^3")]),
    ("10", [r"\binom52", r"\binom 5 2"], [r"\binom42"]),
]


@pytest.mark.parametrize(("gold", "equal", "other"), BOXED, ids=[gold for gold, *_ in BOXED])
def test_answers_in_other_forms(gold: str, equal: list[str], other: list[str]):
    said = {text: verdict(f"So \\boxed{{{text}}}.", gold) for text in (*equal, *other)}
    assert said == dict.fromkeys(equal, 1) | dict.fromkeys(other, 0)


@pytest.mark.parametrize(
    ("response", "gold", "reward"),
    [
        ("Answer: B\n\nExplanation: A is too small, C too big.", "B", 1),
        ("The answer is B.\n\nA is wrong since 3 < 4.", "B", 1),
        ("The answer is B, because A is 3.", "B", 1),
        ("The correct option is (B).", "B", 1),
        ("B.", "B", 1),
        ("The answer is B\nWait, it is C.", "B", 0),
        ("The answer is A.\n\nOops, I mean B.", "A", 0),
        ("Answer: C. The correct option is the one that conserves energy.", "C", 1),
        ("Answer: A\n\nB is too big.", "B", 0),
        ("The answer is $x<3$.", r"(-\infty,3)", 1),
        ("The answer is 50 mm.", r"5\text{ cm}", 1),
        ("The answer is 5 m.", r"5\text{ cm}", 0),
        ("Final Answer: The final answer is (B). I hope it is correct.", "B", 1),
        ("The final answer is $\\text{left}$. I hope it is correct.", "left", 1),
        ("The answer is B. Note that A is a common distractor.", "B", 1),
        ("The answer is B. I computed the integral.", "B", 1),
        ("The answer is B. However, it could be C.", "B", 0),
        ("The answer is B. Or C.", "B", 0),
        ("The answer is B. Paris.", "Paris", 1),
        ("The answer is **B. The Hague**.", "The Hague", 1),
        ("The answer is D. rocks", "D", 1),
        ("The answer is D. not rocks", "D", 0),
        ("So the answer is (c).", "C", 1),
        (r"<answer>$2\sqrt{3}$ cm</answer>", r"2\sqrt{3}", 1),
        (r"<answer>$5$ apples</answer>", "5", 1),
        (r"<answer>$10!\text{ ways}$</answer>", "10!", 1),
        (r"<answer>$2\pi cm$</answer>", r"2\pi", 1),
        (r"<answer>$ab$ m</answer>", "ab", 1),
        (r"<answer>$5$ or more</answer>", "5", 0),
        ("So the answer is 25%.", "0.25", 1),
        ("The answer is B)21.", "B", 1),
        ("The answer is J. Smith.", "J. Smith", 1),
        ("The answer is `B`.", "B", 1),
        ('The answer is "Paris".', "Paris", 1),
        ("The answer is [B].", "B", 1),
        ("<answer>Yes!</answer>", "yes", 1),
        *((f"The answer is {formula}.", "5", 0) for formula in OF_5),
        *((f"The answer is: {text}", "5", 1) for text in AROUND_5),
        ("The answer is at least 5.", "5", 0),
        ("The answer is:\n\\[\n5x\n\\]", "5", 0),
        ("The correct answer is **B**: Paris", "B", 1),
        ("答えは**D**です。", "D", 1),
        ("정답은 D입니다.", "D", 1),
        *((f"{mark} D", "D", 1) for mark in MARKS),
        *((f"{mark} C", "D", 0) for mark in MARKS),
        ("Die Antwort ist 18. In 2 Schritten.", "18", 1),
        ("答案\uff1a18。以上2步", "18", 1),
        ('{"reason": "3 < 4", "answer": "B"}', "B", 1),
        ('```json\n{"answer": 7, "steps": 2}\n```', "7", 1),
        ('{"answer": "7x", "steps": 7}', "7", 0),
        ('{"answer": {"value": 7}}', "7", 1),
        (r"So $\fbox{5}$, which is less than 6.", "5", 1),
    ],
)
def test_answers_that_are_stated(response: str, gold: str, reward: float):
    assert verdict(response, gold) == reward


def test_the_part_of_a_record_that_the_answer_key_names_is_the_answer():
    row = {"reward_model": {"ground_truth": {"target": ["Berlin", "Bonn"]}}}
    prompt = Prompt("question", '["Berlin", "Bonn"]', row)
    said = [
        Episode(prompt, f"<answer>{a}</answer>", 9, FinishReason.STOP) for a in ("Bonn", "Rome")
    ]
    assert [score.reward for score in math(said)] == [1, 0]
    with pytest.raises(RolloutError, match="target"):
        math([Episode(Prompt("question", "", row), "Bonn", 9, FinishReason.STOP)])


def test_names_of_unknowns_count_where_the_reward_is_strict():
    said = episode(r"\boxed{y = 1}", "x = 1")
    assert [math([said], strict=strict)[0].reward for strict in (True, False)] == [0, 1]
    assert verdict(r"\boxed{x = 1}", "1") == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### at least 7", None),
        ("<answer>7 or more</answer>", None),
        (r"\boxed{7\text{ million}}", 7_000_000),
        ("#### 1.2 million people", 1_200_000),
        ("#### 7 more apples", 7),
        ("so at least 7", 7),
        ("The answer is 42.\n\nCheck: 6 * 7", 42),
        ("The answer is 6 * 7, so 42.", 42),
        ("Answer: He has 49 eggs.\nHe eats 7.\n49 - 7 = 42", 42),
        ("The answer is 6 * 7, or 42.", 42),
        ("The answer is 2 times 21, which is 42.", 42),
        *((rf"\boxed{{{formula}}}", None) for formula in ("7x", "12_7")),
        (r"\boxed{12_{10}}", 12),
        (r"\boxed{-\!5,\!\!000}", -5000),
    ],
)
def test_words_that_make_another_number_of_a_marked_one(text: str, number: int | None):
    assert answered_number(text) == (None if number is None else Fraction(number))
    assert numeric_answer(episode("#### 7000000", "7 million")).reward == 1


@pytest.mark.parametrize("given", ["x < 1/0", r"x > \sqrt{-1}", r"1 < x < i", "x<1/0, x>7"])
def test_an_inequality_without_a_real_bound_is_wrong(given: str):
    golds = ("5", r"(-\infty,3)", "x<3")
    assert [verdict(rf"\boxed{{{given}}}", gold) for gold in golds] == [0] * 3


def test_marks_without_an_end_take_no_time():
    start = time.process_time()
    assert marked_answer('{"answer": ' * 20_000) is None
    assert marked_answer(r"\boxed{1} " + r"\boxed{" * 20_000) == "1"
    assert time.process_time() - start < 2
