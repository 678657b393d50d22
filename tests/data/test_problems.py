"""Loading problems: local files, columns, levels, fractions, and dataset names."""

import codecs
import csv
import gzip
import json
import os
from collections import Counter
from pathlib import Path

import datasets
import pytest

from opo_trl.data import files, load_problems, to_prompts
from opo_trl.data.problems import as_problems, as_prompts, has_prompts, hold_out
from opo_trl.rewards import accuracy_reward


ROWS = [
    {
        "problem": f"What is ${i} + {i}$?",
        "level": f"Level {1 + i % 3}",
        "type": "Algebra",
        "solution": f"$\\boxed{{{2 * i}}}$.",
    }
    for i in range(30)
]


def write(file: Path, rows: list[dict]) -> str:
    lines = "\n".join(json.dumps(row) for row in rows)
    if file.name.endswith(".parquet"):
        datasets.Dataset.from_list(rows).to_parquet(file)
    elif file.suffix in (".csv", ".tsv"):
        with file.open("w", newline="") as table:
            lines = csv.DictWriter(table, rows[0], dialect="excel-tab" if file.suffix == ".tsv" else "excel")
            lines.writeheader()
            lines.writerows(rows)
    elif file.name.endswith(".gz"):
        file.write_bytes(gzip.compress(lines.encode()))
    else:
        file.write_text(json.dumps(rows) if file.suffix == ".json" else lines)
    return str(file)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv", ".tsv"])
class TestLocalFiles:
    def test_a_file_is_read_for_any_split(self, tmp_path: Path, ending: str):
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

    def test_a_replaced_file_of_the_same_age_is_read_again(self, tmp_path: Path, ending: str):
        file = write(tmp_path / f"some{ending}", ROWS[:2])
        age = os.stat(file)
        assert load_problems(file).to_list() == ROWS[:2]
        write(Path(file), ROWS[2:4])
        os.utime(file, ns=(age.st_atime_ns, age.st_mtime_ns))
        assert load_problems(file).to_list() == ROWS[2:4]

    def test_text_stays_text(self, tmp_path: Path, ending: str):
        texts = ["4", "007", "2020-01-01", "NA", "null", "[1]"]
        for rows in ([{**ROWS[0], "solution": text} for text in texts], [{**ROWS[0], "solution": "2020-01-01"}]):
            assert load_problems(write(tmp_path / f"some{ending}", rows)).to_list() == rows


class TestContent:
    """Content of the rows of a local file."""

    @pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".json", ".csv", ".tsv"])
    def test_a_byte_order_mark_is_no_content(self, tmp_path: Path, ending: str):
        file = Path(write(tmp_path / f"some{ending}", ROWS[:2]))
        content = file.read_bytes()
        packed = ending.endswith(".gz")
        content = codecs.BOM_UTF8 + (gzip.decompress(content) if packed else content)
        file.write_bytes(gzip.compress(content) if packed else content)
        assert load_problems(str(file)).to_list() == ROWS[:2]

    def test_tables_as_spreadsheets_and_pandas_write_them(self, tmp_path: Path):
        file = tmp_path / "some.csv"
        texts = ["a, b", 'say "x"', "two\nlines", "007", "NA", "", "½"]
        for separator, index in ((",", ""), (";", ""), (",", "0")):
            lines = [separator.join([*([""] if index else []), "question", "answer"])]
            for text in texts:
                quoted = '"' + text.replace('"', '""') + '"'
                lines.append(separator.join([*([index] if index else []), "?", quoted]))
            file.write_text("\r\n".join([*lines, "", ""]), newline="")
            assert files.load_rows(str(file)).to_dict() == {"question": ["?"] * len(texts), "answer": texts}

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"question,answer\na,1\nb,2,3\n", r"line 3: it has 3 values for 2 columns. Put values with commas"),
            (b"question,answer\na\n", r"line 2: it has 1 values for 2 columns"),
            (b'question,answer\na,"1\n', r"unexpected end of data"),
            (b"question,answer\na,\xff\n", r"line 2 is not in UTF-8.*Save it as UTF-8"),
            (b"answer,answer\n1,1\n", r"two columns have one name"),
            (b"question,answer\n", r"it is empty"),
            (b"", r"it is empty"),
        ],
    )
    def test_a_bad_line_of_a_table_is_named(self, tmp_path: Path, content: bytes, said: str):
        (tmp_path / "some.csv").write_bytes(content)
        with pytest.raises(ValueError, match=rf"some\.csv' cannot be read: .*{said}"):
            files.load_rows(str(tmp_path / "some.csv"))

    @pytest.mark.parametrize("column", ["level", "type"])
    def test_levels_and_types_are_text(self, tmp_path: Path, column: str):
        file = write(tmp_path / "some.jsonl", [{**ROWS[0], column: value} for value in (None, "4", "5", 6)])
        assert load_problems(file)[column][:] == [None, "4", "5", "6"]
        if column == "level":
            assert load_problems(file, levels=["6"])[column][:] == ["6"]

    def test_numbers_are_answers(self, tmp_path: Path):
        for values in ([4, 5], [4, 0.5], [4, "x"]):
            file = write(tmp_path / "some.jsonl", [{"problem": "?", "answer": value} for value in values])
            assert to_prompts(load_problems(file))["solution"][:] == [str(value) for value in values]

    def test_a_bad_line_is_named_in_a_large_file(self, tmp_path: Path):
        file = tmp_path / "some.jsonl"
        line = json.dumps({**ROWS[0], "problem": "1 + " * 1000})
        file.write_text(f"{line}\n" * 4000 + "{nonsense")
        with pytest.raises(ValueError, match=r"line 4001 is not JSON.*Fix that line"):
            load_problems(str(file))

    @pytest.mark.parametrize("value", [2**70, "\ud800"])
    def test_values_that_no_column_can_hold_are_rejected(self, tmp_path: Path, value):
        file = write(tmp_path / "some.jsonl", [{**ROWS[0], "solution": value}])
        with pytest.raises(ValueError, match=r"some\.jsonl' cannot be read: .*Write larger integers as text"):
            load_problems(file)

    @pytest.mark.parametrize("solution", [[1, "a"], ["a", 1], {"of": ["a", 1]}])
    def test_nested_values_are_not_solutions(self, tmp_path: Path, solution):
        file = write(tmp_path / "some.jsonl", [{**ROWS[0], "solution": solution}])
        with pytest.raises(ValueError, match=r"its solution is of type (list|dict), not a string"):
            to_prompts(load_problems(file))


TURN = [{"role": "user", "content": "b"}]


class TestColumns:
    ANSWERS = ("2 + 2 = <<2+2=4>>4\n#### 4", "1,000 + 80\n#### 1,080")

    def rows(self, **names: list) -> list[dict]:
        return [dict(zip(names, values, strict=True)) for values in zip(*names.values(), strict=True)]

    @pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
    def test_question_and_answer_of_gsm8k_are_used_and_logged(self, tmp_path: Path, ending: str, caplog):
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

    @pytest.mark.parametrize("mark", ["", "so\n#### "])
    @pytest.mark.parametrize(
        ("answer", "solution"),
        [
            ("1,000", "1000"),
            ("-1,234,567.5", "-1234567.5"),
            *(
                (kept, kept)
                for kept in (r"(0,100)", "[0,100]", "(-1,999)", "(3,250)", r"\{1,120\}", "x=2,150", "0,100")
            ),
            *(
                (kept, kept)
                for kept in ("(1,000,2,000)", "100, 200, 300", "1,000, 2,000", "1,000,5", r"1{,}000", "$1,000")
            ),
            *((kept, kept) for kept in (r"1,000\%", "1,000 dollars", r"\begin{pmatrix} 1,000 \\ 2 \end{pmatrix}")),
        ],
    )
    def test_only_one_number_loses_its_thousands_separators(self, mark: str, answer: str, solution: str):
        rows = datasets.Dataset.from_dict({"question": ["?"], "answer": [mark + answer]})
        assert to_prompts(as_problems("x", rows, {})[0])["solution"][:] == [solution]
        assert accuracy_reward([f"\\boxed{{{answer}}}"], [solution]) == [1.0]

    @pytest.mark.parametrize(("mark", "solution"), [("", "100,200,300"), ("#### ", "100200300")])
    def test_numbers_of_three_digits_are_a_list_or_a_number(self, mark: str, solution: str):
        rows = datasets.Dataset.from_dict({"question": ["?"], "answer": [f"{mark}100,200,300"]})
        assert to_prompts(as_problems("x", rows, {})[0])["solution"][:] == [solution]
        readings = [r"\boxed{100200300}", r"\boxed{100, 200, 300}"]
        assert accuracy_reward(readings, [solution] * 2) == [1.0, float(not mark)]

    def test_solution_precedes_answer_unless_mapped(self, tmp_path: Path):
        rows = self.rows(problem=["2 + 2?"], solution=["\\boxed{4}"], answer=["5"])
        file = write(tmp_path / "some.jsonl", rows)
        assert to_prompts(load_problems(file))["solution"][:] == ["4"]
        assert to_prompts(load_problems(file, columns={"solution": "answer"}))["solution"][:] == ["5"]

    @pytest.mark.parametrize(
        ("row", "answer"),
        [
            ({"problem": "a", "solution": "So it is 4.", "answer": "4"}, "4"),  # prose without a box
            ({"question": "a", "final_answer": "4"}, "4"),
            ({"problem": "a", "expected_answer": "4"}, "4"),
            ({"query": "a", "ground_truth": "4"}, "4"),
            ({"question": "a", "final_answer": ["4"]}, "4"),
            ({"problem": "a", "solution": "4"}, "4"),
            ({"problem": "a", "reward_model": {"ground_truth": "4", "style": "rule"}}, "4"),
            ({"problem": "a", "answer": "x \\boxed{4}", "solution": "no"}, "4"),
        ],
        ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
    )
    @pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
    def test_columns_of_public_datasets_are_recognized(self, tmp_path: Path, row, answer, ending):
        problems = load_problems(write(tmp_path / f"some{ending}", [row, row]))
        assert to_prompts(problems).to_list() == 2 * [
            {**to_prompts(problems)[0], "solution": answer, "level": None, "type": None}
        ]
        assert problems["problem"][0] == "a"

    def test_a_dot_leads_into_a_mapping(self, tmp_path: Path):
        rows = [{"problem": "a", "answer": "5", "extra": {"gold": {"value": 4}}}]
        problems = load_problems(write(tmp_path / "some.jsonl", rows), columns={"solution": "extra.gold.value"})
        assert problems["solution"][:] == ["\\boxed{4}"]

    @pytest.mark.parametrize(
        ("row", "solution"),
        [
            ({"ground_truth": "4"}, "4"),
            ({"answer": "2 + 2\n#### 4"}, "4"),
            ({"reward_model": {"ground_truth": "4"}, "data_source": "x"}, "4"),
            ({"solution": "so \\boxed{4}", "answer": "5"}, "so \\boxed{4}"),  # unchanged, as in TRL
            ({}, None),
        ],
    )
    @pytest.mark.parametrize("prompt", ["2 + 2 =", [{"role": "user", "content": "2 + 2?"}]], ids=["text", "chat"])
    def test_prompts_are_unchanged_and_get_a_solution(self, row, solution, prompt):
        rows = datasets.Dataset.from_list([{"prompt": prompt, **row}])
        assert has_prompts(rows, {})
        assert not has_prompts(rows, {"problem": "prompt"})
        prompts, sources = as_prompts(rows, {})
        assert prompts[0] == {"prompt": prompt, **row} | ({"solution": solution} if solution else {})
        assert sources.keys() == ({"solution"} if solution and "solution" not in row else set())

    def test_a_dot_leads_into_a_mapping_next_to_prompts_too(self):
        rows = datasets.Dataset.from_list([{"question": "2 + 2 =", "gold": {"value": "4", "kind": "sum"}}])
        columns = {"prompt": "question", "solution": "gold.value", "kind": "gold.kind"}
        prompts, sources = as_prompts(rows, columns)
        assert prompts[0] == {"prompt": "2 + 2 =", "gold": rows[0]["gold"], "solution": "4", "kind": "sum"}
        assert sources == columns
        with pytest.raises(ValueError, match=r"columns=\{'solution': 'silver.value'\} does not fit"):
            as_prompts(rows, {"solution": "silver.value"})

    @pytest.mark.parametrize("style", ["problems", "prompts"])
    def test_a_dot_that_leads_nowhere_is_rejected(self, style):
        rows = datasets.Dataset.from_list([{"problem": "a", "extra": {"gold": "4"}}])
        columns = {"solution": "extra.golden"}
        with pytest.raises(ValueError, match=r"columns=\{'solution': 'extra.golden'\} does not fit"):
            as_prompts(rows, columns) if style == "prompts" else as_problems("x", rows, columns)

    def test_a_name_may_have_a_dot(self):
        rows = datasets.Dataset.from_list([{"my.problem": "a", "my.answer": "4"}])
        problems, _ = as_problems("x", rows, {"problem": "my.problem", "solution": "my.answer"})
        assert (problems[0]["problem"], problems[0]["solution"]) == ("a", "\\boxed{4}")

    def test_a_mapping_written_as_text_has_no_answer(self):
        rows = datasets.Dataset.from_list([{"prompt": "a", "reward_model": '{"ground_truth": "4"}'}])
        assert as_prompts(rows, {})[0].column_names == ["prompt", "reward_model"]

    @pytest.mark.parametrize(
        "prompts",
        [["a", None], ["a", " "], ["a", TURN], [TURN, []], [TURN, [{"role": "user"}]], [3, 4]],
        ids=["none", "blank", "both kinds", "no message", "no content", "numbers"],
    )
    def test_prompts_that_cannot_be_used_are_named(self, tmp_path: Path, prompts):
        file = write(tmp_path / "some.jsonl", self.rows(prompt=prompts, solution=["1", "2"]))
        row = 0 if prompts[0] == 3 else 1
        with pytest.raises(ValueError, match=rf"column 'prompt' holds .* in row {row}\. Set every prompt to text"):
            as_prompts(files.load_rows(file), {})

    def test_mapped_solution_next_to_prompts_is_the_final_answer(self):
        rows = datasets.Dataset.from_list([{"prompt": "2 + 2 =", "result": "2 + 2 = 4\n#### 4"}])
        prompts, _ = as_prompts(rows, {"solution": "result"})
        assert prompts["solution"][:] == ["4"]

    @pytest.mark.parametrize("answer", ["x = {'a': '}'}", "a } b", "{", "f(x) {"])
    def test_braces_that_no_box_can_hold_are_kept(self, tmp_path: Path, answer: str):
        rows = datasets.Dataset.from_list([{"prompt": "Code?", "answer": answer}])
        assert as_prompts(rows, {})[0]["solution"][:] == [answer]
        file = write(tmp_path / "some.jsonl", [{"problem": "Code?", "answer": f"so\n#### {answer}"}])
        assert load_problems(file)["solution"][:] == [answer]

    TURNS = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 1?"},
        {"role": "assistant", "content": "3"},
    )

    @pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
    @pytest.mark.parametrize("columns", [{}, {"prompt": "messages"}])
    def test_messages_are_prompts_up_to_the_last_question(self, tmp_path: Path, ending: str, columns):
        rows = [{"messages": [*self.TURNS], "answer": "3"}, {"messages": [*self.TURNS[1:2]], "answer": "2"}]
        stored = files.load_rows(write(tmp_path / f"some{ending}", rows))
        assert has_prompts(stored, columns)
        prompts, sources = as_prompts(stored, columns)
        assert prompts["prompt"][:] == [[*self.TURNS[:4]], [*self.TURNS[1:2]]]
        assert prompts["solution"][:] == ["3", "2"]
        assert sources == {"prompt": "messages", "solution": "answer"}

    def test_messages_next_to_a_problem_are_not_prompts(self):
        rows = datasets.Dataset.from_list([{"problem": "a", "answer": "1", "messages": [*self.TURNS]}])
        assert not has_prompts(rows, {})
        assert as_problems("x", rows, {})[0]["problem"][:] == ["a"]

    @pytest.mark.parametrize("turns", [[*TURNS[:1]], [], None, "1 + 1?"])
    def test_messages_without_a_question_are_named(self, tmp_path: Path, turns):
        file = write(tmp_path / "some.jsonl", [{"messages": [*self.TURNS], "answer": "3"}, {"messages": turns}])
        with pytest.raises(ValueError, match=r"column 'messages' holds .* in row 1, which has no user turn"):
            as_prompts(files.load_rows(file), {})

    def test_levels_with_another_column_name(self, tmp_path: Path):
        rows = self.rows(problem=["a", "b"], answer=["1", "2"], difficulty=["easy", "hard"])
        file = write(tmp_path / "some.jsonl", rows)
        assert len(load_problems(file, columns={"level": "difficulty"}, levels=["hard"])) == 1
        with pytest.raises(ValueError, match=r"levels=\['hard'\]: the dataset has no levels"):
            load_problems(file, levels=["hard"])

    @pytest.mark.parametrize("columns", [{"problem": "text"}, {"question": "problem"}])
    def test_unknown_columns_are_rejected(self, tmp_path: Path, columns):
        file = write(tmp_path / "some.jsonl", self.rows(problem=["a"], answer=["1"]))
        with pytest.raises(ValueError, match=r"columns=.* does not fit .*solution.*problem, answer"):
            load_problems(file, columns=columns)

    def test_columns_of_ready_made_prompts(self):
        dataset = datasets.Dataset.from_dict({"question": ["a"], "answer": ["1"]})
        renamed, _ = as_prompts(dataset, {"prompt": "question", "text": "answer"})
        assert renamed.column_names == ["prompt", "text"]
        with pytest.raises(ValueError, match=r"columns=\{'prompt': 'text'\} does not fit"):
            as_prompts(dataset, {"prompt": "text"})
        with pytest.raises(ValueError, match=r"columns=\{'answer': 'question'\} does not fit"):
            as_prompts(dataset, {"answer": "question"})


class TestSelection:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        write(tmp_path / "train.jsonl", ROWS)
        return str(tmp_path)

    def test_levels(self, folder: str):
        problems = load_problems(folder, levels=["Level 3", "Level 1"])
        assert Counter(problems["level"]) == {"Level 1": 10, "Level 3": 10}

    @pytest.mark.parametrize("levels", [["Level 3", "Level 7"], ["3"], "Level 3", []])
    def test_an_unknown_level_is_rejected_with_existing_ones(self, folder: str, levels: list[str]):
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
    def test_a_fraction_without_rows_is_rejected(self, folder: str, fraction: float):
        with pytest.raises(ValueError, match=rf"fraction={fraction}.* Use "):
            load_problems(folder, fraction=fraction)

    def test_the_level_comes_before_the_fraction(self, folder: str):
        problems = load_problems(folder, levels=["Level 2"], fraction=0.5)
        assert Counter(problems["level"]) == {"Level 2": 5}


class TestNames:
    @pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "nowhere.jsonl", "~/no/where"])
    def test_a_missing_path_is_not_looked_up_on_the_hub(self, name: str):
        with pytest.raises(ValueError, match="does not exist"):
            load_problems(name)

    def test_a_folder_without_the_split_is_rejected(self, tmp_path: Path):
        with pytest.raises(ValueError, match=r"without split='test'.*test\.jsonl\.gz"):
            load_problems(str(tmp_path), split="test")

    def test_a_folder_saved_by_datasets(self, tmp_path: Path):
        saved = datasets.Dataset.from_list(ROWS)
        saved.save_to_disk(tmp_path / "one")
        assert load_problems(str(tmp_path / "one")).to_list() == ROWS
        datasets.DatasetDict(train=saved, test=saved.select(range(3))).save_to_disk(tmp_path / "both")
        assert load_problems(str(tmp_path / "both"), split="test").to_list() == ROWS[:3]
        with pytest.raises(ValueError, match="it has the splits train, test"):
            load_problems(str(tmp_path / "both"), split="dev")

    def test_home_is_where_a_folder_may_be(self, tmp_path: Path, monkeypatch):
        datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert load_problems("~/one").to_list() == ROWS

    def test_a_copy_of_a_dataset_on_the_hub(self, tmp_path: Path, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
        folder = tmp_path / "copy"
        (folder / "main").mkdir(parents=True)
        for split, rows in (("train", ROWS), ("test", ROWS[:3])):
            datasets.Dataset.from_list(rows).to_parquet(folder / "main" / f"{split}-00000-of-00001.parquet")
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
            "  - split: test\n    path: main/test-*\n---\n"
        )
        problems = load_problems(str(folder), dataset_config="main", split="test")
        assert problems.to_list() == ROWS[:3]

    def test_an_unknown_format_is_rejected(self, tmp_path: Path):
        (tmp_path / "some.xlsx").write_text("problem\n")
        with pytest.raises(ValueError, match=r"some\.xlsx' is not in a readable format"):
            load_problems(str(tmp_path / "some.xlsx"))

    @pytest.mark.parametrize("content", ["{nonsense", ""])
    def test_a_broken_file_is_rejected(self, tmp_path: Path, content: str):
        (tmp_path / "some.jsonl").write_text(content)
        with pytest.raises(ValueError, match=r"some\.jsonl' cannot be read: "):
            load_problems(str(tmp_path / "some.jsonl"))

    def test_a_missing_column_is_rejected(self, tmp_path: Path):
        file = write(tmp_path / "some.jsonl", [{"text": "2 + 2", "level": "Level 1", "type": "", "result": "4"}])
        with pytest.raises(
            ValueError, match=r"no column \['problem', 'solution'\], only \['text'.*map them: `columns"
        ):
            load_problems(file)

    def test_any_other_name_is_a_hub_id(self, monkeypatch: pytest.MonkeyPatch):
        asked = []

        def load_dataset(*args, **kwargs):
            asked.append((args, kwargs))
            return datasets.Dataset.from_list(ROWS)

        monkeypatch.setattr(files, "load_dataset", load_dataset)
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


class TestHeldOut:
    PROBLEMS = datasets.Dataset.from_dict(
        {"problem": [f"{i % 50} +  1?" if i % 2 else f"{i % 50} + 1?" for i in range(200)]}
    )

    @pytest.mark.parametrize(("size", "n"), [(0.2, 10), (0.01, 1), (7, 7), (0.99, 50)])
    def test_no_problem_is_in_both_parts(self, size: float, n: int):
        training, held_out = hold_out(self.PROBLEMS, size, 42)
        texts, others = ({"".join(text.split()) for text in part["problem"]} for part in (training, held_out))
        assert not texts & others
        assert len(held_out) == len(others) == n  # each once
        assert len(training) == 200 - 4 * n

    def test_the_seed_decides(self):
        first, again, other = (hold_out(self.PROBLEMS, 0.2, seed)[1]["problem"][:] for seed in (1, 1, 2))
        assert first == again != other


class TestMath:
    def test_levels(self, math: str):
        train, test = (Counter(load_problems(math, split=split)["level"]) for split in ("train", "test"))
        assert [train[f"Level {level}"] for level in "12345?"] == [564, 1348, 1592, 1690, 2304, 2]
        assert [test[f"Level {level}"] for level in "12345?"] == [437, 894, 1131, 1214, 1324, 0]
        assert (train.total(), test.total()) == (7500, 5000)

    def test_a_tenth_of_level_3(self, math: str):
        problems = load_problems(math, levels=["Level 3"], fraction=0.1, seed=42)
        assert len(problems) == 159
        assert problems.to_list() == load_problems(math, levels=["Level 3"], fraction=0.1).to_list()
        assert problems["problem"][:] != load_problems(math, levels=["Level 3"], fraction=0.1, seed=43)["problem"][:]


def test_a_damaged_page_of_a_parquet_file(tmp_path: Path):
    file = Path(write(tmp_path / "some.parquet", [{**ROWS[0], "problem": f"{i} + 1"} for i in range(500)]))
    content = bytearray(file.read_bytes())
    content[100:240] = bytes(byte ^ 0xFF for byte in content[100:240])
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"dataset_name='.*some\.parquet' cannot be read: .*restore or replace"):
        load_problems(str(file))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_not_called_damaged(tmp_path: Path):
    file = Path(write(tmp_path / "some.jsonl", ROWS))
    file.chmod(0)
    with pytest.raises(ValueError, match="Grant permission to read it"):
        load_problems(str(file))
