"""Final answers in boxes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opo_trl.rewards.boxes import final_answer, find_boxes


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

    @given(st.text() | st.lists(st.sampled_from(["\\boxed", "\\fbox", "{", "}", "\\", " ", "2", "x"])).map("".join))
    @settings(deadline=None)
    def test_final_answer_never_raises(self, text: str):
        answer = final_answer(text)
        assert answer is None or (answer and all(part in text for part in answer.split(", ")))
