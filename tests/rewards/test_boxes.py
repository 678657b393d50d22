"""Final answers in boxes."""

import functools
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opo_trl.data import gym
from opo_trl.data.arithmetic import arithmetic_reward
from opo_trl.rewards.accuracy import accuracy_reward, format_reward
from opo_trl.rewards.boxes import final_answer, find_boxes, without_reasoning


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

    def test_many_open_boxes_take_linear_time(self):
        assert final_answer("\\boxed{" * 100_000) is None
        assert final_answer("\\boxed{1} , " * 20_000) == "1"
        assert len(find_boxes("\\boxed{" * 1_000 + "}" * 500)) == 1_000

    @pytest.mark.parametrize(
        "unit",
        [r"\boxed{", r"\boxed 1,1 ", r"\boxed{1}\text{ and }", *"{}\\ ", "1,", "\n ", "</think>", "<answer>"],
    )
    def test_hostile_text_takes_linear_time(self, unit: str):
        many = unit * (100_000 // len(unit))
        rewards = (format_reward, functools.partial(arithmetic_reward, solution=["=1"]), find_gym_answer)
        for text in (many, many + "}" * len(many), r"\boxed{1}" + many + r"\boxed{2}", r"\boxed " + many + "x"):
            start = time.process_time()
            for reward in rewards:
                reward([text])
            final_answer(without_reasoning(text))
            assert time.process_time() - start < 3  # 5 and more if quadratic

    def test_nested_boxes_take_linear_memory(self):
        tracemalloc.start()
        assert format_reward([r"\boxed{" * 8_000 + "}" * 8_000]) == [0.0]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20 * 2**20

    @given(st.text() | st.lists(st.sampled_from(["\\boxed", "\\fbox", "{", "}", "\\", " ", "2", "x"])).map("".join))
    @settings(deadline=None)
    def test_final_answer_never_raises(self, text: str):
        answer = final_answer(text)
        assert answer is None or (answer and all(part in text for part in answer.split(", ")))


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
    completion, right = MESSAGES[kind], float(kind in ("text", "parts"))
    assert accuracy_reward([completion], ["4"]) == [right]
    assert format_reward([completion]) == [right]
    assert arithmetic_reward([completion], [r"2+2=\boxed{4}"]) == [right]
    assert find_gym_answer([completion]) == [None]
