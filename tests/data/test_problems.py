"""Loading problems: local files, columns, levels, fractions, and dataset names."""

import codecs
import csv
import gzip
import json
import re
from collections import Counter
from pathlib import Path

import datasets
import pytest

from opo_trl.data import files, load_problems, to_prompts
from opo_trl.data.problems import has_prompts, take


ROWS = [
    {"problem": f"What is ${i}$?", "level": f"Level {1 + i % 3}", "solution": f"$\\boxed{{{i}}}$."} for i in range(30)
]


def write(file: Path, rows: list[dict]) -> str:
    lines = "\n".join(map(json.dumps, rows))
    if file.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    elif file.suffix in (".csv", ".tsv"):
        dialect = "excel-tab" if file.suffix == ".tsv" else "excel"
        with file.open("w", newline="") as table:
            writer = csv.DictWriter(table, rows[0], dialect=dialect)
            writer.writeheader()
            writer.writerows(rows)
    elif file.suffix == ".gz":
        file.write_bytes(gzip.compress(lines.encode()))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text(lines)
    return str(file)


def table(*rows: dict) -> datasets.Dataset:
    return datasets.Dataset.from_list(list(rows))


class TestLocalFiles:
    @pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv", ".tsv"])
    def test_text_stays_text_in_a_file_for_each_split(self, tmp_path: Path, ending: str):
        texts = ("4", "007", "2020-01-01", "NA", "null", "[1]", "½", 'say "x", y', "two\nlines\u2028")
        rows = [{**ROWS[0], "solution": text} for text in texts]
        training_file = write(tmp_path / f"train{ending}", [{"id": 7, **row} for row in rows])
        write(tmp_path / f"test{ending}", rows[2:3])
        folder = str(tmp_path)
        assert load_problems(folder).to_list() == rows
        assert load_problems(folder, split="test").to_list() == rows[2:3]
        assert load_problems(training_file, split="test").to_list() == rows
        with pytest.raises(ValueError, match=r"without a file for split='dev'"):
            load_problems(str(tmp_path), split="dev")

    def test_a_byte_order_mark_is_no_content(self, tmp_path: Path):
        file = tmp_path / "some.csv"
        write(file, ROWS[:2])
        content = file.read_bytes()
        file.write_bytes(codecs.BOM_UTF8 + content)
        assert load_problems(str(file)).to_list() == ROWS[:2]

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("some.csv", b"question,answer\na,1\nb,2,3\n", r"line 3 does not have one value for each column"),
            ("some.csv", b"question,answer\na\n", r"line 2 does not have one value for each column"),
            ("some.csv", b"question,answer\na,\xff\n", r"'utf-8' codec can't decode"),
            ("some.jsonl", b'{"problem": "a"}\n' * 4000 + b"{nonsense", r"line 4001 "),
            ("cut.jsonl", b'{"problem": "a"}\n{"problem"\n{"problem": "b"}\n', r"line 3 .* begins in line 2\. "),
        ],
    )
    def test_a_bad_file_is_named_with_its_line(self, tmp_path: Path, name: str, content: bytes, said: str):
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}' cannot be read: .*{said}"):
            files.load_rows(str(file))

    def test_half_of_a_character_is_named_with_its_row(self, tmp_path: Path):
        file = write(tmp_path / "some.jsonl", [{"said": ["a"]}, {"said": ["b\ud83d"]}])
        with pytest.raises(ValueError, match=r"some.jsonl' cannot be read: 'said' of row 2 has half of a char.*ud83d"):
            files.load_rows(file)

    def test_mappings_keep_their_names_order_and_numbers(self, tmp_path: Path):
        calls = [{"b": 1, "a": None}, {"a": 0.5, "b": 2}, {"c": {}}]
        rows = [{"calls": [call]} for call in calls]
        assert repr(list(files.load_rows(str(write(tmp_path / "some.jsonl", rows))))) == repr(rows)

    def test_numbers_beside_text_are_text(self, tmp_path: Path):
        levels = [None, "4", "5", 6]
        file = write(tmp_path / "some.jsonl", [{**ROWS[0], "level": level} for level in levels])
        assert list(load_problems(file)["level"]) == levels
        chosen = load_problems(file, levels=["4", "6"])
        assert list(chosen["level"]) == ["4", 6]
        for answers in ([4, 5], [4, 0.5], [4, "4", "x"]):
            file = write(tmp_path / "some.jsonl", [{"problem": "?", "answer": answer} for answer in answers])
            prompts = to_prompts(load_problems(file))
            assert list(prompts["solution"]) == list(map(str, answers))


class TestColumns:
    def test_gsm8k_needs_no_mapping(self, shared_data: Path, caplog):
        problems = load_problems(str(shared_data / "gsm8k"), split="test")
        assert "took 'question' for problem and 'answer' for solution" in caplog.text
        prompts = to_prompts(problems)
        assert len(prompts) == len(problems) == 1319
        assert all(re.fullmatch(r"-*[\d,]+", answer) for answer in prompts["solution"])

    @pytest.mark.parametrize(
        ("row", "columns", "answer"),
        [
            ({"problem": "a", "solution": "So it is 4.", "answer": "4"}, {}, "4"),  # prose without a box
            ({"problem": "a", "solution": r"\boxed{4}", "answer": "5"}, {}, "4"),
            ({"problem": "a", "solution": r"\boxed{4}", "answer": "5"}, {"solution": "answer"}, "5"),
            ({"question": "a", "final_answer": ["4"]}, {}, "4"),
            ({"problem": "a", "solution": "4"}, {}, "4"),
            ({"problem": "a", "reward_model": {"ground_truth": "4", "style": "rule"}}, {}, "4"),
            ({"problem": "a", "answer": "x \\boxed{4}", "solution": "no"}, {}, "4"),
            ({"problem": "a", "answer": "so\n#### x = {'a': '}'}"}, {}, "x = {'a': '}'}"),
            (
                {"my.text": "a", "extra": {"gold": {"value": 4}}},
                {"problem": "my.text", "solution": "extra.gold.value"},
                "4",
            ),
        ],
    )
    def test_columns_are_recognized_or_mapped(self, tmp_path: Path, row, columns, answer):
        problems = load_problems(write(tmp_path / "some.jsonl", [row, row]), columns=columns)
        assert problems.column_names == ["problem", "solution"]
        assert problems["problem"][0] == "a"
        prompts = to_prompts(problems)
        assert list(prompts["solution"]) == [answer] * 2

    @pytest.mark.parametrize(
        ("row", "solution"),
        [
            ({"answer": "2 + 2\n#### 4"}, "4"),
            ({"reward_model": {"ground_truth": "4"}, "data_source": "x"}, "4"),
            ({"solution": "so \\boxed{4}", "answer": "5"}, "so \\boxed{4}"),  # unchanged, as in TRL
            ({}, None),
        ],
    )
    @pytest.mark.parametrize("prompt", ["2 + 2 =", [{"role": "user", "content": "2 + 2?"}]], ids=["text", "chat"])
    def test_prompts_are_unchanged_and_get_a_solution(self, row, solution, prompt):
        rows = table({"prompt": prompt, **row})
        assert has_prompts(rows, {})
        assert not has_prompts(rows, {"problem": "prompt"})
        prompts, sources = take(rows, {}, "prompt")
        expected = {"prompt": prompt, **row}
        if solution:
            expected["solution"] = solution
        assert prompts[0] == expected
        is_recognized = solution is not None and "solution" not in row
        assert list(sources) == ["solution"] * is_recognized

    def test_columns_next_to_prompts_are_renamed_or_taken_out_of_mappings(self):
        rows = table({"question": "2 + 2 =", "gold": {"value": "4", "kind": "sum"}})
        columns = {"prompt": "question", "solution": "gold.value", "kind": "gold.kind"}
        prompts, sources = take(rows, columns, "prompt")
        assert prompts[0] == {"prompt": "2 + 2 =", "gold": rows[0]["gold"], "solution": "4", "kind": "sum"}
        assert sources == columns
        results = table({"question": "a", "result": "1"})
        renamed, _ = take(results, {"prompt": "question", "text": "result"}, "prompt")
        assert renamed.column_names == ["prompt", "text"]

    @pytest.mark.parametrize("asked", ["prompt", "problem"])
    def test_a_missing_column_is_named(self, asked):
        rows = table({"question": "a", "answer": "1", "extra": {"gold": "1"}})
        with pytest.raises(
            ValueError, match=r"no column \[.*'extra.golden'\], only \['question', 'answer', 'extra'\]"
        ):
            take(rows, {"solution": "extra.golden"}, asked)
        names = "'prompt'" if asked == "prompt" else "'problem', 'solution'"
        without_any = table({"text": "a"})
        with pytest.raises(ValueError, match=rf"no column \[{names}\], only \['text'\].*`columns: "):
            take(without_any, {}, asked)

    @pytest.mark.parametrize("part", ["input", "context", "choices", "options"])
    def test_a_column_that_may_be_a_part_of_the_problem_is_not_left_out_unasked(self, part):
        rows = table({"instruction": "Add them.", part: "2 and 3", "answer": "5"})
        with pytest.raises(ValueError, match=rf"'instruction' may be only a part.*'{part}'.*problem: instruction"):
            take(rows, {}, "problem")
        asked, _ = take(rows, {"problem": "instruction"}, "problem")
        assert asked[0] == {"problem": "Add them.", "solution": "5"}
        of_own_name, _ = take(rows, {"given": part}, "problem")
        assert of_own_name[0]["given"] == "2 and 3"
        empty, _ = take(table({"instruction": "Add 2 and 3.", part: "", "answer": "5"}), {}, "problem")
        assert empty[0]["problem"] == "Add 2 and 3."

    def test_nan_is_no_answer(self, tmp_path: Path):
        rows = datasets.Dataset.from_dict({"problem": ["a", "b"], "answer": [2.5, float("nan")]})
        rows.to_parquet(tmp_path / "train.parquet")
        assert load_problems(str(tmp_path))["solution"] == ["2.5", None]

    def test_solutions_have_the_answers_only_if_all_have_boxes(self, tmp_path: Path):
        worked = [{"problem": "1 + 1", "solution": text, "answer": "2"} for text in ("\\boxed{2}", "It is two.")]
        assert load_problems(write(tmp_path / "some.jsonl", worked))["solution"] == ["2", "2"]
        assert load_problems(write(tmp_path / "all.jsonl", worked[:1]))["solution"] == ["\\boxed{2}"]

    def test_answers_that_are_mapped_under_another_name_than_ours_are_named(self):
        rows = table({"question": "2 + 3?", "answer": "First, we add.", "result": "5"})
        with pytest.raises(ValueError, match=r"'answer' is not the name.*`columns: \{solution: result\}`"):
            take(rows, {"answer": "result"}, "problem")
        both, _ = take(rows, {"solution": "result", "answer": "answer"}, "problem")
        assert both[0] == {"problem": "2 + 3?", "solution": "5", "answer": "First, we add."}


class TestSelection:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        write(tmp_path / "train.jsonl", ROWS)
        return str(tmp_path)

    def test_levels_come_before_the_fraction(self, folder: str, tmp_path: Path):
        two_levels = load_problems(folder, levels=["Level 3", "Level 1"])
        assert Counter(two_levels["level"]) == {"Level 1": 10, "Level 3": 10}
        half_a_level = load_problems(folder, levels=["Level 2"], fraction=0.5)
        assert Counter(half_a_level["level"]) == {"Level 2": 5}
        with pytest.raises(ValueError, match=r"levels=.*\['Level 1', 'Level 2', 'Level 3'\]"):
            load_problems(folder, levels=["Level 3", "Level 7"])

    def test_a_fraction_is_random_seeded_and_nested(self, folder: str):
        def chosen(fraction: float, seed: int = 1) -> list[str]:
            problems = load_problems(folder, fraction=fraction, seed=seed)
            return list(problems["problem"])

        for fraction, size in ((1.0, 30), (0.5, 15), (0.12, 4), (0.02, 1)):
            assert len(chosen(fraction)) == size
        half = chosen(0.5)
        assert half == chosen(0.5)
        assert set(half) != set(chosen(0.5, seed=2))
        assert set(half) != {row["problem"] for row in ROWS[:15]}
        assert set(half) > set(chosen(0.2))
        with pytest.raises(ValueError, match=r"fraction=0.01 .* Use "):
            chosen(0.01)


class TestNames:
    def test_a_folder_saved_by_datasets(self, tmp_path: Path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        training = table(*ROWS)
        training.save_to_disk(tmp_path / "one")
        assert load_problems("~/one").to_list() == ROWS
        both = datasets.DatasetDict(train=training, test=table(*ROWS[:3]))
        both.save_to_disk(tmp_path / "both")
        assert load_problems("~/both", split="test").to_list() == ROWS[:3]
        with pytest.raises(ValueError, match=r"no split='dev', but train, test"):
            load_problems("~/both", split="dev")

    def test_a_copy_of_a_dataset_on_the_hub(self, tmp_path: Path, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
        folder = tmp_path / "copy"
        data = folder / "main"
        data.mkdir(parents=True)
        for split, rows in (("train", ROWS), ("test", ROWS[:3])):
            table(*rows).to_parquet(data / f"{split}-00000-of-00001.parquet")
        readme = folder / "README.md"
        readme.write_text(
            "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
            "  - split: test\n    path: main/test-*\n---\n"
        )
        problems = load_problems(str(folder), dataset_config="main", split="test")
        assert problems.to_list() == ROWS[:3]

    def test_any_other_name_is_a_hub_id(self, monkeypatch: pytest.MonkeyPatch):
        calls = []

        def load_dataset(*arguments, **options):
            calls.append((arguments, options))
            return table(*ROWS)

        monkeypatch.setattr(files, "load_dataset", load_dataset)
        problems = load_problems("some/name", dataset_config="algebra", split="test", levels=["Level 1"])
        assert len(problems) == 10
        assert calls == [(("some/name", "algebra"), {"split": "test"})]

    def test_embedded_problems_have_levels_and_no_settings(self):
        problems = load_problems("arithmetic", split="test", levels=["Level 2"], fraction=0.1)
        assert Counter(problems["level"]) == {"Level 2": 100}
        with pytest.raises(ValueError, match=r"dataset_settings=.* has no effect"):
            load_problems("arithmetic", settings={"size": 5})
