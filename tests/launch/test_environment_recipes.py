"""Recipes that name tools and an environment: what is checked before a run, and the recipes of the guessing game."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from helpers import DEVICE_FIELDS

from opo_trl.checks.files import read_json, read_lines
from opo_trl.data.guessing import Guessing
from opo_trl.data.models import EMBEDDED_MODELS
from opo_trl.evaluate import evaluate
from opo_trl.train import main, prepare


ROOT = Path(__file__).resolve().parents[2] / "recipes"
GAME = ROOT / "guessing" / "opo.yaml"
QWEN = ROOT / "qwen3-1.7b" / "guessing" / "opo.yaml"
SMALL = {
    "max_completions": 48,
    "validation_size": 6,
    "validation_steps": 4,
    "report_size": 12,
    "max_staleness": 1,
}


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


def undescribed(a, b):
    return a + b


def guess(number: int) -> str:
    """
    Has the name of the game's tool.

    Args:
        number: not used.
    """
    return "never called"


def found_at_all(completions, **columns) -> list[float]:
    return [float("right" in [message["content"] for message in turns]) for turns in completions]


def without_columns(completions, prompts, completion_ids, trainer_state, log_extra, log_metric, level, type, solution):
    return [0.0] * len(completions)


class NoReset:
    """Not an environment."""


class Silent:
    """An environment without tools and without a reward."""

    def reset(self, **row):
        return None


class NeedsArgument(Guessing):
    def __init__(self, size):
        self.size = size


class OtherRow(Guessing):
    def reset(self, difficulty):
        pass


class Undescribed(Guessing):
    def look(self, place):
        return place


def make_game() -> Guessing:
    return Guessing()


OF_OPO = (
    *("alpha", "mu", "adaptive_temperature", "escort_temperature", "anchor_correction", "drive_scaling", "positivity"),
    *("log_ratio_reduction", "log_ratio_clamp", "ratio_form"),
)
# What asynchronous training has instead.
OF_OPO_ROLLOUT = ("steps_per_generation", "adaptive_temperature", "anchor_correction", "beta", "max_completions")
OF_ASYNC = {"in_process_staleness": 0, "token_budget": 0, "num_iterations": 1}


def changed(folder: Path, without: Sequence[str] = (), **fields) -> str:
    """Path of the game's recipe with other fields."""
    recipe = {name: value for name, value in yaml.safe_load(GAME.read_text()).items() if name not in without}
    recipe |= {**DEVICE_FIELDS, "output_dir": str(folder / "run"), **fields}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return str(folder / "recipe.yaml")


def arguments(recipe: Path, **fields) -> list[str]:
    fields = {**DEVICE_FIELDS, **fields}
    return ["--config", str(recipe), *(part for name, value in fields.items() for part in (f"--{name}", str(value)))]


def named(name: str) -> str:
    return f"test_environment_recipes.{name}"


# Runs


def test_game_is_trained_from_its_recipe(tmp_path):
    assert main(arguments(GAME, output_dir=tmp_path / "run", **SMALL)) == 0
    log = [line for line in read_lines(tmp_path / "run" / "log.jsonl") if "grad_norm" in line]
    assert [line["opo/pass"] for line in log] == [1, 2, 3, 4]
    assert log[0]["tools/call_frequency"] > 2
    assert log[0]["reward"] == log[0]["rewards/Guessing/mean"]
    plan = (tmp_path / "run" / "plan.txt").read_text()
    assert "tools      guess (environment: Guessing); the model may call them in " in plan
    assert "; calls and results count as completion tokens, of which there are at most " in plan
    summary = read_json(tmp_path / "run" / "summary.json")
    assert {*summary["after"]} == {"Level 4", "Level 5"}
    assert summary["before"]["Level 5"]["sampled"]["scored"] == 12
    kept = read_lines(tmp_path / "run" / "completions.jsonl")
    calls = sum(bool(message.get("tool_calls")) for line in kept for message in line["completion"])
    assert calls > len(kept) > 6


SMALLER = {"bf16": "false", "dtype": "float32", "use_vllm": "false", "use_peft": "true"}
SMALLER |= {"gradient_checkpointing": "false"}
FEW = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 1}
FEW |= {"num_generations": 2, "max_completions": 4, "learning_rate": 1e-3, "validation_size": 1, "report_size": 1}


@pytest.mark.slow
def test_qwen3_recipe_trains_with_the_real_template(small_qwen3, tmp_path):
    """A random model calls no tool, so a reward that it can improve is in front of the environment's."""
    sizes = {**FEW, "max_completion_length": 8, "validation_steps": 4}
    fields = {"model_name_or_path": small_qwen3, "output_dir": tmp_path / "run"}
    rewards = ("--reward_funcs", "test_train.ascii_reward", "--report_levels", "Level 5")
    assert main([*arguments(QWEN, **SMALLER, **sizes, **fields), *rewards]) == 0
    log = [line for line in read_lines(tmp_path / "run" / "log.jsonl") if "grad_norm" in line]
    assert [line["opo/pass"] for line in log] == [1, 2, 3, 4]
    assert all(line["grad_norm"] > 0 for line in log)
    assert {line["rewards/Guessing/mean"] for line in log if "reward" in line} == {0.0}
    (prompt,) = read_lines(tmp_path / "run" / "completions.jsonl")[0]["prompt"]
    assert prompt["content"].startswith("Find the number from ")
    assert "Call the tool guess once per message" in prompt["content"]


def test_game_is_played_through_the_real_template(small_qwen3, tmp_path, monkeypatch):
    """A player who halves what is left always wins: its calls reach the environment, and only they are trained."""
    fields = {"model_name_or_path": small_qwen3, "output_dir": tmp_path / "run"}
    trainer = prepare(arguments(QWEN, **SMALLER, **FEW, **fields)).trainer
    tokenizer, heard = trainer.processing_class, []

    def halve(prompt_ids, *_, **__):
        turns = []
        for text in tokenizer.batch_decode(prompt_ids):
            said = text.rpartition("<tool_response>")[2] if "<tool_response>" in text else text
            heard.append(said)
            low, high = map(int, re.findall(r"(\d+) to (\d+)", said)[-1] if " to " in said else (0, 0))
            call = json.dumps({"name": "guess", "arguments": {"number": (low + high) // 2}})
            written = f"<tool_call>\n{call}\n</tool_call>" if high else "I have it."
            turns.append(tokenizer(written + "<|im_end|>")["input_ids"])
        return turns, None

    monkeypatch.setattr(trainer, "_generate_single_turn", halve)
    rows = [dict(trainer.train_dataset[i // 2]) for i in range(4)]
    assert evaluate(trainer, trainer.train_dataset.select(range(12))).correct == 12
    assert any(said.startswith("\nhigher: ") for said in heard)
    rollout = trainer._generate_and_score_completions(rows)
    assert rollout["rewards_per_func"].flatten().tolist() == [1.0] * 4
    columns = ("completion_ids", "tool_mask", "completion_mask")
    for ids, own, mask in zip(*(rollout[column] for column in columns), strict=True):
        model_wrote = tokenizer.decode(ids[(own * mask).bool()])
        template_wrote = tokenizer.decode(ids[((1 - own) * mask).bool()])
        assert model_wrote.count("<tool_call>") == template_wrote.count("<tool_response>") >= 1
        assert model_wrote.endswith("I have it.<|im_end|>")
        assert "<tool_response>" not in model_wrote
        assert "<think>" not in model_wrote
        assert "guess" not in template_wrote


def test_functions_are_tools_and_a_factory_makes_environments(tmp_path):
    fields = {"tools": named("add"), "environment_factory": named("make_game"), "output_dir": tmp_path / "run"}
    trainer = prepare([*arguments(GAME, **fields), "--reward_funcs", named("found_at_all")]).trainer
    assert [tool.__name__ for tool in trainer.tools] == ["add", "guess"]
    assert trainer.reward_func_names == ["found_at_all", "Guessing"]


def test_environment_of_another_method(tmp_path):
    trainer = prepare(["--config", changed(tmp_path, trainer="grpo", without=OF_OPO)]).trainer
    assert [tool.__name__ for tool in trainer.tools] == ["guess"]
    assert trainer.reward_func_names == ["Guessing"]


# What cannot be run


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": ["no_tools.add"]}, r"tools='no_tools.add' cannot be imported .*such as my_tools.calculate"),
        ({"tools": [named("undescribed")]}, r"tools=.*undescribed' cannot be described .*a docstring with an `Args:`"),
        ({"tools": [named("NoReset")]}, r"is a class, not a function.*is an `environment_factory`"),
        ({"tools": [named("guess")]}, r"offers 'guess' twice, .*Rename one"),
        ({"environment_factory": "no_env.Game"}, r"environment_factory='no_env.Game' cannot be imported"),
        ({"environment_factory": named("SMALL")}, r"is not a function\).*the dotted path of a class"),
        ({"environment_factory": named("NeedsArgument")}, r"cannot be created \(TypeError.*called without arguments"),
        ({"environment_factory": named("NoReset")}, r"a NoReset without a method `reset`"),
        ({"environment_factory": named("Undescribed")}, r"method 'look' cannot be described .*not tools with `_`"),
        ({"environment_factory": named("OtherRow")}, r"`reset` cannot be called: .*the columns prompt, solution"),
        ({"environment_factory": named("Silent")}, r"leaves no reward: Silent has no method `get_reward`"),
        ({"prompt_style": "plain"}, r"needs conversations, but prompt_style='plain'.*Set `prompt_style` to 'chat'"),
        ({"reward_funcs": [named("without_columns")]}, r"cannot be called: .*'environments'.*and the columns"),
        ({"reward_weights": [1.0]}, r"reward_weights=\[1.0\] does not fit 0 rewards"),
        ({"max_prompt_length": 5}, r"all 1024 rows are longer"),
        ({"max_completion_length": 128}, r"max_completion_length=128 does not fit"),
        ({"model_name_or_path": "arithmetic"}, r"'.*arithmetic.*': its chat template does not render calls of tools"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_mistake_is_named_before_any_work_starts(tmp_path, fields, says):
    with pytest.raises(ValueError, match=says):
        prepare(["--config", changed(tmp_path, **fields)])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("without", "fields", "says"),
    [
        (["reward_funcs"], {}, r"environment_factory=.* needs `reward_funcs` to be set.*`reward_funcs: \[\]`"),
        (["environment_factory"], {}, r"reward_funcs=\[\] leaves no reward: there is no `environment_factory`"),
        (
            ["environment_factory"],
            {"reward_funcs": ["accuracy_reward"]},
            r"max_tool_calling_iterations=5 has no effect without tools",
        ),
        (
            [*OF_OPO_ROLLOUT],
            {"trainer": "async_opo", **OF_ASYNC},
            r"environment_factory=.* not possible with trainer: async_opo",
        ),
    ],
)
def test_fields_that_need_each_other(tmp_path, without, fields, says):
    with pytest.raises(ValueError, match=says):
        prepare(["--config", changed(tmp_path, without=without, **fields)])


def test_template_whose_calls_cannot_be_parsed_is_rejected(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODELS["guessing"], model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["response_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is none whose calls TRL can parse, and the tokenizer has no"):
        prepare(["--config", changed(tmp_path, model_name_or_path=str(model))])
