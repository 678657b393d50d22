"""From problems to prompts: formats, unusable rows, overlap, and long prompts."""

import json
import logging
import statistics
from pathlib import Path

import datasets
import pytest
from tiny import make_tokenizer
from transformers import AutoTokenizer

from opo_trl.data import INSTRUCTION, drop_long_prompts, load_problems, to_prompts, without_overlap
from opo_trl.data.prompts import Style


def make(*pairs: tuple[object, object]) -> datasets.Dataset:
    return datasets.Dataset.from_list(
        [{"problem": p, "level": "Level 1", "type": "Algebra", "solution": s} for p, s in pairs]
    )


class TestPrompts:
    def test_chat(self):
        prompts = to_prompts(make(("What is $1 + 1$?", r"It is $\boxed{2}$.")))
        content = f"What is $1 + 1$?\n\n{INSTRUCTION}"
        assert prompts.to_list() == [
            {"prompt": [{"role": "user", "content": content}], "solution": "2", "level": "Level 1", "type": "Algebra"}
        ]
        assert "step by step" in INSTRUCTION
        assert r"\boxed{}" in INSTRUCTION

    def test_the_instruction_can_be_changed(self):
        prompts = to_prompts(make(("What?", r"\boxed{2}")), instruction="Be brief.")
        assert prompts[0]["prompt"][0]["content"] == "What?\n\nBe brief."
        assert to_prompts(make(("What?", r"\boxed{2}")), instruction="")[0]["prompt"][0]["content"] == "What?"

    def test_plain_keeps_the_problem_and_a_solution_without_a_box(self):
        prompts = to_prompts(make(("47+38-16=", "85-16=69"), (" What?\n", r"\boxed{2}")), style="plain")
        assert prompts["prompt"][:] == ["47+38-16=", " What?\n"]
        assert prompts["solution"][:] == ["85-16=69", "2"]

    def test_an_unknown_style_is_rejected(self):
        with pytest.raises(ValueError, match=r"style='Chat' must be"):
            to_prompts(make(("What?", r"\boxed{2}")), style="Chat")

    def test_unusable_rows_are_counted_and_named(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        pairs = [
            ("fine", r"\boxed{1}"),
            ("empty box", r"\boxed{}"),
            ("no box", "1"),
            ("  ", r"\boxed{1}"),
            (3, r"\boxed{1}"),
            ("no solution", None),
        ]
        rows = [{"problem": p, "level": "Level 1", "type": "Algebra", "solution": s} for p, s in pairs]
        file = tmp_path / "some.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        assert len(to_prompts(load_problems(str(file)))) == 1
        assert len(caplog.records) == 1
        assert caplog.records[0].levelno == logging.WARNING
        assert caplog.records[0].getMessage().splitlines() == [
            "5 of 6 rows cannot be used and are dropped:",
            "  'empty box': its solution has no final answer",
            "  'no box': its solution has no final answer",
            "  '  ': its problem is empty",
            "  '3': its problem is of type int, not a string",
            "  'no solution': its solution is of type NoneType, not a string",
        ]

    def test_a_long_list_of_names_is_cut(self, caplog: pytest.LogCaptureFixture):
        to_prompts(make(*[(f"bad {i}", "1") for i in range(25)], ("fine", r"\boxed{1}")))
        lines = caplog.records[0].getMessage().splitlines()
        assert lines[0].startswith("25 of 26 rows")
        assert len(lines) == 12
        assert lines[-1] == "  and 15 more"

    def test_no_usable_row_is_an_error(self):
        with pytest.raises(ValueError, match=r"style='chat': '47\+1=': its solution has no final answer"):
            to_prompts(make(("47+1=", "\\boxed{}")))

    @pytest.mark.parametrize("style", ["chat", "plain"])
    def test_solutions_are_final_answers_if_none_has_a_box(self, style):
        assert to_prompts(make(("47+1=", "48"), ("2*3=", "6")), style=style)["solution"][:] == ["48", "6"]


class TestOverlap:
    def test_overlap_is_dropped_ignoring_white_space(self, caplog: pytest.LogCaptureFixture):
        training = make(("What is\n$1 +  1$?", "2"), ("Other", "1"))
        held_out = make(("New", "1"), ("What is $1 + 1$? ", "2"), ("what is $1 + 1$?", "2"))
        assert without_overlap(held_out, training)["problem"][:] == ["New", "what is $1 + 1$?"]
        assert "1 of 3 rows of the held-out set are in the training set" in caplog.text
        assert "  'What is $1 + 1$? '\n" in caplog.text

    def test_no_row_left_is_an_error(self):
        with pytest.raises(ValueError, match=r"dataset_test_split: all 1 rows .* Change `dataset_test_split`"):
            without_overlap(make(("a", "1")), make((" a", "1")))


class TestLongPrompts:
    @pytest.mark.parametrize("style", ["chat", "plain"])
    def test_the_limit_counts_the_prompt_as_the_model_gets_it(self, style: Style, caplog: pytest.LogCaptureFixture):
        tokenizer = make_tokenizer()
        prompts = to_prompts(make(("ab", r"\boxed{1}"), ("abcdef", r"\boxed{1}")), style=style)
        # One token a byte: <|im_start|>user\n, the content, <|im_end|>\n, <|im_start|>assistant\n.
        frame = 6 + len(f"\n\n{INSTRUCTION}") + 2 + 11 if style == "chat" else 0
        assert len(drop_long_prompts(prompts, tokenizer, frame + 6)) == 2
        assert not caplog.records
        assert len(drop_long_prompts(prompts, tokenizer, frame + 5)) == 1
        assert f"1 of 2 rows are longer than max_prompt_length={frame + 5} tokens" in caplog.text
        assert "  'abcdef" in caplog.text
        assert f"{frame + 6} tokens" in caplog.text
        with pytest.raises(ValueError, match="max_prompt_length: all 2 rows"):
            drop_long_prompts(prompts, tokenizer, 1)

    def test_template_arguments_change_the_length(self):
        tokenizer = make_tokenizer()
        tokenizer.chat_template += "{{ prefix }}"
        prompts = to_prompts(make(("ab", r"\boxed{1}"), ("abc", r"\boxed{1}")))
        length = len(tokenizer.apply_chat_template(prompts[1]["prompt"], add_generation_prompt=True)["input_ids"])
        assert len(drop_long_prompts(prompts, tokenizer, length)) == 2
        assert len(drop_long_prompts(prompts, tokenizer, length, {"prefix": "x"})) == 1


class TestMath:
    @pytest.fixture
    def qwen3(self, shared_data: Path):
        return AutoTokenizer.from_pretrained(shared_data / "Qwen3-1.7B")

    def test_usable_rows(self, math: str, caplog: pytest.LogCaptureFixture):
        assert len(to_prompts(load_problems(math, levels=["Level 3"]))) == 1592
        assert len(to_prompts(load_problems(math, split="test"))) == 5000
        assert not caplog.records
        assert len(to_prompts(load_problems(math, levels=["Level 5"]))) == 2302
        message = caplog.records[0].getMessage()
        assert message.startswith("2 of 2304 rows cannot be used")
        assert "'For any integer $n>1$, the number of prime numbers greater t': its solution has no final" in message
        assert "'You are given a sequence of $58$ terms; each term has the fo': its solution has no final" in message

    def test_one_problem_of_level_4_is_in_both_splits(self, math: str, caplog: pytest.LogCaptureFixture):
        train, test = (load_problems(math, split=split, levels=["Level 4"]) for split in ("train", "test"))
        assert len(without_overlap(test, train)) == 1213
        assert "'A parabola with equation $y=x^2+bx+c$ passes" in caplog.text

    @pytest.mark.parametrize(
        ("split", "level", "median", "longest"),
        [("train", "Level 3", 43, 903)],
    )
    def test_prompt_lengths(self, math: str, qwen3, split: str, level: str, median: int, longest: int):
        problems = load_problems(math, split=split, levels=[level])
        lengths = [len(ids) for ids in qwen3(problems["problem"][:])["input_ids"]]
        assert statistics.median(lengths) == median
        assert max(lengths) == longest
        prompts = to_prompts(problems)
        # The chat prompt adds 5 tokens before the problem, and the instruction and the start of the answer after it.
        added = len(qwen3(f"\n\n{INSTRUCTION}")["input_ids"]) + 8
        assert len(drop_long_prompts(prompts, qwen3, longest + added)) == len(problems)
        kept = drop_long_prompts(prompts, qwen3, 256)
        expected = [n + added for n in lengths if n + added <= 256]
        assert abs(len(kept) - len(expected)) <= 2  # where problem and instruction meet, tokens may merge
        thinking_off = drop_long_prompts(prompts, qwen3, 260, {"enable_thinking": False})
        assert thinking_off["prompt"][:] == kept["prompt"][:]
