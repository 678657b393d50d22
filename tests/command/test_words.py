"""What `opo-trl train` refuses before it imports a library, and what it passes on to the processes of a run."""

import dataclasses
import subprocess
import sys

import pytest
from accelerate.commands.launch import launch_command_parser
from trl import ModelConfig

from opo_trl import OPOConfig
from opo_trl.command import words
from opo_trl.command.arguments import OPOScriptArguments
from opo_trl.fields import number_problem


HEAVY = "{'accelerate', 'datasets', 'numpy', 'torch', 'transformers', 'trl'}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("recipe.yaml").write_text("output_dir: run\nmu: 0.3\nlr_scheduler_type: constant\n")
    tmp_path.joinpath("taken").mkdir()
    tmp_path.joinpath("taken", "settings.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ("--learning_rat 3", "Did you mean `learning_rate`?"),
        ("--num_proceses 2", "Did you mean `num_processes`?"),
        ("--mu=-1 --alpha 2", "mu=-1.0 is not allowed. Set `mu` to a positive finite number.\nalpha=2.0 is not"),
        ("--max_steps many", "max_steps='many' is not allowed. Set `max_steps` to an integer of at least 1"),
        ("--output_dir taken", "output_dir='taken' holds another run"),
    ],
)
def test_refusal_imports_no_library(folder, fields, says):
    line = ["train", "recipe.yaml", *fields.split()]
    code = f"from opo_trl.command.cli import main; print(main({line})); import sys; print({HEAVY} & {{*sys.modules}})"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout == "2\nset()\n"
    assert says in finished.stderr


@pytest.mark.parametrize(
    "fields",
    [
        "--output_dir taken --overwrite",
        "--output_dir taken --resume_from_checkpoint auto",
        "--no_gradient_checkpointing --learning-rate 1e-5 --debug underflow_overflow",
        "--mu null --logging_steps 0.5 --reward_weights 1 -0.5 --num_machines 1",
    ],
)
def test_what_needs_the_libraries_is_left_to_them(folder, fields):
    if "null" in fields:  # as a recipe has it
        folder.joinpath("recipe.yaml").write_text("mu: null\n")
        fields = fields.replace("--mu null", "")
    words.check_words(words.read_words(["recipe.yaml", *fields.split()]))


def test_names_in_the_source_are_those_of_the_classes_and_of_accelerate():
    of_classes = {
        field.name for kind in (OPOScriptArguments, OPOConfig, ModelConfig) for field in dataclasses.fields(kind)
    }
    types = words.fields()
    assert types.keys() == of_classes
    assert types["learning_rate"] == "float"
    assert types["mu"].startswith("Annotated[float")
    options = {option for action in launch_command_parser()._actions for option in action.option_strings}
    names = {option.removeprefix("--") for option in options if option.startswith("--") and "-" not in option[2:]}
    assert words.options_of_accelerate() == names


@pytest.mark.parametrize(
    "declared",
    [
        {"TrainingArguments": "transformers/training_args.py", "GRPOConfig": "trl/trainer/grpo_config.py"},
        {"TrainingArguments": "transformers/absent.py"},
        {"Absent": "transformers/training_args.py"},
    ],
    ids=["derived from another class", "no such file", "no such class"],
)
def test_fields_of_a_release_that_declares_them_elsewhere_are_imported(monkeypatch, declared):
    names = words.fields().keys()
    monkeypatch.setattr(words, "_DECLARED", declared)
    words.fields.cache_clear()
    try:
        assert words.fields() == dict.fromkeys(names, "")
    finally:
        words.fields.cache_clear()


def test_processes_get_all_words_but_those_of_accelerate(folder):
    line = [
        "recipe.yaml",
        "--num_processes",
        "2",
        "--mu",
        "1",
        "--cpu",
        "--plan",
        "--debug",
        "--report_levels",
        "a",
        "b",
    ]
    read = words.read_words(line)
    assert read.of_accelerate == ["--num_processes", "2", "--cpu"]
    assert read.of_training == ["recipe.yaml", "--mu", "1", "--plan", "--debug", "--report_levels", "a", "b"]
    assert read.of_fields == ["--mu", "1", "--report_levels", "a", "b"]


def test_a_number_is_what_its_declaration_says():
    assert number_problem("x", "float | None", "1e-4") is None
    assert (
        number_problem("x", "Annotated[int, COUNT]", "0") == "x=0 is not allowed. Set `x` to an integer of at least 1."
    )
    assert number_problem("x", "int", "1.5") == "x='1.5' is not allowed. Set `x` to an integer."
    assert number_problem("x", "str | float", "many") is None
