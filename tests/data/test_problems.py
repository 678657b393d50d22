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


ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv", ".tsv")
ROWS = [
    {"problem": f"What is ${i}$?", "level": f"Level {1 + i % 3}", "type": "Algebra", "solution": f"$\\boxed{{{i}}}$."}
    for i in range(30)
]


def write(file: Path, rows: list[dict]) -> str:
    lines = "\n".join(json.dumps(row) for row in rows)
    if file.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    elif file.suffix in (".csv", ".tsv"):
        with file.open("w", newline="") as table:
            lines = csv.DictWriter(table, rows[0], dialect="excel-tab" if file.suffix == ".tsv" else "excel")
            lines.writeheader()
            lines.writerows(rows)
    elif file.suffix == ".gz":
        file.write_bytes(gzip.compress(lines.encode()))
    else:
        file.write_text(json.dumps(rows) if file.suffix == ".json" else lines)
    return str(file)


def table(*rows: dict) -> datasets.Dataset:
    return datasets.Dataset.from_list([*rows])


class TestLocalFiles:
    @pytest.mark.parametrize("ending", ENDINGS)
    def test_text_stays_text_in_a_file_for_each_split(self, tmp_path: Path, ending: str):
        rows = [{**ROWS[0], "solution": text} for text in ("4", "007", "2020-01-01", "NA", "null", "[1]")]
        write(tmp_path / f"train{ending}", [{"id": 7, **row} for row in rows])
        write(tmp_path / f"test{ending}", rows[2:3])
        assert load_problems(str(tmp_path)).to_list() == rows
        assert load_problems(str(tmp_path), split="test").to_list() == rows[2:3]
        assert load_problems(str(tmp_path / f"train{ending}"), split="test").to_list() == rows

    @pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
    def test_a_replaced_file_of_the_same_age_is_read_again(self, tmp_path: Path, ending: str):
        file = write(tmp_path / f"some{ending}", ROWS[:2])
        age = os.stat(file)
        assert load_problems(file).to_list() == ROWS[:2]
        write(Path(file), ROWS[2:4])
        os.utime(file, ns=(age.st_atime_ns, age.st_mtime_ns))
        assert load_problems(file).to_list() == ROWS[2:4]

    @pytest.mark.parametrize("ending", [".jsonl.gz", ".json", ".csv"])
    def test_a_byte_order_mark_is_no_content(self, tmp_path: Path, ending: str):
        file = Path(write(tmp_path / f"some{ending}", ROWS[:2]))
        packed, content = ending.endswith(".gz"), file.read_bytes()
        content = codecs.BOM_UTF8 + (gzip.decompress(content) if packed else content)
        file.write_bytes(gzip.compress(content) if packed else content)
        assert load_problems(str(file)).to_list() == ROWS[:2]

    def test_tables_as_spreadsheets_and_pandas_write_them(self, tmp_path: Path):
        file = tmp_path / "some.csv"
        texts = ["a, b", 'say "x"', "two\nlines", "007", "NA", "", "½", "long " * 40_000]
        for separator, index in ((",", ""), (";", ""), (",", "0")):
            lines = [separator.join([*([""] if index else []), "question", "answer"])]
            for text in texts:
                quoted = '"' + text.replace('"', '""') + '"'
                lines.append(separator.join([*([index] if index else []), "?", quoted]))
            file.write_text("\r\n".join([*lines, "", ""]), newline="")
            assert files.load_rows(str(file)).to_dict() == {"question": ["?"] * len(texts), "answer": texts}

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            (
                "some.csv",
                b"question,answer\na,1\nb,2,3\n",
                r"line 3: .* 2 values, one for each.*Put values with commas",
            ),
            ("some.csv", b"question,answer\na\n", r"line 2: it does not have 2 values"),
            ("some.csv", b'question,answer\na,"1\n', r"unexpected end of data"),
            ("some.csv", b"question,answer\na,\xff\n", r"line 2 is not in UTF-8.*Save it as UTF-8"),
            ("some.csv", b"answer,answer\n1,1\n", r"two columns have one name"),
            ("some.csv", b"question,answer\n", r"it is empty"),
            ("some.jsonl", b"", r"it is empty"),
            ("some.jsonl", b'{"problem": "a"}\n' * 4000 + b"{nonsense", r"line 4001 is not JSON.*Fix that line"),
            ("some.jsonl", b"[1, 2]\n" * 2, r"line 1 is not JSON"),
            ("some.jsonl", b'{"problem": "a"}\n3', r"line 2 is 3, not an object"),
            ("some.jsonl", b'{"problem": 1180591620717411303424}', r"int too large"),
            ("some.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-9], r"restore or replace"),
        ],
    )
    def test_a_bad_file_is_named_with_its_line(self, tmp_path: Path, name: str, content: bytes, said: str):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}' cannot be read: .*{said}"):
            files.load_rows(str(tmp_path / name))

    def test_a_damaged_page_of_a_parquet_file(self, tmp_path: Path):
        file = Path(write(tmp_path / "some.parquet", [{**ROWS[0], "problem": f"{i} + 1"} for i in range(500)]))
        content = bytearray(file.read_bytes())
        content[100:240] = bytes(byte ^ 0xFF for byte in content[100:240])
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"dataset_name='.*some\.parquet' cannot be read: .*restore or replace"):
            load_problems(str(file))

    def test_numbers_beside_text_are_text(self, tmp_path: Path):
        file = write(tmp_path / "some.jsonl", [{**ROWS[0], "level": value} for value in (None, "4", "5", 6)])
        assert load_problems(file)["level"][:] == [None, "4", "5", "6"]
        assert load_problems(file, levels=["6"])["level"][:] == ["6"]
        for values in ([4, 5], [4, 0.5], [4, "4", "x"]):
            file = write(tmp_path / "some.jsonl", [{"problem": "?", "answer": value} for value in values])
            assert to_prompts(load_problems(file))["solution"][:] == [str(value) for value in values]

    @pytest.mark.parametrize("solution", [["a", 1], {"of": ["a", 1]}])
    def test_nested_values_are_not_solutions(self, tmp_path: Path, solution):
        file = write(tmp_path / "some.jsonl", [{**ROWS[0], "solution": solution}])
        with pytest.raises(ValueError, match=r"its solution is of type (list|dict), not a string"):
            to_prompts(load_problems(file))


class TestColumns:
    TURNS = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 1?"},
        {"role": "assistant", "content": "3"},
    )

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_gsm8k_needs_no_mapping(self, shared_data: Path, split: str, caplog):
        problems = load_problems(str(shared_data / "gsm8k"), split=split)
        assert "took 'question' for problem and 'answer' for solution" in caplog.text
        prompts = to_prompts(problems)
        assert len(prompts) == len(problems) == {"train": 7473, "test": 1319}[split]
        assert all(float(answer) == float(answer) for answer in prompts["solution"])

    @pytest.mark.parametrize("mark", ["", "so\n#### "])
    @pytest.mark.parametrize(
        ("answer", "solution"),
        [
            ("1,000", "1000"),
            ("-1,234,567.5", "-1234567.5"),
            *(
                (kept, kept)
                for kept in (r"(0,100)", r"\{1,120\}", "x=2,150", "0,100", "100, 200, 300", "1,000, 2,000")
            ),
            *((kept, kept) for kept in ("1,000,5", r"1{,}000", "$1,000", r"1,000\%", "1,000 dollars")),
        ],
    )
    def test_only_one_number_loses_its_thousands_separators(self, mark: str, answer: str, solution: str):
        problems, _ = as_problems("x", table({"question": "?", "answer": mark + answer}), {})
        assert to_prompts(problems)["solution"][:] == [solution]
        assert accuracy_reward([f"\\boxed{{{answer}}}"], [solution]) == [1.0]

    @pytest.mark.parametrize(("mark", "solution"), [("", "100,200,300"), ("#### ", "100200300")])
    def test_numbers_of_three_digits_are_a_list_or_a_number(self, mark: str, solution: str):
        problems, _ = as_problems("x", table({"question": "?", "answer": f"{mark}100,200,300"}), {})
        assert to_prompts(problems)["solution"][:] == [solution]
        readings = [r"\boxed{100200300}", r"\boxed{100, 200, 300}"]
        assert accuracy_reward(readings, [solution] * 2) == [1.0, float(not mark)]

    @pytest.mark.parametrize(
        ("row", "columns", "answer"),
        [
            ({"problem": "a", "solution": "So it is 4.", "answer": "4"}, {}, "4"),  # prose without a box
            ({"problem": "a", "solution": r"\boxed{4}", "answer": "5"}, {}, "4"),
            ({"problem": "a", "solution": r"\boxed{4}", "answer": "5"}, {"solution": "answer"}, "5"),
            ({"question": "a", "final_answer": ["4"]}, {}, "4"),
            ({"query": "a", "ground_truth": "4"}, {}, "4"),
            ({"problem": "a", "solution": "4"}, {}, "4"),
            ({"problem": "a", "reward_model": {"ground_truth": "4", "style": "rule"}}, {}, "4"),
            ({"problem": "a", "answer": "x \\boxed{4}", "solution": "no"}, {}, "4"),
            ({"problem": "a", "answer": "so\n#### x = {'a': '}'}"}, {}, "x = {'a': '}'}"),
            ({"problem": "a", "answer": "5", "extra": {"gold": {"value": 4}}}, {"solution": "extra.gold.value"}, "4"),
            ({"my.text": "a", "my.answer": "4"}, {"problem": "my.text", "solution": "my.answer"}, "4"),
        ],
    )
    @pytest.mark.parametrize("style", ["chat", "plain"])
    def test_columns_are_recognized_or_mapped(self, tmp_path: Path, row, columns, answer, style):
        problems = load_problems(write(tmp_path / "some.jsonl", [row, row]), columns=columns)
        assert problems.column_names == ["problem", "level", "type", "solution"]
        assert problems["problem"][0] == "a"
        assert to_prompts(problems, style=style)["solution"][:] == [answer] * 2

    @pytest.mark.parametrize(
        ("row", "solution"),
        [
            ({"ground_truth": "4"}, "4"),
            ({"answer": "2 + 2\n#### 4"}, "4"),
            ({"answer": "f(x) {"}, "f(x) {"),
            ({"reward_model": {"ground_truth": "4"}, "data_source": "x"}, "4"),
            ({"reward_model": '{"ground_truth": "4"}'}, None),
            ({"solution": "so \\boxed{4}", "answer": "5"}, "so \\boxed{4}"),  # unchanged, as in TRL
            ({}, None),
        ],
    )
    @pytest.mark.parametrize("prompt", ["2 + 2 =", [{"role": "user", "content": "2 + 2?"}]], ids=["text", "chat"])
    def test_prompts_are_unchanged_and_get_a_solution(self, row, solution, prompt):
        rows = table({"prompt": prompt, **row})
        assert has_prompts(rows, {})
        assert not has_prompts(rows, {"problem": "prompt"})
        prompts, sources = as_prompts(rows, {})
        assert prompts[0] == {"prompt": prompt, **row} | ({"solution": solution} if solution else {})
        assert sources.keys() == ({"solution"} if solution and "solution" not in row else set())

    def test_columns_next_to_prompts_are_renamed_or_taken_out_of_mappings(self):
        rows = table({"question": "2 + 2 =", "gold": {"value": "4", "kind": "sum"}})
        columns = {"prompt": "question", "solution": "gold.value", "kind": "gold.kind"}
        prompts, sources = as_prompts(rows, columns)
        assert prompts[0] == {"prompt": "2 + 2 =", "gold": rows[0]["gold"], "solution": "4", "kind": "sum"}
        assert sources == columns
        renamed, _ = as_prompts(table({"question": "a", "answer": "1"}), {"prompt": "question", "text": "answer"})
        assert renamed.column_names == ["prompt", "text"]
        columns = {"prompt": "prompt", "solution": "result"}
        mapped, _ = as_prompts(table({"prompt": "2 =", "result": "1 + 1 = 2\n#### 2"}), columns)
        assert mapped["solution"][:] == ["2"]

    @pytest.mark.parametrize(
        "columns", [{"solution": "extra.golden"}, {"answer": "question"}, {"question": "answer"}, {"solution": "text"}]
    )
    @pytest.mark.parametrize("take", [as_prompts, lambda rows, columns: as_problems("x", rows, columns)])
    def test_a_mapping_that_does_not_fit_is_rejected(self, columns, take):
        rows = table({"question": "a", "answer": "4", "extra": {"gold": "4"}})
        with pytest.raises(ValueError, match=r"columns=.* does not fit .*solution.*question, answer"):
            take(rows, columns)

    def test_a_missing_column_is_rejected(self):
        with pytest.raises(ValueError, match=r"no column \['problem', 'solution'\], only \['text'.*`columns"):
            as_problems("x", table({"text": "2 + 2", "result": "4"}), {})

    @pytest.mark.parametrize("columns", [{}, {"prompt": "messages"}])
    def test_messages_are_prompts_up_to_the_last_question(self, tmp_path: Path, columns):
        rows = [{"messages": [*self.TURNS], "answer": "3"}, {"messages": [*self.TURNS[1:2]], "answer": "2"}]
        stored = files.load_rows(write(tmp_path / "some.jsonl", rows))
        assert has_prompts(stored, columns)
        prompts, sources = as_prompts(stored, columns)
        assert prompts.to_list() == [
            {"answer": "3", "prompt": [*self.TURNS[:4]], "solution": "3"},
            {"answer": "2", "prompt": [*self.TURNS[1:2]], "solution": "2"},
        ]
        assert sources == {"prompt": "messages", "solution": "answer"}
        assert as_prompts(stored.select_columns("messages"), columns)[0]["prompt"][:] == prompts["prompt"][:]
        assert not has_prompts(table({"problem": "a", "answer": "1", "messages": [*self.TURNS]}), {})

    @pytest.mark.parametrize("turns", [[*TURNS[:1]], None, "1 + 1?"])
    def test_messages_without_a_question_are_named(self, tmp_path: Path, turns):
        file = write(tmp_path / "some.jsonl", [{"messages": [*self.TURNS], "answer": "3"}, {"messages": turns}])
        with pytest.raises(ValueError, match=r"column 'messages' holds .* in row 1, which has no user turn"):
            as_prompts(files.load_rows(file), {})


class TestSelection:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        write(tmp_path / "train.jsonl", ROWS)
        return str(tmp_path)

    def test_levels_come_before_the_fraction(self, folder: str, tmp_path: Path):
        assert Counter(load_problems(folder, levels=["Level 3", "Level 1"])["level"]) == {"Level 1": 10, "Level 3": 10}
        assert Counter(load_problems(folder, levels=["Level 2"], fraction=0.5)["level"]) == {"Level 2": 5}
        file = write(tmp_path / "hard.jsonl", [{"problem": "a", "answer": "1", "difficulty": x} for x in "xy"])
        assert len(load_problems(file, columns={"level": "difficulty"}, levels=["y"])) == 1
        with pytest.raises(ValueError, match=r"levels=\['y'\]: the dataset has no levels"):
            load_problems(file, levels=["y"])

    @pytest.mark.parametrize("levels", [["Level 3", "Level 7"], "Level 3", []])
    def test_an_unknown_level_is_rejected_with_existing_ones(self, folder: str, levels: list[str]):
        with pytest.raises(ValueError, match=r"levels=.*\['Level 1', 'Level 2', 'Level 3'\]"):
            load_problems(folder, levels=levels)

    def test_a_fraction_is_random_seeded_and_nested(self, folder: str):
        def chosen(fraction: float, seed: int) -> list[str]:
            return load_problems(folder, fraction=fraction, seed=seed)["problem"][:]

        assert [len(chosen(fraction, 1)) for fraction in (1.0, 0.5, 0.12, 0.02)] == [30, 15, 4, 1]
        assert chosen(0.5, 1) == chosen(0.5, 1)
        assert set(chosen(0.5, 1)) != set(chosen(0.5, 2))
        assert set(chosen(0.5, 1)) != {row["problem"] for row in ROWS[:15]}
        assert set(chosen(0.2, 1)) < set(chosen(0.5, 1))
        with pytest.raises(ValueError, match=r"fraction=0.01 .* Use "):
            chosen(0.01, 1)

    @pytest.mark.parametrize(("size", "n"), [(0.2, 10), (0.01, 1), (7, 7), (0.99, 50)])
    def test_no_problem_is_held_out_and_trained_on(self, size: float, n: int):
        texts = [f"{i % 50} +  1?" if i % 2 else f"{i % 50} + 1?" for i in range(200)]
        training, held_out = hold_out(table(*({"problem": text} for text in texts)), size, 42)
        one, other = ({"".join(text.split()) for text in part["problem"]} for part in (training, held_out))
        assert not one & other
        assert len(held_out) == len(other) == n  # each once
        assert len(training) == 200 - 4 * n


class TestNames:
    @pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "nowhere.jsonl", "~/no/where"])
    def test_a_missing_path_is_not_looked_up_on_the_hub(self, name: str):
        with pytest.raises(ValueError, match="does not exist"):
            load_problems(name)

    def test_a_split_or_format_that_cannot_be_read_is_rejected(self, tmp_path: Path):
        with pytest.raises(ValueError, match=r"without split='test'.*test\.jsonl\.gz"):
            load_problems(str(tmp_path), split="test")
        (tmp_path / "some.xlsx").write_text("problem\n")
        with pytest.raises(ValueError, match=r"some\.xlsx' is not in a readable format"):
            load_problems(str(tmp_path / "some.xlsx"))

    def test_a_folder_saved_by_datasets(self, tmp_path: Path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        table(*ROWS).save_to_disk(tmp_path / "one")
        assert load_problems("~/one").to_list() == ROWS
        datasets.DatasetDict(train=table(*ROWS), test=table(*ROWS[:3])).save_to_disk(tmp_path / "both")
        assert load_problems(str(tmp_path / "both"), split="test").to_list() == ROWS[:3]
        with pytest.raises(ValueError, match="split='dev' cannot be loaded"):
            load_problems(str(tmp_path / "both"), split="dev")

    def test_a_copy_of_a_dataset_on_the_hub(self, tmp_path: Path, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
        folder = tmp_path / "copy"
        (folder / "main").mkdir(parents=True)
        for split, rows in (("train", ROWS), ("test", ROWS[:3])):
            table(*rows).to_parquet(folder / "main" / f"{split}-00000-of-00001.parquet")
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
            "  - split: test\n    path: main/test-*\n---\n"
        )
        assert load_problems(str(folder), dataset_config="main", split="test").to_list() == ROWS[:3]
        with pytest.raises(ValueError, match="split='dev' cannot be loaded"):
            load_problems(str(folder), dataset_config="main", split="dev")

    def test_any_other_name_is_a_hub_id(self, monkeypatch: pytest.MonkeyPatch):
        asked = []
        monkeypatch.setattr(files, "load_dataset", lambda *a, **named: asked.append((a, named)) or table(*ROWS))
        assert len(load_problems("some/name", dataset_config="algebra", split="test", levels=["Level 1"])) == 10
        assert asked == [(("some/name", "algebra"), {"split": "test"})]

    def test_embedded_problems(self):
        assert Counter(load_problems("arithmetic", split="test", levels=["Level 2"], fraction=0.1)["level"]) == {
            "Level 2": 100
        }

    def test_what_would_have_no_effect_is_rejected(self, tmp_path: Path):
        for name in ("arithmetic", write(tmp_path / "some.jsonl", ROWS)):
            with pytest.raises(ValueError, match="dataset_config='algebra' has no effect"):
                load_problems(name, dataset_config="algebra")
            with pytest.raises(ValueError, match=r"dataset_settings=.* has no effect"):
                load_problems(name, settings={"size": 5})

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_a_file_without_permission_is_not_called_damaged(self, tmp_path: Path):
        file = Path(write(tmp_path / "some.jsonl", ROWS))
        file.chmod(0)
        with pytest.raises(ValueError, match="Grant permission to read it"):
            load_problems(str(file))


def test_math_has_its_levels(math: str):
    train, test = (Counter(load_problems(math, split=split)["level"]) for split in ("train", "test"))
    assert [train[f"Level {level}"] for level in "12345?"] == [564, 1348, 1592, 1690, 2304, 2]
    assert [test[f"Level {level}"] for level in "12345?"] == [437, 894, 1131, 1214, 1324, 0]
    assert len(load_problems(math, levels=["Level 3"], fraction=0.1, seed=42)) == 159
