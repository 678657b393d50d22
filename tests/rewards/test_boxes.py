"""Final answers in boxes."""

import functools
import time

import pytest

from opo_trl.data import gym
from opo_trl.data.arithmetic import arithmetic_reward
from opo_trl.rewards.accuracy import accuracy_reward
from opo_trl.rewards.boxes import final_answer, without_reasoning


class TestFinalAnswer:
    @pytest.mark.parametrize(
        ("solution", "answer"),
        [
            (r"So $x = \boxed{3}$.", "3"),
            (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
            (r"$\boxed {17}$ and \boxed{ 4 }", "17, 4"),
            (r"\boxed{1}\boxed{2}", "1, 2"),
            ("\\(\\boxed{1}\\), \\text{ or }\n$$\\boxed{2}$$", "1, 2"),
            (r"\boxed{1} \text{ for } a \text{ and } \boxed{2}", "2"),
            (r"\boxed{1} \text{ for the first and } \boxed{2}", "1, 2"),
            (r"\boxed{3}, so \boxed{1} and \boxed{2}.", "1, 2"),
            (r"\boxed{3}, that is $\boxed{3}$", "3"),
            (r"\boxed{3} $\boxed{3}$", "3"),
            ("\\boxed{2}\n\n\\boxed{3}", "3"),
            (r"\boxed{} and \boxed{3}", "3"),
            (r"$\fbox{3}$", "3"),
            (r"$\boxed 2$.", "2"),
            (r"$\boxed9$.", "9"),
            (r"$\boxed -12.5$.", "-12.5"),
            (r"$\boxed x$", "x"),
            (r"$\boxed{\{1, 2\}}$", r"\{1, 2\}"),
            (r"$\boxed{\left\{1, 2\right.}$", r"\left\{1, 2\right."),
            (r"} $\boxed{\boxed{3}}$ {", "3"),
            (r"\\boxed{3}", "3"),
            (r"\\\boxed{3}", "3"),
            (r"\boxed{1} and \boxed{2", "1"),
            (r"\boxed{1 and \boxed{2}", "2"),
            (r"\boxed{1} by the command \boxed itself", "1"),
            (r"\boxed 3/4", None),
            (r"\boxed 2.5x", None),
            (r"\boxedsin{3}", None),
            (r"\boxed{}", None),
            (r"\boxed{3} \boxed{ }", None),
            (r"\boxed{3", None),
            ("3", None),
            ("", None),
        ],
    )
    def test_final_answer_is_the_content_of_the_last_complete_boxes(self, solution: str, answer: str | None):
        assert final_answer(solution) == answer

    @pytest.mark.parametrize(
        "unit",
        [r"\boxed{", r"\boxed 1,1 ", r"\boxed{1}\text{ and }", "{", "\\", "</think>", "<answer>"],
    )
    def test_hostile_text_takes_linear_time(self, unit: str):
        many = unit * (100_000 // len(unit))
        rewards = (functools.partial(arithmetic_reward, solution=["=1"]), find_gym_answer)
        closed = many + "}" * len(many)
        for text in (many, closed, rf"\boxed{{1}}{many}\boxed{{2}}", rf"\boxed {many}x"):
            start = time.process_time()
            for reward in rewards:
                reward([text])
            final_answer(without_reasoning(text))
            assert time.process_time() - start < 3  # 5 and more if quadratic


def find_gym_answer(completions: list) -> list[str | None]:
    return [gym._answer(completion) for completion in completions]


MESSAGES = {
    "text": [{"role": "assistant", "content": r"\boxed{4}"}],
    "parts": [{"role": "assistant", "content": [{"type": "text", "text": text} for text in (r"\boxed", "{4}")]}],
    "a call": [{"role": "assistant", "content": None, "tool_calls": []}],
    "a call without content": [{"role": "assistant", "tool_calls": []}],
    "an image": [{"role": "assistant", "content": [{"type": "image"}]}],
    "no parts": [{"role": "assistant", "content": []}],
    "no message": [],
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_reward_scores_every_kind_of_message(kind: str):
    completion = MESSAGES[kind]
    expected = 1.0 if kind in ("text", "parts") else 0.0
    assert accuracy_reward([completion], ["4"]) == [expected]
    assert arithmetic_reward([completion], [r"2+2=\boxed{4}"]) == [expected]
    assert find_gym_answer([completion]) == [None]
