"""The datasets of a run: what a recipe takes from a file, holds out, and measures by default."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from tiny import make_tokenizer

from opo_trl.command import recipe
from opo_trl.command.datasets import Data, load_data


# A fifth of the problems twice, with different white space.
ROWS = [{"question": f"{i} +{' ' * (i % 2)}1?", "answer": str(i + 1)} for i in range(100)]
ROWS += [{**row, "question": row["question"].replace(" ", "  ")} for row in ROWS[:20]]


def load(folder: Path, fields: dict, rows: list[dict] = ROWS, name: str = "some.jsonl") -> Data:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = {"model_name_or_path": "x", "dataset_name": str(folder / name), "use_cpu": True, "bf16": False, **fields}
    (folder / "recipe.yaml").write_text(json.dumps(given))
    script, args, *_ = recipe.parse(["--config", str(folder / "recipe.yaml")])
    return load_data(script, args, make_tokenizer())


def texts(data: Dataset) -> set[str]:
    return {"".join(str(prompt).split()) for prompt in data["prompt"]}


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
    parts = [*data.report.values(), *filter(None, [data.validation, data.evaluation])]
    for part in parts:
        assert held_out / 2 < len(part) < held_out
        assert not texts(part) & texts(data.training)
    assert data.report.keys() == ({"all"} if "report_levels" not in fields else set())
    said = f"; {held_out} of its 120 rows are held out (test_fraction: "
    assert (said in data.plan) is bool(held_out)
    if parts:
        again, other = (load(tmp_path, {**fields, "subset_seed": seed}) for seed in (42, 7))
        assert again.training.to_list() == data.training.to_list() != other.training.to_list()


def test_a_folder_holds_out_only_if_asked(tmp_path, caplog):
    data = load(tmp_path, {"dataset_name": str(tmp_path / "data")}, name="data/train.jsonl")
    assert (len(data.training), data.report) == (120, {})
    assert "No accuracy is measured before and after training: dataset_name=" in caplog.text
    with pytest.raises(ValueError, match=r"without a file for split='test'"):
        load(tmp_path, {"dataset_name": str(tmp_path / "data"), "validation_steps": 5}, name="data/train.jsonl")
    fields = {"dataset_name": str(tmp_path / "data"), "test_fraction": 0.2}
    data = load(tmp_path, fields, name="data/train.jsonl")
    assert len(data.training) == 96
    assert data.report["all"]


def test_levels_are_reported_one_by_one_and_nothing_without_answers(tmp_path):
    rows = [{**row, "level": f"L{i % 2}"} for i, row in enumerate(ROWS)]
    assert load(tmp_path, {"levels": ["L1"]}, rows).report.keys() == {"L1"}
    assert load(tmp_path, {"report_levels": ["all", "L0"]}, rows).report.keys() == {"all", "L0"}
    data = load(tmp_path, {"reward_funcs": ["think_format_reward"]}, [{"prompt": row["question"]} for row in ROWS])
    assert data.report == {}
    assert data.plan.endswith("prompt_style: dataset; no column has answers")


def test_one_problem_is_trained_on(tmp_path):
    rows = [ROWS[0]] * 8
    assert (len(load(tmp_path, {}, rows).training), load(tmp_path, {}, rows).report) == (6, {})
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
    assert load(tmp_path, fields, [{column: "1+1?", "solution": "2"}] * 2).training[0]["prompt"] == asked


def test_prompts_that_do_not_ask_for_a_box_are_named_and_can_get_the_instruction(tmp_path, caplog):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    rows = [{"prompt": messages, "solution": "2"}] * 2
    assert load(tmp_path, {}, rows).training[0]["prompt"] == messages
    assert "`columns: {problem: prompt}` adds `instruction`" in caplog.text
    caplog.clear()
    system, user = load(tmp_path, {"columns": {"problem": "prompt"}}, rows).training[0]["prompt"]
    assert system == messages[0]
    assert user["content"].startswith("1+1?\n\n")
    assert user["content"].endswith("\\boxed{}.")
    assert "boxed" not in caplog.text
