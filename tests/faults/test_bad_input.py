"""
What is wrong with a recipe, its data, model, rewards or folder is said in one message before any work.

Every case of the catalogue ends with status 2, a `ValueError` whose message names the field, its value and what to do,
no traceback unless `--debug` asks for it, and every file as it was.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from faults import catalogue
from faults.catalogue import RECIPE, REWARDS, ROWS, Case, write_rows
from opo_trl import cli, train


@pytest.fixture
def folder(tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the run that a case changes."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "data").mkdir()
    write_rows(ROWS)(tmp_path)
    test = [{**row, "problem": row["problem"].replace("+", "*")} for row in ROWS]
    write_rows(test, "test.jsonl")(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return tmp_path


def prepare(case: Case, folder: Path) -> None:
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **case.recipe}))
    case.change(folder)


def words(case: Case) -> list[str]:
    if case.command in ("train", "launch"):
        return ["--config", "recipe.yaml", *case.fields]
    return case.fields


def call(case: Case, *further: str) -> int:
    if case.command == "train":
        return train.main([*words(case), *further])
    command = "train" if case.command == "launch" else case.command
    return cli.main([command, *words(case), *further])


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a folder: files with their content, folders without, and when they were written."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def message(error_output: str) -> str:
    """What the command says at last, after warnings of libraries."""
    return re.findall(r"^opo-trl \w+: error: .*", error_output, re.DOTALL | re.MULTILINE)[-1]


@pytest.mark.parametrize("case", catalogue.ALL, ids=lambda case: case.name)
def test_bad_input_is_refused_before_any_work(case: Case, folder: Path, monkeypatch, capsys):
    prepare(case, folder)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    if case.absent:
        monkeypatch.setitem(sys.modules, case.absent, None)  # importing it fails
    before = snapshot(folder)

    assert call(case) == 2
    output = capsys.readouterr().err
    assert "Traceback" not in output
    said = message(output)
    for text in case.says:
        assert text in said
    assert snapshot(folder) == before

    assert call(case, "--debug") == 2
    output = capsys.readouterr().err
    assert "Traceback (most recent call last)" in output
    assert f"\nValueError: {said.partition(': error: ')[2]}" in output
    assert message(output) == said
    assert snapshot(folder) == before


def test_catalogue_has_no_case_twice_and_is_long_enough():
    names = [case.name for case in catalogue.ALL]
    assert len(set(names)) == len(names) >= 60


def test_the_run_that_the_cases_change_works(folder: Path):
    case = Case("nothing is wrong", [])
    prepare(case, folder)
    assert call(case) == 0
    assert (folder / "run" / "model.safetensors").exists()
    assert json.loads((folder / "run" / "summary.json").read_text())["optimizer_steps"] == 1


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("too_few", ["too_few has returned 1 values for 4 completions", "one number, or None"]),
        ("text", ["text has returned 'good' for completion 0, of type str", "one number, or None"]),
        ("single", ["single has returned 1.0, not a list", "one number, or None"]),
        ("fails", ["fails has raised KeyError: 'gold'", "Mend it"]),
        ("fails_later", ["fails_later has raised KeyError: 'gold'", "Mend it"]),
    ],
)
def test_reward_that_fails_in_training_is_named_and_leaves_checkpoints_alone(folder: Path, capsys, reward, says):
    case = Case(reward, says, {"reward_funcs": ["my_rewards.length"], "save_steps": 1})
    prepare(case, folder)
    assert call(case) == 0
    saved = snapshot(folder / "run" / "checkpoint-1")
    code = REWARDS.replace("def length(", "def unused(").replace(f"def {reward}(", "def length(")
    (folder / "my_rewards.py").write_text(code)
    sys.modules.pop("my_rewards")
    capsys.readouterr()
    assert call(case, "--resume_from_checkpoint", "last", "--max_steps", "2") == 1
    output = capsys.readouterr().err
    assert "Traceback" not in output
    for text in says:
        assert text.replace(f"{reward} has", "length has") in message(output)
    assert snapshot(folder / "run" / "checkpoint-1") == saved


def test_command_line_ends_with_status_2_and_one_message(folder: Path):
    case = Case("data that do not exist", ["dataset_name='./no'"], {"dataset_name": "./no"})
    prepare(case, folder)
    before = snapshot(folder)
    root = str(Path(train.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "opo_trl.train", *words(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.count("opo-trl train: error: dataset_name='./no' does not exist") == 1
    assert "Traceback" not in done.stderr
    assert snapshot(folder) == before
