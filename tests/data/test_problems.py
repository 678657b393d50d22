import gzip
import json
import logging
import statistics
from collections import Counter
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_tokenizer
from transformers import AutoTokenizer

from opo_trl.data import INSTRUCTION, drop_long_prompts, load_problems, rename_columns, to_prompts, without_overlap
from opo_trl.data import problems as data
from opo_trl.data.problems import final_answer, find_boxes


ROWS = [
    {
        "problem": f"What is ${i} + {i}$?",
        "level": f"Level {1 + i % 3}",
        "type": "Algebra",
        "solution": f"$\\boxed{{{2 * i}}}$.",
    }
    for i in range(30)
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(file: Path, rows: list[dict]) -> str:
    lines = "\n".join(json.dumps(row) for row in rows)
    if file.name.endswith(".parquet"):
        datasets.Dataset.from_list(rows).to_parquet(file)
    elif file.name.endswith(".gz"):
        file.write_bytes(gzip.compress(lines.encode()))
    else:
        file.write_text(json.dumps(rows) if file.suffix == ".json" else lines)
    return str(file)


def make(*pairs: tuple[object, object]) -> datasets.Dataset:
    return datasets.Dataset.from_list(
        [{"problem": p, "level": "Level 1", "type": "Algebra", "solution": s} for p, s in pairs]
    )


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
class TestLocalFiles:
    def test_a_file_is_read_whatever_the_split(self, tmp_path: Path, ending: str):
        file = write(tmp_path / f"some{ending}", ROWS)
        assert load_problems(file, split="test").to_list() == ROWS

    def test_a_folder_has_a_file_for_each_split(self, tmp_path: Path, ending: str):
        write(tmp_path / f"train{ending}", ROWS[:20])
        write(tmp_path / f"test{ending}", ROWS[20:])
        assert load_problems(str(tmp_path)).to_list() == ROWS[:20]
        assert load_problems(str(tmp_path), split="test").to_list() == ROWS[20:]

    def test_only_the_four_columns_are_kept(self, tmp_path: Path, ending: str):
        file = write(tmp_path / f"some{ending}", [{"id": 7, **row} for row in ROWS])
        assert load_problems(file).column_names == ["problem", "level", "type", "solution"]


class TestColumns:
    ANSWERS = ("2 + 2 = <<2+2=4>>4\n#### 4", "1,000 + 80\n#### 1,080")

    def rows(self, **names: list) -> list[dict]:
        return [dict(zip(names, values, strict=True)) for values in zip(*names.values(), strict=True)]

    @pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
    def test_question_and_answer_of_gsm8k_are_taken_and_said(self, tmp_path: Path, ending: str, caplog):
        file = write(tmp_path / f"some{ending}", self.rows(question=["2 + 2?", "More?"], answer=self.ANSWERS))
        problems = load_problems(file)
        assert problems.column_names == ["problem", "level", "type", "solution"]
        assert problems["problem"][:] == ["2 + 2?", "More?"]
        assert [row["solution"] for row in to_prompts(problems)] == ["4", "1080"]
        assert "took 'question' for problem and 'answer' for solution" in caplog.text

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_all_of_gsm8k_can_be_used(self, shared_data: Path, split: str):
        problems = load_problems(str(shared_data / "gsm8k"), split=split)
        prompts = to_prompts(problems)
        assert len(prompts) == len(problems) == {"train": 7473, "test": 1319}[split]
        assert all(float(answer) == float(answer) for answer in prompts["solution"])

    @pytest.mark.parametrize(
        ("names", "columns"),
        [
            (("problem", "answer"), None),
            (("question", "final"), {"problem": "question", "solution": "final"}),
            (("question", "answer"), {"problem": "question", "solution": "answer"}),
        ],
    )
    def test_answers_without_steps(self, tmp_path: Path, names, columns, caplog):
        file = write(tmp_path / "some.jsonl", self.rows(**{names[0]: ["2 + 2?"], names[1]: ["4"]}))
        problems = load_problems(file, columns=columns)
        assert to_prompts(problems)["solution"][:] == ["4"]
        assert to_prompts(problems, style="plain")["solution"][:] == ["4"]
        assert f"took {names[0]!r} for problem" in caplog.text or names[0] == "problem"

    def test_solution_goes_before_answer_unless_it_is_said(self, tmp_path: Path):
        rows = self.rows(problem=["2 + 2?"], solution=["\\boxed{4}"], answer=["5"])
        file = write(tmp_path / "some.jsonl", rows)
        assert to_prompts(load_problems(file))["solution"][:] == ["4"]
        assert to_prompts(load_problems(file, columns={"solution": "answer"}))["solution"][:] == ["5"]

    def test_levels_of_another_name(self, tmp_path: Path):
        rows = self.rows(problem=["a", "b"], answer=["1", "2"], difficulty=["easy", "hard"])
        file = write(tmp_path / "some.jsonl", rows)
        assert len(load_problems(file, columns={"level": "difficulty"}, levels=["hard"])) == 1
        with pytest.raises(ValueError, match=r"levels=\['hard'\]: the data set has no levels"):
            load_problems(file, levels=["hard"])

    @pytest.mark.parametrize("columns", [{"problem": "text"}, {"question": "problem"}])
    def test_columns_that_do_not_fit(self, tmp_path: Path, columns):
        file = write(tmp_path / "some.jsonl", self.rows(problem=["a"], answer=["1"]))
        with pytest.raises(ValueError, match=r"columns=.* does not fit .*solution.*problem, answer"):
            load_problems(file, columns=columns)

    def test_columns_of_ready_made_prompts(self):
        dataset = datasets.Dataset.from_dict({"question": ["a"], "answer": ["1"]})
        renamed = rename_columns(dataset, {"prompt": "question", "solution": "answer"})
        assert renamed.column_names == ["prompt", "solution"]
        with pytest.raises(ValueError, match=r"columns=\{'prompt': 'text'\} does not fit"):
            rename_columns(dataset, {"prompt": "text"})
        with pytest.raises(ValueError, match=r"columns=\{'answer': 'question'\} does not fit"):
            rename_columns(dataset, {"answer": "question"})


class TestSelection:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        write(tmp_path / "train.jsonl", ROWS)
        return str(tmp_path)

    def test_levels(self, folder: str):
        problems = load_problems(folder, levels=["Level 3", "Level 1"])
        assert Counter(problems["level"]) == {"Level 1": 10, "Level 3": 10}

    @pytest.mark.parametrize("levels", [["Level 3", "Level 7"], ["3"], "Level 3", []])
    def test_an_unknown_level_is_refused_with_those_that_exist(self, folder: str, levels: list[str]):
        with pytest.raises(ValueError, match=r"levels=.*\['Level 1', 'Level 2', 'Level 3'\]"):
            load_problems(folder, levels=levels)

    @pytest.mark.parametrize(("fraction", "size"), [(1.0, 30), (0.5, 15), (0.12, 4), (0.02, 1)])
    def test_a_fraction_is_rounded(self, folder: str, fraction: float, size: int):
        assert len(load_problems(folder, fraction=fraction)) == size

    def test_a_fraction_is_random_seeded_and_nested(self, folder: str):
        def chosen(fraction: float, seed: int) -> list[str]:
            return load_problems(folder, fraction=fraction, seed=seed)["problem"][:]

        assert chosen(0.5, 1) == chosen(0.5, 1)
        assert set(chosen(0.5, 1)) != set(chosen(0.5, 2))
        assert set(chosen(0.5, 1)) != {row["problem"] for row in ROWS[:15]}
        assert set(chosen(0.2, 1)) < set(chosen(0.5, 1))

    @pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan"), 0.01])
    def test_a_fraction_without_rows_is_refused(self, folder: str, fraction: float):
        with pytest.raises(ValueError, match=rf"fraction={fraction}.* Use "):
            load_problems(folder, fraction=fraction)

    def test_the_level_comes_before_the_fraction(self, folder: str):
        problems = load_problems(folder, levels=["Level 2"], fraction=0.5)
        assert Counter(problems["level"]) == {"Level 2": 5}


class TestNames:
    @pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "nowhere.jsonl", "~/no/where"])
    def test_a_missing_path_is_not_asked_of_the_hub(self, name: str):
        with pytest.raises(ValueError, match="does not exist"):
            load_problems(name)

    def test_a_folder_without_the_split(self, tmp_path: Path):
        with pytest.raises(ValueError, match=r"without split='test'.*test\.jsonl\.gz"):
            load_problems(str(tmp_path), split="test")

    def test_a_file_of_another_kind(self, tmp_path: Path):
        (tmp_path / "some.csv").write_text("problem\n")
        with pytest.raises(ValueError, match=r"some\.csv' is not a file that can be read"):
            load_problems(str(tmp_path / "some.csv"))

    @pytest.mark.parametrize("content", ["{nonsense", ""])
    def test_a_broken_file(self, tmp_path: Path, content: str):
        (tmp_path / "some.jsonl").write_text(content)
        with pytest.raises(ValueError, match=r"some\.jsonl' cannot be read: "):
            load_problems(str(tmp_path / "some.jsonl"))

    def test_a_missing_column(self, tmp_path: Path):
        file = write(tmp_path / "some.jsonl", [{"question": "2 + 2", "level": "Level 1", "type": "", "answer": "4"}])
        with pytest.raises(ValueError, match=r"no column \['problem', 'solution'\], only \['question'"):
            load_problems(file)

    def test_anything_else_is_a_hub_id(self, monkeypatch: pytest.MonkeyPatch):
        asked = []

        def load_dataset(*args, **kwargs):
            asked.append((args, kwargs))
            return datasets.Dataset.from_list(ROWS)

        monkeypatch.setattr(data, "load_dataset", load_dataset)
        assert len(load_problems("some/name", dataset_config="algebra", split="test", levels=["Level 1"])) == 10
        assert asked == [(("some/name", "algebra"), {"split": "test"})]

    def test_arithmetic_is_embedded(self):
        problems = load_problems("arithmetic", split="test", levels=["Level 2"], fraction=0.1)
        assert len(problems) == 100
        assert set(problems["level"]) == {"Level 2"}
        with pytest.raises(ValueError, match="Level 9"):
            load_problems("arithmetic", levels=["Level 9"])

    def test_a_configuration_is_for_the_hub_only(self, tmp_path: Path):
        for name in ("arithmetic", write(tmp_path / "some.jsonl", ROWS)):
            with pytest.raises(ValueError, match="config='algebra'"):
                load_problems(name, dataset_config="algebra")


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
    def test_it_is_what_the_last_complete_boxes_hold(self, solution: str, answer: str | None):
        assert final_answer(solution) == answer

    def test_many_open_boxes_take_no_time(self):
        assert final_answer("\\boxed{" * 100_000) is None
        assert final_answer("\\boxed{1} , " * 20_000) == "1"
        assert len(find_boxes("\\boxed{" * 1_000 + "}" * 500)) == 1_000

    @given(st.text() | st.lists(st.sampled_from(["\\boxed", "\\fbox", "{", "}", "\\", " ", "2", "x"])).map("".join))
    @settings(deadline=None)
    def test_it_never_raises(self, text: str):
        answer = final_answer(text)
        assert answer is None or (answer and all(part in text for part in answer.split(", ")))


class TestPrompts:
    def test_chat(self):
        prompts = to_prompts(make(("What is $1 + 1$?", r"It is $\boxed{2}$.")))
        content = f"What is $1 + 1$?\n\n{INSTRUCTION}"
        assert prompts.to_list() == [
            {"prompt": [{"role": "user", "content": content}], "solution": "2", "level": "Level 1", "type": "Algebra"}
        ]
        assert "step by step" in INSTRUCTION
        assert r"\boxed{}" in INSTRUCTION

    def test_the_instruction_can_be_another(self):
        prompts = to_prompts(make(("What?", r"\boxed{2}")), instruction="Be brief.")
        assert prompts[0]["prompt"][0]["content"] == "What?\n\nBe brief."

    def test_plain_keeps_the_problem_and_a_solution_without_a_box(self):
        prompts = to_prompts(make(("47+38-16=", "85-16=69"), (" What?\n", r"\boxed{2}")), style="plain")
        assert prompts["prompt"][:] == ["47+38-16=", " What?\n"]
        assert prompts["solution"][:] == ["85-16=69", "2"]

    def test_an_unknown_style(self):
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
        prompts = to_prompts(load_problems(write(tmp_path / "some.jsonl", rows)))
        assert len(prompts) == 1
        assert len(caplog.records) == 1
        assert caplog.records[0].levelno == logging.WARNING
        assert caplog.records[0].getMessage().splitlines() == [
            "5 of 6 rows cannot be used and are dropped:",
            "  row 1 ('empty box'): its solution has no final answer",
            "  row 2 ('no box'): its solution has no final answer",
            "  row 3 ('  '): its problem is empty",
            "  row 4 ('3'): its problem is of type int, not a string",
            "  row 5 ('no solution'): its solution is of type NoneType, not a string",
        ]

    def test_a_long_list_of_names_is_cut(self, caplog: pytest.LogCaptureFixture):
        to_prompts(make(*[(f"bad {i}", "1") for i in range(25)], ("fine", r"\boxed{1}")))
        lines = caplog.records[0].getMessage().splitlines()
        assert lines[0].startswith("25 of 26 rows")
        assert len(lines) == 12
        assert lines[-1] == "  and 15 more"

    def test_no_usable_row(self):
        with pytest.raises(ValueError, match=r"style='chat': row 0 \('47\+1='\).*style='plain'"):
            to_prompts(make(("47+1=", "48")))


class TestOverlap:
    def test_it_is_dropped_up_to_white_space(self, caplog: pytest.LogCaptureFixture):
        training = make(("What is\n$1 +  1$?", "2"), ("Other", "1"))
        held_out = make(("New", "1"), ("What is $1 + 1$? ", "2"), ("what is $1 + 1$?", "2"))
        assert without_overlap(held_out, training)["problem"][:] == ["New", "what is $1 + 1$?"]
        assert "1 of 3 rows of the held-out set are in the training set" in caplog.text
        assert "row 1" in caplog.text

    def test_without_overlap_nothing_is_said(self, caplog: pytest.LogCaptureFixture):
        assert len(without_overlap(make(("a", "1")), make(("b", "1")))) == 1
        assert not caplog.records

    def test_nothing_left(self):
        with pytest.raises(ValueError, match="held_out: all 1 rows"):
            without_overlap(make(("a", "1")), make((" a", "1")))


class TestLongPrompts:
    @pytest.mark.parametrize("style", ["chat", "plain"])
    def test_the_limit_is_that_of_the_prompt_as_the_model_gets_it(
        self, style: data.Style, caplog: pytest.LogCaptureFixture
    ):
        tokenizer = make_tokenizer()
        prompts = to_prompts(make(("ab", r"\boxed{1}"), ("abcdef", r"\boxed{1}")), style=style)
        # One token a byte: <|im_start|>user\n, the content, <|im_end|>\n, <|im_start|>assistant\n.
        frame = 6 + len(f"\n\n{INSTRUCTION}") + 2 + 11 if style == "chat" else 0
        assert len(drop_long_prompts(prompts, tokenizer, frame + 6)) == 2
        assert not caplog.records
        assert len(drop_long_prompts(prompts, tokenizer, frame + 5)) == 1
        assert f"1 of 2 rows are longer than max_prompt_length={frame + 5} tokens" in caplog.text
        assert "row 1 ('abcdef" in caplog.text
        assert f"{frame + 6} tokens" in caplog.text
        with pytest.raises(ValueError, match="max_prompt_length: all 2 rows"):
            drop_long_prompts(prompts, tokenizer, 1)

    def test_the_arguments_of_the_template_count(self):
        tokenizer = make_tokenizer()
        tokenizer.chat_template += "{{ prefix }}"
        prompts = to_prompts(make(("ab", r"\boxed{1}"), ("abc", r"\boxed{1}")))
        length = len(tokenizer.apply_chat_template(prompts[1]["prompt"], add_generation_prompt=True)["input_ids"])
        assert len(drop_long_prompts(prompts, tokenizer, length)) == 2
        assert len(drop_long_prompts(prompts, tokenizer, length, {"prefix": "x"})) == 1


class TestMath:
    """MATH itself; the expected figures are those of the data's README."""

    @pytest.fixture
    def math(self, shared_data: Path) -> str:
        return str(shared_data / "math")

    @pytest.fixture
    def qwen3(self, shared_data: Path):
        return AutoTokenizer.from_pretrained(shared_data / "Qwen3-1.7B")

    def test_levels(self, math: str):
        train, test = (Counter(load_problems(math, split=split)["level"]) for split in ("train", "test"))
        assert [train[f"Level {level}"] for level in "12345?"] == [564, 1348, 1592, 1690, 2304, 2]
        assert [test[f"Level {level}"] for level in "12345?"] == [437, 894, 1131, 1214, 1324, 0]
        assert (train.total(), test.total()) == (7500, 5000)

    def test_usable_rows(self, math: str, caplog: pytest.LogCaptureFixture):
        assert len(to_prompts(load_problems(math, levels=["Level 3"]))) == 1592
        assert len(to_prompts(load_problems(math, split="test"))) == 5000
        assert not caplog.records
        assert len(to_prompts(load_problems(math, levels=["Level 5"]))) == 2302
        message = caplog.records[0].getMessage()
        assert message.startswith("2 of 2304 rows cannot be used")
        assert "'For any integer $n>1$, the number of prime numbers greater t'): its solution has no final" in message
        assert "'You are given a sequence of $58$ terms; each term has the fo'): its solution has no final" in message

    def test_boxes_without_braces(self, math: str):
        bare = [s for s in load_problems(math)["solution"] if "\\boxed " in s and "\\boxed {" not in s]
        assert [final_answer(solution) for solution in bare] == ["2", "9"]

    def test_a_tenth_of_level_3(self, math: str):
        problems = load_problems(math, levels=["Level 3"], fraction=0.1, seed=42)
        assert len(problems) == 159
        assert problems.to_list() == load_problems(math, levels=["Level 3"], fraction=0.1).to_list()
        assert problems["problem"][:] != load_problems(math, levels=["Level 3"], fraction=0.1, seed=43)["problem"][:]

    def test_one_problem_of_level_4_is_in_both_splits(self, math: str, caplog: pytest.LogCaptureFixture):
        train, test = (load_problems(math, split=split, levels=["Level 4"]) for split in ("train", "test"))
        assert len(without_overlap(test, train)) == 1213
        assert "'A parabola with equation $y=x^2+bx+c$ passes" in caplog.text

    def test_prompts_of_qwen3(self, math: str, qwen3):
        prompts = to_prompts(load_problems(math, levels=["Level 3"], fraction=0.01))
        content = prompts[0]["prompt"][0]["content"]
        expected = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        assert qwen3.apply_chat_template(prompts[0]["prompt"], add_generation_prompt=True, tokenize=False) == expected
        assert "\\" in content
        assert "\n\nPlease reason step by step" in content

    @pytest.mark.parametrize(
        ("split", "level", "median", "longest"),
        [("train", "Level 3", 43, 903), ("train", "Level 4", 51, 795), ("test", "Level 4", 51, 791)],
    )
    def test_prompt_lengths(self, math: str, qwen3, split: str, level: str, median: int, longest: int):
        problems = load_problems(math, split=split, levels=[level])
        lengths = [len(ids) for ids in qwen3(problems["problem"][:])["input_ids"]]
        assert statistics.median(lengths) == median
        assert max(lengths) == longest
        prompts = to_prompts(problems)
        # The chat prompt adds 5 tokens before the problem, and the instruction and the start of the answer behind it.
        added = len(qwen3(f"\n\n{INSTRUCTION}")["input_ids"]) + 8
        assert len(drop_long_prompts(prompts, qwen3, longest + added)) == len(problems)
        kept = drop_long_prompts(prompts, qwen3, 256)
        expected = [n + added for n in lengths if n + added <= 256]
        assert abs(len(kept) - len(expected)) <= 2  # where problem and instruction meet, tokens may merge
        thinking_off = drop_long_prompts(prompts, qwen3, 260, {"enable_thinking": False})
        assert thinking_off["prompt"][:] == kept["prompt"][:]
