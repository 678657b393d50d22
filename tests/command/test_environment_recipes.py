"""Recipes that name tools and an environment: what is checked before a run, and a game (`guessing_game`) to train."""

import json
from pathlib import Path

import pytest
import yaml
from device_fields import DEVICE_FIELDS
from guessing_game import Guessing, games

from opo_trl.checks.files import read_json, read_lines
from opo_trl.command.train import main, prepare


RECIPES = Path(__file__).resolve().parents[2] / "recipes"
GAME = {
    "instruction": "",
    "environment_factory": "guessing_game.Guessing",
    "max_tool_calling_iterations": 6,
    "reward_funcs": [],  # the environment's get_reward
    "max_completion_length": 50,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "num_iterations": 2,
    "max_staleness": 1,
    "max_completions": 16,
    "validation_size": 4,
    "validation_steps": 2,
    "report_levels": ["all"],
    "report_size": 12,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
}


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


def found_at_all(completions, **columns) -> list[float]:
    rewards = []
    for turns in completions:
        contents = [message["content"] for message in turns]
        rewards.append(float("right" in contents))
    return rewards


def make_game() -> Guessing:
    return Guessing()


@pytest.fixture
def data(tmp_path) -> str:
    for split, first in (("train", 0), ("test", 100)):
        lines = [f"{json.dumps(row)}\n" for row in games(first, 40)]
        file = tmp_path / f"{split}.jsonl"
        file.write_text("".join(lines))
    return str(tmp_path)


@pytest.fixture
def arguments(player, data, tmp_path):
    """Makes the command line of a recipe of the game, with other fields."""

    def make(recipe: dict = GAME, **fields) -> list[str]:
        places = {"model_name_or_path": player, "dataset_name": data, "output_dir": str(tmp_path / "run")}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**recipe, **places, **DEVICE_FIELDS, **fields}))
        return ["--config", str(path)]

    return make


def named(name: str) -> str:
    return f"test_environment_recipes.{name}"


def test_game_is_trained_from_its_recipe(arguments, tmp_path):
    assert main(arguments()) == 0
    run = tmp_path / "run"
    log = read_lines(run / "log.jsonl")
    steps = [entry for entry in log if "grad_norm" in entry]
    assert [entry["opo/pass"] for entry in steps] == [1, 2, 1, 2]
    first = steps[0]
    assert first["tools/call_frequency"] > 2
    assert first["reward"] == first["rewards/Guessing/mean"]
    summary = read_json(run / "summary.json")
    for time in ("before", "after"):
        sampled = summary[time]["all"]["sampled"]
        assert sampled["scored"] == 12
    completions = read_lines(run / "completions.jsonl")
    n_calls = 0
    for line in completions:
        calling = [message for message in line["completion"] if message.get("tool_calls")]
        n_calls += len(calling)
    assert n_calls > len(completions) > 6


def test_functions_are_tools_and_a_factory_makes_environments(arguments):
    fields = {
        "tools": [named("add")],
        "environment_factory": named("make_game"),
        "reward_funcs": [named("found_at_all")],
    }
    trainer = prepare(arguments(**fields)).trainer
    assert [tool.__name__ for tool in trainer.tools] == ["add", "guess"]
    assert trainer.reward_func_names == ["found_at_all", "Guessing"]


def test_mistake_is_named_before_any_work_starts(arguments, tmp_path):
    message = r"need conversations, but the prompts are text.*Set `prompt_style` to 'chat'"
    with pytest.raises(ValueError, match=message):
        prepare(arguments(prompt_style="plain"))
    files = (tmp_path / "run").rglob("*.*")
    assert not any(files)
