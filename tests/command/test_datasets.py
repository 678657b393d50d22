"""The datasets of a run: what a recipe takes from a file, holds out, and measures by default."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from tiny import make_tokenizer

from opo_trl.command import recipe
from opo_trl.command.datasets import Data, load_data


# A fifth of the problems twice, with different white space.
ROWS = []
for number in range(100):
    space = "" if number % 2 == 0 else " "
    ROWS.append({"question": f"{number} +{space}1?", "answer": str(number + 1)})
for row in ROWS[:20]:
    respaced = row["question"].replace(" ", "  ")
    ROWS.append({**row, "question": respaced})


def load(folder: Path, fields: dict, rows: list[dict] = ROWS, name: str = "some.jsonl") -> Data:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    lines = [f"{json.dumps(row)}\n" for row in rows]
    file.write_text("".join(lines))
    defaults = {"model_name_or_path": "x", "dataset_name": str(file), "use_cpu": True, "bf16": False}
    written = folder / "recipe.yaml"
    written.write_text(json.dumps(defaults | fields))
    script, args, *_ = recipe.parse(["--config", str(written)])
    return load_data(script, args, make_tokenizer())


def without_space(text: str) -> str:
    return "".join(text.split())


def texts(data: Dataset) -> set[str]:
    return {without_space(str(prompt)) for prompt in data["prompt"]}


@pytest.mark.parametrize(
    ("fields", "held_out"),
    [
        ({}, 24),
        ({"validation_steps": 5}, 24),
        ({"report_levels": [], "eval_strategy": "epoch"}, 24),
        ({"test_fraction": 0.1, "report_levels": []}, 12),
        ({"report_levels": []}, 0),  # nothing is measured
    ],
)
def test_a_part_of_one_file_is_held_out_without_problems_that_are_trained_on(tmp_path, fields, held_out):
    data = load(tmp_path, fields)
    assert len(data.training) == 120 - held_out
    measured = [*data.report.values(), data.validation, data.evaluation]
    parts = [part for part in measured if part]
    for part in parts:
        assert held_out / 2 < len(part) < held_out
        assert not texts(part) & texts(data.training)
    levels = set() if "report_levels" in fields else {"all"}
    assert data.report.keys() == levels
    sentence = f"; {held_out} of its 120 rows are held out (test_fraction: "
    assert (sentence in data.plan) is bool(held_out)
    if parts:
        rows = data.training.to_list()
        same_seed = load(tmp_path, {**fields, "subset_seed": 42})
        assert same_seed.training.to_list() == rows
        other_seed = load(tmp_path, {**fields, "subset_seed": 7})
        assert other_seed.training.to_list() != rows


def test_a_folder_holds_out_only_if_asked(tmp_path, caplog):
    folder = str(tmp_path / "data")
    unasked = load(tmp_path, {"dataset_name": folder}, name="data/train.jsonl")
    assert len(unasked.training) == 120
    assert unasked.report == {}
    assert "No accuracy is measured before and after training: dataset_name=" in caplog.text
    with pytest.raises(ValueError, match=r"without a file for split='test'"):
        load(tmp_path, {"dataset_name": folder, "validation_steps": 5}, name="data/train.jsonl")
    asked = load(tmp_path, {"dataset_name": folder, "test_fraction": 0.2}, name="data/train.jsonl")
    assert len(asked.training) == 96
    assert asked.report["all"]


def test_levels_are_reported_one_by_one_and_nothing_without_answers(tmp_path):
    rows = [{**row, "level": f"L{i % 2}"} for i, row in enumerate(ROWS)]
    of_one_level = load(tmp_path, {"levels": ["L1"]}, rows)
    assert of_one_level.report.keys() == {"L1"}
    of_all_levels = load(tmp_path, {"report_levels": ["all", "L0"]}, rows)
    assert of_all_levels.report.keys() == {"all", "L0"}
    questions = [{"prompt": row["question"]} for row in ROWS]
    without_answers = load(tmp_path, {"reward_funcs": ["think_format_reward"]}, questions)
    assert without_answers.report == {}
    assert without_answers.plan.endswith("prompt_style: dataset; no column has answers")


def test_one_problem_is_trained_on(tmp_path):
    rows = [ROWS[0]] * 8
    data = load(tmp_path, {}, rows)
    assert len(data.training) == 6
    assert data.report == {}
    with pytest.raises(ValueError, match=r"of the held-out set are in the training set.*None is left"):
        load(tmp_path, {"validation_steps": 5}, rows)


@pytest.mark.parametrize(
    ("column", "fields", "asked"),
    [
        ("problem", {"instruction": "Think."}, [{"role": "user", "content": "1+1?\n\nThink."}]),
        ("problem", {"instruction": ""}, [{"role": "user", "content": "1+1?"}]),
        ("problem", {"prompt_style": "plain"}, "1+1?"),
        ("prompt", {}, "1+1?"),
        (
            "prompt",
            {"columns": {"problem": "prompt"}, "instruction": "Think."},
            [{"role": "user", "content": "1+1?\n\nThink."}],
        ),
    ],
)
def test_recipe_decides_what_is_asked(tmp_path, column, fields, asked):
    rows = [{column: "1+1?", "solution": "2"}] * 2
    data = load(tmp_path, fields, rows)
    assert data.training["prompt"][0] == asked


def test_prompts_that_do_not_ask_for_a_box_are_named_and_can_get_the_instruction(tmp_path, caplog):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    rows = [{"prompt": messages, "solution": "2"}] * 2
    unchanged = load(tmp_path, {}, rows)
    assert unchanged.training["prompt"][0] == messages
    assert "`columns: {problem: prompt}` adds `instruction`" in caplog.text
    caplog.clear()
    with_instruction = load(tmp_path, {"columns": {"problem": "prompt"}}, rows)
    system, user = with_instruction.training["prompt"][0]
    assert system == messages[0]
    assert user["content"].startswith("1+1?\n\n")
    assert user["content"].endswith("\\boxed{}.")
    assert "boxed" not in caplog.text


def test_plain_prompts_get_no_instruction_without_a_word(tmp_path, caplog):
    with pytest.raises(ValueError, match=r"instruction='Think\.' has no effect: with prompt_style='plain'"):
        load(tmp_path, {"prompt_style": "plain", "instruction": "Think."})
    load(tmp_path, {"prompt_style": "plain"})
    assert "No prompt asks for an answer in \\boxed{}" in caplog.text
    assert "`prompt_style: chat` adds `instruction`" in caplog.text
    caplog.clear()
    load(tmp_path, {"prompt_style": "plain", "reward_funcs": ["first_line_reward"]})
    assert "boxed" not in caplog.text


@pytest.mark.parametrize("fields", [{}, {"test_fraction": 0.1}])
def test_a_split_that_is_not_read_is_rejected(tmp_path, fields):
    with pytest.raises(ValueError, match=r"dataset_test_split='validation' is not allowed"):
        load(tmp_path, {**fields, "dataset_test_split": "validation"})
