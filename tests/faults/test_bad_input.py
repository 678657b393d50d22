"""
One message before any work says what is wrong with a recipe, its data, model, rewards or folder.

Each case of the catalogue ends with status 2 and one message that
says what is wrong, without a traceback unless `--debug` is given, and leaves every file unchanged.
"""

import dataclasses
import io
import json
import re
import shutil
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig

from faults import catalogue
from faults.catalogue import RECIPE, REWARDS, ROWS, Case, write_rows
from opo_trl import OPOConfig, train
from opo_trl.launch import cli
from opo_trl.launch.output_dir import kept_on_resume


@pytest.fixture
def folder(tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the run that a case changes."""
    fill(tmp_path, tiny_model)
    enter(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    """The same run, completed."""
    folder = tmp_path_factory.mktemp("works")
    fill(folder, tiny_model)
    case = Case("nothing is wrong", [], {"save_steps": 1})
    prepare(case, folder)
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stderr(io.StringIO()) as errors:
        enter(folder, monkeypatch)
        assert call(case) == 0
    assert "Loading weights" in errors.getvalue()  # no case may get so far
    return folder


def fill(folder: Path, model: str) -> None:
    shutil.copytree(model, folder / "model")
    (folder / "data").mkdir()
    write_rows(ROWS)(folder)
    write_rows([{**row, "problem": row["problem"].replace("+", "*")} for row in ROWS], "test.jsonl")(folder)
    (folder / "my_rewards.py").write_text(REWARDS)


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)


def prepare(case: Case, folder: Path) -> None:
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **case.recipe}))
    case.change(folder)


def options(case: Case) -> list[str]:
    if case.command in ("train", "launch"):
        return ["--config", "recipe.yaml", *case.fields]
    return case.fields


def call(case: Case, *more: str) -> int:
    if case.command == "train":
        return train.main([*options(case), *more])
    command = "train" if case.command == "launch" else case.command
    return cli.main([command, *options(case), *more])


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a folder, with its time of modification and the content of files."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def message(error_output: str) -> str:
    """The command's own message, after warnings of libraries."""
    return re.findall(r"^opo-trl \w+: error: .*", error_output, re.DOTALL | re.MULTILINE)[-1]


@pytest.mark.parametrize("case", catalogue.ALL, ids=lambda case: case.name)
def test_bad_input_is_rejected_before_any_work(case: Case, folder: Path, monkeypatch, capsys):
    prepare(case, folder)
    before = snapshot(folder)

    assert call(case) == 2
    output = capsys.readouterr().err
    assert "Traceback" not in output
    assert "Loading weights" not in output
    said = message(output)
    for text in case.says:
        assert text in said
    assert snapshot(folder) == before

    assert call(case, "--debug") == 2
    output = capsys.readouterr().err
    assert "Traceback (most recent call last)" in output
    assert message(output) == said
    assert snapshot(folder) == before


def test_unchanged_run_works(works: Path):
    assert (works / "run" / "model.safetensors").exists()
    assert json.loads((works / "run" / "summary.json").read_text())["optimizer_steps"] == 1


def test_rerun_moves_the_run_aside(works: Path, tmp_path: Path, monkeypatch):
    folder = shutil.copytree(works, tmp_path / "copy")
    before = snapshot(folder / "run")
    enter(folder, monkeypatch)
    assert train.main(["--config", "run/recipe.yaml", "--overwrite", "--max_steps", "2"]) == 0
    earlier = snapshot(folder / "run-2")
    assert {name: content for name, (_, content) in earlier.items()} == {
        name: content for name, (_, content) in before.items()
    }
    assert sorted(path.name for path in (folder / "run").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert yaml.safe_load((folder / "run" / "recipe.yaml").read_text())["max_steps"] == 2


def test_finished_run_without_a_checkpoint_is_not_repeated_over_its_results(
    works: Path, tmp_path: Path, monkeypatch, capsys
):
    folder = shutil.copytree(works, tmp_path / "copy")
    shutil.rmtree(folder / "run" / "checkpoint-1")
    before = snapshot(folder)
    enter(folder, monkeypatch)
    assert call(Case("auto", []), "--resume_from_checkpoint", "auto") == 2
    assert "output_dir='run' holds another run" in message(capsys.readouterr().err)
    assert snapshot(folder) == before


SECRETS = {"hub_token": "plainword1", "WANDB_API_KEY": "plainword2", "user": "plainword3", "model": "plainword4"}


def test_no_file_or_message_of_a_run_shows_a_secret_and_it_can_be_repeated(folder: Path, monkeypatch, capfd):
    address = f"http://user:{SECRETS['user']}@localhost:8000"
    recipe = {"env": {"WANDB_API_KEY": SECRETS["WANDB_API_KEY"], "SHOWN": "1"}, "vllm_server_base_url": address}
    recipe |= {"model_init_kwargs": {"token": SECRETS["model"]}, "save_steps": 1, "report_to": "tensorboard"}
    monkeypatch.setenv("WANDB_API_KEY", "")  # so that what the recipe sets is removed again
    monkeypatch.setenv("SHOWN", "")
    prepare(Case("with secrets", [], recipe), folder)
    command = ["--config", "recipe.yaml", "--hub_token", SECRETS["hub_token"]]
    monkeypatch.setattr(sys, "argv", ["train", *command])
    assert train.main() == 0

    def shown() -> list[str]:
        files = [path for path in (folder / "run").rglob("*") if path.is_file()]
        values = [value.encode() for value in SECRETS.values()]
        return [str(path) for path in files if any(value in path.read_bytes() for value in values)]

    assert (folder / "run" / "checkpoint-1" / "training_args.bin").is_file()
    assert not shown()
    said = [*capfd.readouterr(), *sys.argv]
    assert not any(value in text for text in said for value in SECRETS.values())
    stored = yaml.safe_load((folder / "run" / "recipe.yaml").read_text())
    assert stored["env"] == {"WANDB_API_KEY": "<secret>", "SHOWN": "1"}
    assert stored["hub_token"] == "<secret>"
    assert stored["vllm_server_base_url"] == "http://<secret>@localhost:8000"

    again = ["--config", "run/recipe.yaml", "--resume_from_checkpoint", "last", "--max_steps", "2"]
    given = ["--vllm_server_base_url", address, "--model_init_kwargs", f"{{token: {SECRETS['model']}}}"]
    for options, says in (
        (given[:2], "model_init_kwargs={'token': '<secret>'} lacks a secret"),
        (given[2:], "vllm_server_base_url='http://<secret>@localhost:8000' lacks a secret"),
    ):
        assert train.main([*again, *options]) == 2
        assert says in message(capfd.readouterr().err)
    with monkeypatch.context() as shell:
        shell.delenv("WANDB_API_KEY")
        assert train.main([*again, *given]) == 2
        assert "Set the variable WANDB_API_KEY in the shell" in message(capfd.readouterr().err)
    assert train.main([*again, *given]) == 0
    assert json.loads((folder / "run" / "summary.json").read_text())["optimizer_steps"] == 2
    assert not shown()


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("too_few", ["too_few has raised ValueError: 1 values for 4 completions", "one number, or None"]),
        ("fails", ["fails has raised KeyError: 'gold'"]),
        ("exits_later", ["exits_later has raised SystemExit: 0."]),
    ],
)
def test_reward_that_fails_in_training_is_named_and_leaves_checkpoints_alone(
    works: Path, tmp_path: Path, monkeypatch, capsys, reward, says
):
    folder = shutil.copytree(works, tmp_path / "copy")
    code = REWARDS.replace("def length(", "def unused(").replace(f"def {reward}(", "def length(")
    (folder / "my_rewards.py").write_text(code)
    enter(folder, monkeypatch)
    saved = snapshot(folder / "run" / "checkpoint-1")
    case = Case(reward, says, fields=["--resume_from_checkpoint", "last", "--max_steps", "2"])
    assert call(case) == 1
    output = capsys.readouterr().err
    assert "Traceback" not in output
    for text in says:
        assert text.replace(f"{reward} has", "length has") in message(output)
    assert snapshot(folder / "run" / "checkpoint-1") == saved


def test_every_field_of_the_objective_is_fixed_on_resume():
    own = {f.name for f in dataclasses.fields(OPOConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)}
    work = {"plan_micro_batches", "max_tokens_per_micro_batch", "skip_inert_rows"}
    bounds = {
        "max_completions",
        "max_reward_failure_rate",
        "max_skipped_steps",
        "save_rollouts",
    }
    assert own - set(kept_on_resume()) == work | bounds
