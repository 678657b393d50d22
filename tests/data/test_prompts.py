"""From problems to prompts: formats, unusable rows, overlap, and long prompts."""

import logging
from pathlib import Path

import datasets
import pytest
from tiny import make_tokenizer
from tokenizers.processors import TemplateProcessing

from opo_trl.data import INSTRUCTION, drop_long_prompts, load_problems, to_prompts, without_overlap
from opo_trl.data.prompt_ids import PROMPT_IDS
from opo_trl.data.prompts import Style, tokenize_prompts


def make(*pairs: tuple[object, object]) -> datasets.Dataset:
    rows = []
    for problem, solution in pairs:
        rows.append({"problem": problem, "level": "Level 1", "solution": solution})
    return datasets.Dataset.from_list(rows)


class TestPrompts:
    def test_plain_keeps_the_problem_and_a_solution_without_a_box(self):
        problems = make(("47+38-16=", "85-16=69"), (" What?\n", r"\boxed{2}"))
        prompts = to_prompts(problems, style="plain")
        assert prompts["prompt"][:] == ["47+38-16=", " What?\n"]
        assert prompts["solution"][:] == ["85-16=69", "2"]

    def test_an_empty_instruction_leaves_the_problem_as_it_is(self):
        prompts = to_prompts(make(("1+1=", r"\boxed{2}")), instruction="")
        assert prompts["prompt"][0] == [{"role": "user", "content": "1+1="}]

    def test_unusable_rows_are_counted_and_named(self, caplog: pytest.LogCaptureFixture):
        unusable = [("empty box", r"\boxed{}"), ("no box", "1"), ("  ", r"\boxed{1}"), ("no solution", None)]
        problems = make(("fine", r"\boxed{1}"), *unusable)
        assert len(to_prompts(problems)) == 1
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        warning = "4 of 5 rows have no text as problem, or no final answer, the first 'empty box'. They are dropped."
        assert warning in caplog.text
        with pytest.raises(ValueError, match=r"1 of 1 rows have no text as problem.* None is left"):
            to_prompts(make(("47+1=", "\\boxed{}")))


def test_overlap_is_dropped_ignoring_white_space(caplog: pytest.LogCaptureFixture):
    training = make(("What is\n$1 +  1$?", "2"), ("Other", "1"))
    held_out = make(("New", "1"), ("What is $1 + 1$? ", "2"), ("what is $1 + 1$?", "2"))
    others = without_overlap(held_out, training)
    assert list(others["problem"]) == ["New", "what is $1 + 1$?"]
    assert "1 of 3 rows of the held-out set are in the training set, the first 'What is $1 + 1$? '" in caplog.text
    with pytest.raises(ValueError, match=r"1 of 1 rows of the held-out set"):
        without_overlap(make(("a", "1")), make((" a", "1")))


class TestLongPrompts:
    @pytest.mark.parametrize("style", ["chat", "plain"])
    def test_the_limit_counts_the_prompt_as_the_model_gets_it(self, style: Style, caplog: pytest.LogCaptureFixture):
        tokenizer = make_tokenizer()
        prompts = to_prompts(make(("ab", r"\boxed{1}"), ("abcdef", r"\boxed{1}")), style=style)
        longest = len("abcdef")
        if style == "chat":
            # One token a byte: <|im_start|>user\n, the content, <|im_end|>\n, <|im_start|>assistant\n.
            longest += 6 + len(f"\n\n{INSTRUCTION}") + 2 + 11
        assert len(drop_long_prompts(prompts, tokenizer, longest)) == 2
        assert not caplog.records
        assert len(drop_long_prompts(prompts, tokenizer, longest - 1)) == 1
        assert f"1 of 2 rows are longer than max_prompt_length={longest - 1} tokens" in caplog.text
        with pytest.raises(ValueError, match="2 of 2 rows are longer than max_prompt_length=1 tokens"):
            drop_long_prompts(prompts, tokenizer, 1)

    def test_a_token_at_the_beginning_is_counted_for_a_text_only(self):
        """A chat template writes its own."""
        tokenizer = make_tokenizer()
        first = tokenizer.convert_tokens_to_ids("<|im_start|>")
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)]
        )
        (ids_of_text,) = tokenize_prompts(["ab"], tokenizer)
        (ids_of_chat,) = tokenize_prompts([[{"role": "user", "content": "ab"}]], tokenizer)
        assert (ids_of_text.count(first), len(ids_of_text)) == (1, 3)
        assert ids_of_chat.count(first) == 2  # of the user's and the assistant's turn

    def test_the_limit_counts_the_tokens_that_a_dataset_has(self):
        prompts = datasets.Dataset.from_dict({"prompt": ["ab", "abcdef"], PROMPT_IDS: [[5] * 9, [5]]})
        assert list(drop_long_prompts(prompts, make_tokenizer(), 5)["prompt"]) == ["abcdef"]

    def test_template_arguments_change_the_length(self):
        tokenizer = make_tokenizer()
        tokenizer.chat_template += "{{ prefix }}"
        prompts = to_prompts(make(("ab", r"\boxed{1}"), ("abc", r"\boxed{1}")))
        longer = prompts[1]["prompt"]
        ids = tokenizer.apply_chat_template(longer, add_generation_prompt=True)["input_ids"]
        length = len(ids)
        assert len(drop_long_prompts(prompts, tokenizer, length)) == 2
        assert len(drop_long_prompts(prompts, tokenizer, length, {"prefix": "x"})) == 1


def test_usable_rows_of_math(shared_data: Path, caplog: pytest.LogCaptureFixture):
    math = str(shared_data / "math")
    test = load_problems(math, split="test")
    assert len(to_prompts(test)) == 5000
    assert not caplog.records
    level_5 = load_problems(math, levels=["Level 5"])
    assert len(to_prompts(level_5)) == 2302
    assert "2 of 2304 rows have no text as problem, or no final answer" in caplog.text
    train = load_problems(math, split="train", levels=["Level 4"])
    test = load_problems(math, split="test", levels=["Level 4"])
    assert len(without_overlap(test, train)) == 1213
