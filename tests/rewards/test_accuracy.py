"""`accuracy_reward`: verdicts, time limits, and the answers of MATH."""

import gzip
import hashlib
import itertools
import json
import math
import random
import re
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from adversarial_answers import ADVERSARIAL, box
from hypothesis import given, settings
from hypothesis import strategies as st
from right_and_wrong_answers import KINDS, pairs

from opo_trl.rewards import accuracy as rewards
from opo_trl.rewards import accuracy_reward
from opo_trl.rewards.accuracy import score
from opo_trl.rewards.boxes import final_answer
from opo_trl.rewards.limits import OutOfTime, processor_time


TOKENS = r"""
\frac \sqrt \text \boxed \left \begin{pmatrix} \\ \{ { } ( ) [ ] , .
0 1 23 x y i - + = ^ _ & % $ cm \pi \cup \infty \in \le \circ </think>
"""
LATEX = st.lists(st.sampled_from(TOKENS.split())).map("".join)


def misjudged(pairs: Iterable[tuple[str, str]], verdict: float) -> list[tuple[str, str]]:
    """Of gold answers, each with an answer, those of another verdict."""
    return [(gold, answer) for gold, answer in pairs if score(box(answer), gold) != verdict]


class TestScore:
    @pytest.mark.parametrize("kind", KINDS)
    def test_answers_of_each_kind_are_right_or_wrong(self, kind: str):
        right, wrong = KINDS[kind]
        assert misjudged(pairs(right), 1.0) == []
        assert misjudged(pairs(wrong), 0.0) == []

    @pytest.mark.parametrize(
        ("completion", "expected"),
        [
            (r"It is \boxed{3}, that is \boxed{", 1.0),
            (r"<think>\boxed{2}?</think> It is \boxed{3}.", 1.0),
            (r"\boxed{2}?</think> It is \boxed{3}.", 1.0),
            (r"<think>\boxed{3}</think> It is 3.", 0.0),
            (r"<think>It is \boxed{3}, I", 0.0),
            ("Let me see.\n <think> It is \\boxed{3}, I", 0.0),
            ("<think>2?</think>\n<think>It is \\boxed{3}, I", 0.0),
            (r"Without a <think> tag, it is \boxed{3}.", 1.0),
            ("It is \\boxed{3}. I wrote no `<think>`.", 1.0),
            ("The answer is $3$.", 0.0),
            ("3", 0.0),
            (r"\boxed{\frac{}{}{}}}", 0.0),
        ],
    )
    def test_the_last_box_after_the_thinking_is_the_answer(self, completion: str, expected: float):
        assert score(completion, "3") == expected

    @pytest.mark.parametrize("pattern", ADVERSARIAL)
    def test_completions_of_a_model_in_training(self, pattern: str, monkeypatch: pytest.MonkeyPatch):
        for limit in ("PARSING_LIMIT", "VERIFYING_LIMIT"):
            monkeypatch.setattr(rewards, limit, 1.0)  # some of them reach both limits
        for completion, gold, verdict in ADVERSARIAL[pattern]:
            assert score(completion, gold) == verdict, (completion[:80], gold[:80])

    def test_the_gold_answer_may_be_in_a_solution(self):
        assert score(box("3"), r"Since $1 + 2 = 3$, it is $\boxed{3}$.") == 1.0
        assert score(box("1"), r"Since $1 + 2 = 3$, it is $\boxed{3}$.") == 0.0
        assert score(box("1234"), "1,000 + 234 = 1,234\n#### 1,234") == 1.0
        assert score(box("234"), "1,000 + 234 = 1,234\n#### 1,234") == 0.0

    @pytest.mark.parametrize("completion", ["no box", r"\boxed{}", box("3"), box(r"\frac{")])
    def test_a_gold_answer_that_is_text_to_the_parser_leaves_nothing_unscored(self, completion: str):
        for gold in (r"x \equiv 3 \pmod 7", "A^*", "a -> b", r"1, 2, \ldots, 10"):
            assert score(completion, gold) == 0.0
            assert score(box(gold), gold) == 1.0

    @pytest.mark.parametrize("gold", ["First compute 6*7. 42", "½", r"The sum is $x \equiv 3 \pmod 7$.", "答案是5"])
    def test_a_sentence_or_characters_that_cannot_be_read_are_no_gold_answer(self, gold: str):
        assert [score(box(answer), gold) for answer in ("42", gold)] == [None, 1.0]

    @pytest.mark.parametrize("gold", ["", "  ", r"\boxed{}", r"So \boxed{", r"\frac{", r"\text{}", "5" * 301, "A^*}"])
    @pytest.mark.parametrize("completion", [box("3"), r"\boxed{}", "no box"])
    def test_without_a_gold_answer_the_score_is_none(self, gold: str, completion: str):
        assert score(completion, gold) is None

    def test_a_too_long_answer_is_wrong(self):
        assert score(box("1+" * 200 + "1"), "201") == 0.0

    @given(st.text() | LATEX | LATEX.map(box), st.text() | LATEX)
    @settings(deadline=None, max_examples=150)
    def test_scores_never_raise(self, completion: str, solution: str):
        assert score(completion, solution) in (0.0, 1.0, None)


class TestFailingMathVerify:
    """Scores if math-verify fails; the answers differ as strings, so that it is called."""

    def fail(self, *args, **kwargs):
        raise RecursionError

    def test_a_gold_answer_that_cannot_be_parsed_is_unscored_and_an_answer_wrong(self, monkeypatch):
        parse = rewards.parse

        def parse_or_fail(text, *args, **named):
            return self.fail() if "77" in text else parse(text, *args, **named)

        monkeypatch.setattr(rewards, "parse", parse_or_fail)
        assert [score(text, "77") for text in (box("7"), "no box", box("77"))] == [None, None, 1.0]
        assert score(box("77"), "7") == 0.0

    def test_a_comparison_that_fails_is_wrong(self, monkeypatch: pytest.MonkeyPatch):
        assert score(box("1/2"), "0.5") == 1.0
        monkeypatch.setattr(rewards, "verify", self.fail)
        assert score(box("1/2"), "0.5") == 0.0

    def test_an_endless_comparison_is_wrong_in_time(self, monkeypatch: pytest.MonkeyPatch):
        """Endless in math-verify, and again in the comparisons after it."""
        monkeypatch.setattr(rewards, "VERIFYING_LIMIT", 0.5)
        answer = r"\lfloor" * 9 + "1" + r"\rfloor" * 9
        start = time.process_time()
        assert score(box(answer), r"\lfloor i\rfloor") == 0.0
        assert 0.2 < time.process_time() - start < 5

    def test_code_that_swallows_exceptions_is_stopped(self, monkeypatch: pytest.MonkeyPatch):
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

    def test_only_the_main_threads_own_processor_time_counts(self):
        def compute_in_native_code() -> None:
            while time.thread_time() < 0.8:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 10**5)

        def compute(seconds: float) -> None:
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass

        other = threading.Thread(target=compute_in_native_code)
        other.start()
        with processor_time(0.3):
            compute(0.1)
            other.join()
        with pytest.raises(OutOfTime), processor_time(0.2):
            compute(10.0)


class TestAccuracyReward:
    def test_the_last_message_counts(self):
        messages = [{"role": "assistant", "content": box("3")}, {"role": "assistant", "content": box("4")}]
        assert accuracy_reward([messages], ["4"]) == [1.0]
        assert accuracy_reward([[{"role": "assistant", "content": None}]], ["4"]) == [0.0]

    def test_solutions_may_be_numbers_or_missing(self):
        assert accuracy_reward([box("3")] * 5, [3, 3.0, 4, None, ""]) == [1.0, 1.0, 0.0, None, None]
        with pytest.raises(ValueError, match="zip"):
            accuracy_reward([box("3")], ["3", "4"])

    def test_very_small_and_large_numbers_are_read_as_numbers(self):
        completions = [box(answer) for answer in (r"10^{-5}", "0.00001", "10^{20}", "-2.2817181715")]
        assert accuracy_reward(completions, [1e-5, 1e-5, 1e20, 1e-5]) == [1.0, 1.0, 1.0, 0.0]
        assert accuracy_reward([box("0.00001"), box("1")], [np.float64(1e-5), 10**400]) == [1.0, None]
        written = {"0.0005": ".5e-3", "1000": "$1e3$", "(1000,2)": "(1e3,2)", r"300000000\text{ m}": r"3e8\text{ m}"}
        assert misjudged(written.items(), 1.0) == []
        assert misjudged({"1e3": "1000", "1500": "1.5e3"}.items(), 1.0) == []
        assert accuracy_reward([box("1")], [math.nan]) == [None]

    def test_another_thread_gets_the_same_scores(self):
        right, wrong = KINDS["mathematics"]
        some_pairs = pairs(right)[::5] + pairs(wrong)[::5]
        golds = [gold for gold, _ in some_pairs]
        completions = [box(answer) for _, answer in some_pairs]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(accuracy_reward, completions, golds).result() == accuracy_reward(completions, golds)


@pytest.fixture(scope="module")
def problems(shared_data: Path) -> list[dict[str, str]]:
    """MATH, the test split first."""
    rows = []
    for path in sorted((shared_data / "math").glob("*.gz")):
        with gzip.open(path) as lines:
            rows += map(json.loads, lines)
    return rows


@pytest.fixture(scope="module")
def golds(problems: list[dict[str, str]]) -> list[str]:
    """The final answers of MATH."""
    answers = [final_answer(problem["solution"]) for problem in problems]
    return [answer for answer in answers if answer]


@pytest.fixture(scope="module")
def distinct(golds: list[str]) -> list[str]:
    answers = sorted(set(golds))
    random.Random(0).shuffle(answers)
    return answers


class TestMath:
    def test_every_answer_equals_itself(self, golds: list[str]):
        assert len(golds) == 12_498
        assert misjudged(zip(golds, golds, strict=True), 1.0) == []

    def test_copying_the_question_seldom_pays(self, problems: list[dict[str, str]]):
        scores = []
        for problem in problems[:5000:15]:
            formulas = re.findall(r"\$([^$]+)\$", problem["problem"])
            if formulas:
                scores.append(score(box(formulas[-1]), problem["solution"]))
        assert len(scores) > 200
        assert scores.count(1.0) / len(scores) < 0.06  # 0.1 if an answer need not be evaluated

    def test_math_verify_finds_answers_equal_to_themselves(self, distinct: list[str], monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(rewards.notation, "same_string", lambda gold, answer: False)
        some = [answer for answer in distinct[:100] if ":" not in answer]  # 5:00 is a division by zero
        assert misjudged(zip(some, some, strict=True), 1.0) == []

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
    def test_another_notation_is_equal(self, distinct: list[str], pattern: str, replacement: str):
        rewritten = [(gold, re.sub(pattern, replacement, gold)) for gold in distinct]
        changed = [(gold, answer) for gold, answer in rewritten if gold != answer]
        assert len(changed) > 20
        assert misjudged(changed[:30], 1.0) == []

    def test_another_number_is_wrong(self, distinct: list[str]):
        def other(gold: str) -> str:
            numbers = [*re.finditer(r"\d+", gold)]
            number = random.Random(gold).choice(numbers)
            another = str(int(number[0]) + 1)
            return gold[: number.start()] + another + gold[number.end() :]

        golds = [gold for gold in distinct if re.search(r"\d", gold)]
        # Not the exponent of a unit that is not known, nor one of two forms of the same answer.
        golds = [gold for gold in golds if not re.search(r"text|approx|.=", gold)]
        assert misjudged([(gold, other(gold)) for gold in golds[:100]], 0.0) == []

    def test_the_answer_to_another_problem_is_wrong(self, distinct: list[str]):
        assert misjudged(itertools.pairwise(distinct[:100]), 0.0) == []
