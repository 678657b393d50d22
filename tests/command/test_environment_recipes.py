"""Recipes that name tools and an environment: what is checked before a run, and a game (`guessing`) to train."""

import json
from pathlib import Path

import pytest
import yaml
from guessing import Guessing, games
from helpers import DEVICE_FIELDS

from opo_trl.checks.files import read_json, read_lines
from opo_trl.command.train import main, prepare


RECIPES = Path(__file__).resolve().parents[2] / "recipes"
GAME = {
    "instruction": "",
    "environment_factory": "guessing.Guessing",
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
    return [float("right" in [message["content"] for message in turns]) for turns in completions]


def make_game() -> Guessing:
    return Guessing()


@pytest.fixture
def data(tmp_path) -> str:
    for split, first in (("train", 0), ("test", 100)):
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in games(first, 40)))
    return str(tmp_path)


@pytest.fixture
def arguments(player, data, tmp_path):
    """Makes the command line of a recipe of the game, with other fields."""

    def make(recipe: dict = GAME, **fields) -> list[str]:
        recipe = recipe | {"model_name_or_path": player, "dataset_name": data, "output_dir": str(tmp_path / "run")}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | DEVICE_FIELDS | fields))
        return ["--config", str(tmp_path / "recipe.yaml")]

    return make


def named(name: str) -> str:
    return f"test_environment_recipes.{name}"


def test_game_is_trained_from_its_recipe(arguments, tmp_path):
    assert main(arguments()) == 0
    log = [line for line in read_lines(tmp_path / "run" / "log.jsonl") if "grad_norm" in line]
    assert [line["opo/pass"] for line in log] == [1, 2, 1, 2]
    assert log[0]["tools/call_frequency"] > 2
    assert log[0]["reward"] == log[0]["rewards/Guessing/mean"]
    summary = read_json(tmp_path / "run" / "summary.json")
    for time in ("before", "after"):
        assert summary[time]["all"]["sampled"]["scored"] == 12
    kept = read_lines(tmp_path / "run" / "completions.jsonl")
    calls = sum(bool(message.get("tool_calls")) for line in kept for message in line["completion"])
    assert calls > len(kept) > 6


def test_functions_are_tools_and_a_factory_makes_environments(arguments):
    fields = {"tools": [named("add")], "environment_factory": named("make_game")}
    trainer = prepare(arguments(**fields, reward_funcs=[named("found_at_all")])).trainer
    assert [tool.__name__ for tool in trainer.tools] == ["add", "guess"]
    assert trainer.reward_func_names == ["found_at_all", "Guessing"]


def test_mistake_is_named_before_any_work_starts(arguments, tmp_path):
    said = r"need conversations, but the prompts are text.*Set `prompt_style` to 'chat'"
    with pytest.raises(ValueError, match=said):
        prepare(arguments(prompt_style="plain"))
    assert not any((tmp_path / "run").rglob("*.*"))
