import gzip
import itertools
import json
import pickle
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opo_trl.rewards import accuracy as rewards
from opo_trl.rewards import accuracy_reward, format_reward
from opo_trl.rewards.accuracy import score
from opo_trl.rewards.boxes import final_answer


def box(answer: str) -> str:
    return f"The answer is $\\boxed{{{answer}}}$."


# Gold answer and an answer that is right.
EQUAL = [
    # notation
    (r"\frac{1}{3}", r"\frac13"),
    (r"\frac{1}{3}", r"\dfrac{1}{3}"),
    (r"\frac{1}{3}", r"\tfrac 1 3"),
    (r"\frac13", r"\cfrac{1}{3}"),
    (r"\frac{10}{3}", r"\frac{10}3"),
    (r"\frac\pi2", r"\frac{\pi}{2}"),
    (r"\frac \pi4 + 2", r"2 + \frac{\pi}{4}"),
    (r"\frac1b", r"\frac{1}{b}"),
    (r"2\sqrt{3}", r"2\sqrt3"),
    (r"\sqrt\pi", r"\sqrt{\pi}"),
    (r"x^{2}", "x^2"),
    (r"\left( 1, \frac{1}{2} \right)", r"(1,\tfrac12)"),
    (r"8\!:\!34", "8:34"),
    ("5", "5."),
    ("5", r"\,5\;"),
    (r"\sqrt[3]{2}", r"\sqrt[3]2"),
    (r"\sqrt{3} - 1", "-1 + sqrt(3)"),
    (r"\sqrt[4]{2}", "2**(1/4)"),
    (r"\frac{1}{2}\sin x", "sin(x)/2"),
    ("3.5", "3 1/2"),
    ("6", "(2)(3)"),
    ("8", "2(4)"),
    ("B", r"\mathcal{B}"),
    ("C", "C. x = 42"),
    ("f'", "f'"),
    ("3", "3 = y"),
    (r"\text{Evelyn}", r"\textbf{Evelyn.}"),
    (r"\text{(C)}", "C"),
    (r"\text{odd}", "odd"),
    (r"\text{Monday}", r"\mathrm{monday}"),
    (r"\text{B, E, G}", r"G, B, E"),
    ("-3", "−3"),
    ("2π", r"2\pi"),
    (r"\emptyset", r"\varnothing"),
    (r"\begin{pmatrix} 6 \\ 0 \end{pmatrix}", r"\begin{bmatrix} 6\\0 \end{bmatrix}"),
    (r"\begin{pmatrix} 1 \\ \phantom -1 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 1 \end{pmatrix}"),
    # thousands
    ("10,000", "10000"),
    ("10000", r"10{,}000"),
    ("1234567", "1 234 567"),
    ("11111111100", r"11,\! 111,\! 111,\! 100"),
    (r"10,\!000", r"10\,000"),
    (r"1,\!296,\!540", "1296540"),
    (r"\frac{12}{5,\!525}", r"\frac{12}{5525}"),
    (r"\$115,000", "115000.00"),
    ("1000(1.05)^t", "1,000(1.05)^t"),
    ("2x + 1250", "2x + 1,250"),
    ("56017895760", r"56,\!01,\!78,\!95,\!760"),
    ("0.5", "0,5"),
    # units
    (r"90^\circ", "90"),
    (r"90^{\circ}", r"90\text{ degrees}"),
    ("90", "90°"),
    (r"\$12.50", "12.50"),
    (r"12.5\%", "12.5"),
    (r"50\%", r"\frac12"),
    (r"50\%", "50%"),
    ("0.335", "33.5 percent"),
    ("0.005", r"\frac{1}{2}\text{ percent}"),
    (r"\cos 58^\circ", r"\cos 58"),
    (r"\cos 58^\circ", r"\sin(32^{\circ})"),
    (r"5 \text{ cm}", "5"),
    (r"5 \text{ cm}", "5 cm"),
    (r"5 \text{ cm}^2", r"5 \mathrm{~square~centimeters}"),
    (r"864 \mbox{ inches}^2", r"864 \text{ sq. in.}"),
    (r"4\text{ p.m.}", "4 pm"),
    (r"99\pi \text{ square inches}", r"99\pi"),
    (r"8\text{ meals}", "8 meals"),
    (r"30 \text{ mph}", r"30 \text{ miles per hour}"),
    ("10001_2", "10001"),
    (r"\text{A5}_{11}", "A5_{11}"),
    # mathematics
    ("0.5", r"\frac{1}{2}"),
    (".5", "0.5"),
    (r"\frac{1}{3}", "1/3"),
    (r"1\frac{12}{13}", r"\frac{25}{13}"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("1024", "2^{10}"),
    ("(x-1)(x+2)", "x^2+x-2"),
    ("a + b + c", "c + a + b"),
    (r"\sin^2 t", r"(\sin t)^2"),
    ("x", "2x/2"),
    ("3+4i", "(2+i)^2"),
    ("-i", r"\frac{1}{i}"),
    ("ai + 1", "i(a - i)"),
    ("2x - y = 1", "2y - 4x = -2"),
    ("0.5x + y = 1", r"\frac{x}{2} + y = 1"),
    ("2x < 4", "x < 2"),
    (r"2x + 3y \ge 7", r"-2x - 3y \le -7"),
    (r"1 < 2x \le 3", r"3 \ge 2x > 1"),
    ("x < 1", "-x > -1"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("y = 2x + 3", "2x + 3"),
    ("(p, q) = (3, 2)", "(3, 2)"),
    ("x+2y=3", "2x + 4y = 6"),
    ("1,2", "2, 1"),
    ("100, 200", "100,200"),
    (r"12\text{ and }13", "13, 12"),
    (r"1+\sqrt{2}, 1-\sqrt{2}", r"1 \pm \sqrt{2}"),
    ("[-2,7]", r"x \in [-2,7]"),
    ("[-2,7]", r"-2 \le x \le 7"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
    (r"\approx 8.24 \text{ mph}", "8.24"),
    ("11", r"x\approx11"),
    (r"\frac{2}{3}", r"\frac{2}{3} \approx 0.67"),
    (r"\frac{1}{2^{98}}", "2^{-98}"),
]

# Gold answer and an answer that is wrong.
DIFFERENT = [
    ("5", "6"),
    ("5", "-5"),
    ("-5", "5"),
    ("5", ""),
    ("5", "5, 6"),
    ("5, 6", "5"),
    ("1,2,3", "1,2"),
    (r"\frac{1}{3}", r"\frac{3}{1}"),
    (r"\frac{1}{3}", "0.333"),
    (r"\frac{\sqrt{3}}{2}", "0.866"),
    (r"\frac{1}{3}", r"\frac1{35}"),
    (r"\sqrt{35}", r"\sqrt35"),
    ("12", "1 2"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(2,3]", "[2,3)"),
    ("(1,2)", r"\{1,2\}"),
    (r"\{1,2\}", "(1,2)"),
    ("(1,2,3)", "(3,2,1)"),
    ("3:4", "4:3"),
    # thousands
    ("(1,000)", "1000"),
    ("1.234", "1,234"),
    ("0.5", "0,6"),
    ("3.5", "3, 5, 7"),
    ("1000", "(1,000)"),
    ("(20,100)", "20100"),
    ("31,250", "31.250"),
    ("31,250", "31"),
    ("1000", "10,00"),
    ("1000000", "1000001"),
    # units
    (r"5 \text{ cm}", r"5 \text{ m}"),
    (r"5 \text{ inches}", "5 feet"),
    (r"5 \text{ cm}^2", r"5 \text{ cm}^3"),
    (r"5 \text{ square feet}", r"5 \text{ cubic feet}"),
    (r"5 \text{ cm}", r"5 \text{ cm}^2"),
    (r"60^\circ", r"60 \text{ radians}"),
    (r"\$5", r"5 \text{ cents}"),
    (r"4\text{ p.m.}", r"4\text{ a.m.}"),
    (r"5 \text{ hours}", r"5 \text{ minutes}"),
    (r"50\%", r"5\%"),
    ("10001_2", "10001_3"),
    ("10001_2", "17"),
    ("1011_2", "11"),
    ("5m", "5"),
    ("2ab", "2"),
    # names
    (r"\text{odd}", r"\text{even}"),
    (r"\text{(C)}", r"\text{(D)}"),
    (r"\text{A} \text{ and } \text{B}", r"\text{A} \text{ and } \text{C}"),
    (r"3 \text{ red, } 4 \text{ blue}", r"3 \text{ red, } 4 \text{ green}"),
    (r"3 \text{ red and } 4 \text{ blue}", r"3 \text{ red and } 4 \text{ green}"),
    (r"n \text{ even}", r"n \text{ odd}"),
    (r"\text{A5}_{11}", r"\text{A6}_{11}"),
    (r"\text{undefined}", "0"),
    ("D", "C. x = 42"),
    ("C", "C. or D."),
    ("E", "E'"),
    ("E'", "E''"),
    # mathematics
    ("x=5", "y=5"),
    ("x=5", "x + 2 = 7"),
    ("x < 2", "2x < 4"),
    ("2x < 4", "-x < -2"),
    ("2x < 4", r"x \le 2"),
    (r"1 < 2x \le 3", "1 < 2x < 3"),
    ("2x - y = 1", "2x - y = 2"),
    ("2x - y = 1", "x - y = 1"),
    ("x", "2x"),
    ("3+4i", "(2-i)^2"),
    ("i", r"\frac{1}{i}"),
    ("5", "(2)(3)"),
    ("3", "3 1/2"),
    (r"\cos 58^\circ", r"\sin 58^\circ"),
    ("x^2", "x^3"),
    ("3x+2", "3y+2"),
    ("3+4i", "3-4i"),
    (r"5\pi", "5"),
    (r"\pm 2", "2"),
    (r"\infty", r"-\infty"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2)"),
    ("[-2,7]", r"-2 < x \le 7"),
    (r"\begin{pmatrix} 1 & 0 \\ 0 & 3 \end{pmatrix}", r"\begin{pmatrix} 1 & 1 \\ 0 & 3 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
    (r"\frac{1}{2^{98}}", r"\frac{1}{3^{98}}"),
    (r"\frac{1}{2^{98}}", r"-\frac{1}{2^{98}}"),
    ("0.00000001", "0.00000002"),
]


def tower(base: str, height: int) -> str:
    return "^{".join([base] * height) + "}" * (height - 1)


# What a model under training writes, by pattern: completion, gold answer, verdict. docs/rewards.md has the same table.
ADVERSARIAL = {
    "nested exponents": [(box(tower("9", height)), "5", 0.0) for height in (3, 5, 40)],
    "nested exponents of a variable": [(box(tower("x", 30)), "x", 0.0)],
    "factorials": [(box("9!!!!"), "5", 0.0), (box("(10^{9})!"), "5", 0.0)],
    "numbers with a large exponent": [
        (box(number), "5", 0.0)
        for number in ("11E999999999", "-1.5E-999999999", "11E+999999999", r"11E\text{}999999999", r"11E\$999999999")
    ],
    "numbers with an exponent": [(box(number), "1500", 1.0) for number in ("1.5E3", "1.5E+3", "15000E-1")],
    "boxes that are never closed": [("\\boxed{" * 10_000, "5", 0.0), ("\\boxed{" * 10_000 + "5", "5", 0.0)],
    "boxes in boxes": [("\\boxed{" * 10_000 + "5" + "}" * 10_000, "5", 1.0)],
    "number of 100,000 digits": [(box("7" * 100_000), "7", 0.0), ("7" * 100_000, "7", 0.0)],
    "gold answer of 100,000 digits": [(box("7"), "7" * 100_000, None)],
    "deep brackets": [
        (box("((5))"), "5", 1.0),
        (box("(" * 140 + "5" + ")" * 140), "5", 0.0),
        (box("{" * 10_000), "5", 0.0),
    ],
    "unbalanced LaTeX": [
        (r"\boxed{\frac{1}{2}", r"\frac{1}{2}", 0.0),
        (r"\boxed{\frac{1}{2}}}}}", r"\frac{1}{2}", 1.0),
        (box(r"\left(1, 2"), "(1,2)", 0.0),
        (box(r"\sqrt{"), "2", 0.0),
    ],
    "Unicode": [
        (box("−5"), "-5", 1.0),
        (box("2π"), r"2\pi", 1.0),
        (box("３"), "3", 0.0),
        (box("½"), r"\frac{1}{2}", 0.0),
        (box("x²"), "x^2", 0.0),
        (box("五"), "5", 0.0),
        (box("\u200b5\u200b"), "5", 0.0),
        (box("5\x00"), "5", 0.0),
    ],
    "empty": [("", "5", 0.0), (" \n", "5", 0.0), (box(""), "5", 0.0), (box(r"\,"), "5", 0.0)],
    "100 kB of one character": [
        (text, "5", 0.0)
        for character in ("a", "5", "{", "}", "\\", "$", " ", "\n", "(", "^", "_", "🙂", "\x00")
        for text in (character * 100_000, box(character * 100_000))
    ],
    "several boxes": [
        (r"First \boxed{2}, no: \boxed{3}", "3", 1.0),
        (r"First \boxed{3}, no: \boxed{2}", "3", 0.0),
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2", 1.0),
        (r"$\boxed{1}$ and $\boxed{2}$", "2", 0.0),
    ],
    "answer behind the final box": [
        (r"\boxed{2}. No, the answer is 3.", "3", 0.0),
        (r"\boxed{2} \text{or rather } 3", "3", 0.0),
        (r"\boxed{2} <!-- 3 -->", "3", 0.0),
    ],
    "all options": [
        (box("A, B, C, D"), r"\text{B}", 0.0),
        (box(r"\text{A or B or C or D}"), r"\text{B}", 0.0),
        (r"\boxed{A}, \boxed{C}, \boxed{B}", r"\text{B}", 0.0),
        (r"\boxed{1} or \boxed{2} or \boxed{3}", "3", 0.0),
        (box("1, 2, 3, 4, 5"), "3", 0.0),
        (box(r"1 \text{ or } 3"), "3", 0.0),
        (box(r"\pm 3"), "3", 0.0),
        (box(r"x \in \mathbb{R}"), "3", 0.0),
        (box(r"(-\infty, \infty)"), "3", 0.0),
    ],
    "a free variable": [
        (box("x"), "5", 0.0),
        (box("x = x"), "5", 0.0),
        (box("x"), "x = 5", 0.0),
        (box("n"), "12", 0.0),
        ("The answer is x.", "5", 0.0),
    ],
    "the question in the box": [
        (box("What is 2 + 3?"), "5", 0.0),
        (box(r"\text{the value of } 2 + 3"), "5", 0.0),
        (box("? = 5"), "4", 0.0),
        (box("x + 2 = 5"), "3", 0.0),
        (box("2 + 3"), "5", 1.0),  # a term that equals the answer is right, whoever wrote it
    ],
}


TOKENS = r"""
\frac \sqrt \text \boxed \left \begin{pmatrix} \\ \{ { } ( ) [ ] , .
0 1 23 x y i - + = ^ _ & % $ cm \pi \cup \infty \in \le \circ </think>
"""
LATEX = st.lists(st.sampled_from(TOKENS.split())).map("".join)


class TestScore:
    @pytest.mark.parametrize(("gold", "answer"), EQUAL)
    def test_right(self, gold: str, answer: str):
        assert score(box(answer), gold) == 1.0

    @pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
    def test_wrong(self, gold: str, answer: str):
        assert score(box(answer), gold) == 0.0

    @pytest.mark.parametrize(
        ("completion", "expected"),
        [
            (r"First \boxed{2}, no: \boxed{3}", 1.0),
            (r"First \boxed{3}, no: \boxed{2}", 0.0),
            (r"It is \boxed{3}, that is \boxed{", 1.0),
            (r"$\boxed 3$", 1.0),
            (r"$\fbox{3}$", 1.0),
            (r"<think>\boxed{2}?</think> It is \boxed{3}.", 1.0),
            (r"\boxed{2}?</think> It is \boxed{3}.", 1.0),
            (r"<think>\boxed{3}</think> It is 3.", 0.0),
            (r"<think>It is \boxed{3}, I", 0.0),
            ("The answer is $3$.", 0.0),
            ("3", 0.0),
            (r"\boxed{}", 0.0),
            (r"\boxed{3} \boxed{}", 0.0),
            (r"\boxed{\frac{}{}{}}}", 0.0),
            ("", 0.0),
        ],
    )
    def test_the_answer_is_what_stands_in_the_last_box_of_the_answer_proper(self, completion: str, expected: float):
        assert score(completion, "3") == expected

    @pytest.mark.parametrize("pattern", ADVERSARIAL)
    def test_what_a_model_under_training_writes(self, pattern: str, monkeypatch: pytest.MonkeyPatch):
        for limit in ("PARSING_LIMIT", "VERIFYING_LIMIT"):
            monkeypatch.setattr(rewards, limit, 2.0)  # which some of them run into, one after the other
        scored = [
            (completion[:80], gold[:80], score(completion, gold)) for completion, gold, _ in ADVERSARIAL[pattern]
        ]
        assert scored == [(completion[:80], gold[:80], verdict) for completion, gold, verdict in ADVERSARIAL[pattern]]

    def test_gold_may_be_a_whole_solution(self):
        assert score(box("3"), r"Since $1 + 2 = 3$, it is $\boxed{3}$.") == 1.0
        assert score(box("1"), r"Since $1 + 2 = 3$, it is $\boxed{3}$.") == 0.0

    @pytest.mark.parametrize("gold", ["", "  ", r"\boxed{}", r"So \boxed{", r"\frac{", r"\text{}", "5" * 301])
    @pytest.mark.parametrize("completion", [box("3"), r"\boxed{}", "no box"])
    def test_without_a_gold_answer_nothing_can_be_scored(self, gold: str, completion: str):
        assert score(completion, gold) is None

    def test_a_long_answer_is_no_answer(self):
        assert score(box("1+" * 200 + "1"), "201") == 0.0

    def test_it_can_be_sent_to_a_worker(self):
        assert pickle.loads(pickle.dumps(score)) is score

    @given(st.text() | LATEX | LATEX.map(box), st.text() | LATEX)
    @settings(deadline=None, max_examples=300)
    def test_it_never_raises(self, completion: str, solution: str):
        assert score(completion, solution) in (0.0, 1.0, None)
        assert format_reward([completion])[0] in (0.0, 1.0)


class TestFailingMathVerify:
    """Each replaces math-verify by one that fails; the answers differ as strings, so that it is asked."""

    @pytest.fixture(params=[RecursionError, ValueError])
    def failure(self, request: pytest.FixtureRequest) -> type[BaseException]:
        return request.param

    def fail_on(self, text: str, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
        real = rewards.parse

        def parse(latex: str, *args, **kwargs):
            if text in latex:
                raise failure
            return real(latex, *args, **kwargs)

        monkeypatch.setattr(rewards, "parse", parse)

    def test_the_gold_answer(self, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch):
        self.fail_on("77", failure, monkeypatch)
        assert [score(text, "77") for text in (box("7"), "no box", box("77"))] == [None, None, 1.0]

    def test_the_answer(self, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch):
        self.fail_on("77", failure, monkeypatch)
        assert score(box("77"), "7") == 0.0

    def test_the_comparison(self, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch):
        def verify(*args, **kwargs):
            raise failure

        assert score(box("1/2"), "0.5") == 1.0
        monkeypatch.setattr(rewards, "verify", verify)
        assert score(box("1/2"), "0.5") == 0.0

    @pytest.mark.parametrize(
        ("answer", "gold"),
        [
            (r"\sum_{n=1}^{10^9} \frac{1}{n}", "5"),
            # Endless in math-verify, and again in what is compared after it.
            (r"\lfloor" * 9 + "1" + r"\rfloor" * 9, r"\lfloor i\rfloor"),
        ],
    )
    def test_an_endless_comparison_is_wrong_in_time(self, answer: str, gold: str, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(rewards, "VERIFYING_LIMIT", 1.0)
        start = time.process_time()
        assert score(box(answer), gold) == 0.0
        assert 0.5 < time.process_time() - start < 5

    def test_what_holds_back_an_exception_is_stopped_all_the_same(self, monkeypatch: pytest.MonkeyPatch):
        def verify(*args, **kwargs):
            with suppress(BaseException):
                spin()
            spin()

        def spin():
            while True:
                pass

        monkeypatch.setattr(rewards, "VERIFYING_LIMIT", 0.2)
        monkeypatch.setattr(rewards, "verify", verify)
        assert score(box("1/2"), "0.5") == 0.0
        assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


class TestAccuracyReward:
    def test_plain_and_conversational_completions(self):
        texts = [box("3"), box("4"), "3"]
        conversations = [[{"role": "assistant", "content": text}] for text in texts]
        assert accuracy_reward(texts, ["3"] * 3) == [1.0, 0.0, 0.0]
        assert accuracy_reward(conversations, solution=["3"] * 3, prompts=[None] * 3) == [1.0, 0.0, 0.0]

    def test_the_last_message_counts(self):
        messages = [{"role": "assistant", "content": box("3")}, {"role": "assistant", "content": box("4")}]
        assert accuracy_reward([messages], ["4"]) == [1.0]
        assert accuracy_reward([[{"role": "assistant", "content": None}]], ["4"]) == [0.0]

    def test_each_completion_has_its_own_solution(self):
        assert accuracy_reward([box("3"), box("3"), box("3")], ["3", "", "4"]) == [1.0, None, 0.0]

    def test_lengths_must_agree(self):
        with pytest.raises(ValueError, match="zip"):
            accuracy_reward([box("3")], ["3", "4"])

    def test_another_thread_gets_the_same(self):
        golds, answers = zip(*EQUAL[::5], *DIFFERENT[::5], strict=True)
        completions = [box(answer) for answer in answers]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(accuracy_reward, completions, golds).result() == accuracy_reward(completions, golds)


class TestFormatReward:
    @pytest.mark.parametrize(
        "text",
        [
            r"\boxed{3}",
            r"The answer is $\boxed{3}$.",
            r"The answer is **\boxed{3}**.",
            r"\[ x = \boxed{\frac{1}{2}}. \]" + "\n",
            r"\(\boxed{3}\)!",
            r"\begin{align*} x &= \boxed{3} \end{align*}",
            r"$$\boxed {3}$$",
            r"$\boxed 3$.",
            "<think>\n\\boxed{2}? \\boxed{3}!\n</think>\n\n$\\boxed{3}$",
            "\\boxed{2}?\n</think>\n\n$\\boxed{3}$",
        ],
    )
    def test_one_box_at_the_end(self, text: str):
        assert format_reward([text, [{"role": "assistant", "content": text}]], solution=["", ""]) == [1.0, 1.0]

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "3",
            r"\boxed{}",
            r"\boxed{ }",
            r"\boxed{3",
            r"\boxed{3} is the answer",
            r"\boxed{3} apples.",
            r"$\boxed{3} = 2 + 1$",
            r"$\boxed{2}$ and $\boxed{3}$",
            r"\boxed{\boxed{3}}",
            r"\boxed{ and \boxed{3}",
            r"<think> \boxed{3}",
            r"<think> \boxed{3} </think> It is 3.",
            r"\boxed{3}</think>",
        ],
    )
    def test_anything_else(self, text: str):
        assert format_reward([text]) == [0.0]


@pytest.fixture(scope="module")
def golds(shared_data: Path) -> list[str]:
    """The final answers of MATH."""
    lines = [
        line
        for file in sorted((shared_data / "math").glob("*.gz"))
        for line in gzip.decompress(file.read_bytes()).splitlines()
    ]
    return [answer for line in lines if (answer := final_answer(json.loads(line)["solution"]))]


@pytest.fixture(scope="module")
def distinct(golds: list[str]) -> list[str]:
    answers = sorted(set(golds))
    random.Random(0).shuffle(answers)
    return answers


class TestMath:
    def test_every_answer_equals_itself(self, golds: list[str]):
        assert len(golds) == 12_498
        assert [gold for gold in golds if score(box(gold), gold) != 1.0] == []

    def check_mathematics(self, answers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rewards, "same_string", lambda gold, answer: False)
        # 5:00 is a division by zero.
        assert [answer for answer in answers if score(box(answer), answer) != 1.0 and ":" not in answer] == []

    def test_math_verify_finds_answers_equal_to_themselves(self, distinct: list[str], monkeypatch: pytest.MonkeyPatch):
        self.check_mathematics(distinct[:200], monkeypatch)

    @pytest.mark.slow
    def test_math_verify_finds_all_answers_equal_to_themselves(self, distinct, monkeypatch: pytest.MonkeyPatch):
        self.check_mathematics(distinct, monkeypatch)

    @pytest.mark.parametrize(
        ("pattern", "replacement"),
        [
            (r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2"),
            (r"\\frac(?=\{)", r"\\dfrac"),
            (r"\\d?frac(?=\{)", r"\\tfrac"),
            (r"\\sqrt\{(\d)\}", r"\\sqrt\1"),
            (r"^(\d{1,3})(\d{3})$", r"\1,\2"),
            (r"^(\d{1,3})(\d{3})$", r"\1{,}\2"),
            (r"(?<=\d),\\!(?=\d{3})", ""),
            (r"^(-?)\\frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3"),
            (r"\\left|\\right", ""),
            (r"\^\\circ", ""),
            (r"(?<=\d)\s*\\text\{\s*([^{}]*)\}$", r" \1"),
            (r"\\\$|\\%", ""),
            (r"$", "."),
        ],
    )
    def test_another_notation_changes_nothing(self, distinct: list[str], pattern: str, replacement: str):
        rewritten = [(gold, re.sub(pattern, replacement, gold)) for gold in distinct]
        changed = [(gold, answer) for gold, answer in rewritten if gold != answer][:60]
        assert len(changed) > 20
        assert [pair for pair in changed if score(box(pair[1]), pair[0]) != 1.0] == []

    def test_another_number_is_wrong(self, distinct: list[str]):
        def other(gold: str) -> str:
            numbers = [*re.finditer(r"\d+", gold)]
            number = random.Random(gold).choice(numbers)
            return f"{gold[: number.start()]}{int(number[0]) + 1}{gold[number.end() :]}"

        # Not the exponent of a unit that is not known, nor one of two forms of the same answer.
        golds = [gold for gold in distinct if re.search(r"\d", gold) and not re.search(r"text|approx|.=", gold)][:200]
        assert [(gold, other(gold)) for gold in golds if score(box(other(gold)), gold) != 0.0] == []

    def test_swapped_pairs_are_wrong(self, distinct: list[str]):
        pairs = [match for gold in distinct if (match := re.fullmatch(r"\(([^(),]+),([^(),]+)\)", gold))]
        swapped = [(pair[0], f"({pair[2]},{pair[1]})") for pair in pairs if pair[1].strip() != pair[2].strip()][:80]
        assert len(swapped) == 80
        assert [pair for pair in swapped if score(box(pair[1]), pair[0]) != 0.0] == []

    def test_the_negative_is_wrong(self, distinct: list[str]):
        golds = [gold for gold in distinct if re.fullmatch(r"[1-9]\d*|\\frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\}", gold)][
            :200
        ]
        assert [gold for gold in golds if score(box(f"-{gold}"), gold) != 0.0] == []
        assert [gold for gold in golds if score(box(gold), f"-{gold}") != 0.0] == []

    def test_the_answer_to_another_problem_is_wrong(self, distinct: list[str]):
        pairs = itertools.pairwise(distinct[:200])
        assert [pair for pair in pairs if score(box(pair[1]), pair[0]) != 0.0] == []
