"""Command lines and YAML files of `trl grpo` train under `opo-trl train`, and what has no meaning there is named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import USE_CPU
from transformers import AutoTokenizer
from trl.scripts import grpo

from opo_trl import train
from opo_trl.checks.files import read_json, read_lines
from opo_trl.launch import cli, recipe
from opo_trl.launch.data import load_data


ROWS = [
    {"prompt": [{"role": "user", "content": f"{i} + {i}?"}], "solution": f"${2 * i}$", "source": "sums"}
    for i in range(12)
]
# As public recipes of `trl grpo` look: fields of all four of its dataclasses, loss, evaluation, tracking and launch.
RECIPE = {
    "model_name_or_path": "./model",
    "dtype": "float32",
    "attn_implementation": "eager",
    "dataset_name": "./data",
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "reward_funcs": ["accuracy_reward", "think_format_reward", "get_soft_overlong_punishment", "my_rewards.length"],
    "reward_weights": [1.0, 0.5, 0.25, 0.125],
    "output_dir": "run",
    "learning_rate": "1.0e-6",
    "loss_type": "dr_grpo",
    "epsilon_high": 0.28,
    "beta": 0.04,
    "num_generations": 2,
    "max_completion_length": 4,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "use_peft": True,
    "lora_r": 4,
    "lora_target_modules": ["q_proj", "v_proj"],
    "max_steps": 2,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "no",
    "log_completions": False,
    "report_to": ["none"],
    "use_cpu": USE_CPU,
    "bf16": False,
    "disable_tqdm": True,
}
REWARDS = """
def length(completions, source, **kwargs):
    assert set(source) == {"sums"}
    return [float(len(completion[0]["content"])) for completion in completions]
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "data").mkdir()
    for split, rows in (("train", ROWS[:8]), ("test", ROWS[8:])):
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return tmp_path


def write(folder: Path, fields: dict) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields))
    return str(path)


def test_every_field_of_trls_script_is_one_here():
    theirs = {action.dest for action in grpo.make_parser()._actions} - {"help"}
    assert len(theirs) > 200
    assert theirs - recipe._fields("opo").keys() == {"streaming"}  # which has a message of its own
    assert theirs | {"accelerate_config"} >= recipe._fields_of_trl() - {"help"}


def test_recipe_trains_as_it_stands(folder: Path, caplog):
    assert train.main(["--config", write(folder, RECIPE)]) == 0
    log = read_lines(folder / "run" / "log.jsonl")
    steps = [entry for entry in log if "loss" in entry]
    assert len(steps) == 2
    for name in ("accuracy_reward", "think_format_reward", "soft_overlong_punishment_reward", "length"):
        assert f"rewards/{name}/mean" in steps[0]
    assert sum("eval_reward" in entry for entry in log) == 2
    assert steps[0]["kl"] == 0  # beta acts
    assert steps[1]["opo/chi2"] >= 0
    plan = (folder / "run" / "plan.txt").read_text()
    assert "DrGRPO, ratio per token, epsilon = 0.2, epsilon_high = 0.28" in plan
    assert "8 prompts of ./data (train): a prompt is its column 'prompt', unchanged" in plan
    assert (folder / "run" / "adapter_model.safetensors").is_file()
    stored = yaml.safe_load((folder / "run" / "recipe.yaml").read_text())
    assert (stored["trainer"], stored["loss_type"]) == ("opo", "dr_grpo")
    assert read_json(folder / "run" / "settings.json")["prompt_style_used"] == "dataset"
    # What was stored trains again, to the bit.
    again = ["--config", str(folder / "run" / "recipe.yaml"), "--output_dir", "again"]
    assert train.main(again) == 0
    weights = [(folder / run / "adapter_model.safetensors").read_bytes() for run in ("run", "again")]
    assert weights[0] == weights[1]


def test_bounds_of_a_loss_that_is_not_named_are_left_out_with_a_note(folder: Path, capsys):
    unnamed = {name: value for name, value in RECIPE.items() if name != "loss_type"}
    given = recipe.read(["--config", write(folder, unnamed)])
    assert "epsilon_high=0.28: it belongs to a loss of TRL's, which `loss_type` selects" in given.notes[0]
    assert "epsilon_high" not in given.as_stored
    # In a recipe with a field of this package, they are an error.
    assert train.main(["--config", write(folder, unnamed), "--mu", "0.3"]) == 2
    assert "epsilon_high=0.28 has no effect" in capsys.readouterr().err


def test_reward_model_comes_first_as_in_trl(folder: Path):
    fields = {"reward_model_name_or_path": "./model", "reward_funcs": ["accuracy_reward", "my_rewards.length"]}
    weights = {"reward_weights": [3.0, 1.0, 2.0]}
    _, args, _, stored = recipe.parse(["--config", write(folder, RECIPE | fields | weights)])
    assert args.reward_weights == stored["reward_weights"] == [1.0, 2.0, 3.0]
    _, args, _, _ = recipe.parse(["--config", write(folder, RECIPE | fields | weights | {"max_staleness": 0})])
    assert args.reward_weights == [3.0, 1.0, 2.0]
    only = {name: value for name, value in RECIPE.items() if not name.startswith("reward_")}
    script, *_ = recipe.parse(["--config", write(folder, only | {"reward_model_name_or_path": "./model"})])
    assert script.reward_funcs == []


def test_mixture_of_datasets(folder: Path):
    (folder / "more").mkdir()
    more = [
        {**row, "prompt": [{"role": "user", "content": f"What is {row['prompt'][0]['content']}"}]} for row in ROWS[:8]
    ]
    (folder / "more" / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in more))
    mixture = {"datasets": [{"path": "./data"}, {"path": "./more", "columns": ["prompt", "solution", "source"]}]}
    fields = {name: value for name, value in RECIPE.items() if name != "dataset_name"} | mixture
    script, args, *_ = recipe.parse(["--config", write(folder, fields | {"test_split_size": 4})])
    tokenizer = AutoTokenizer.from_pretrained("./model")
    data = load_data(script, args, tokenizer)
    assert len(data.training) == 12
    assert data.plan.startswith("12 prompts of ./data + ./more (train)")
    seen = {str(prompt) for prompt in data.training["prompt"]}
    assert len(data.evaluation) == 4
    assert not seen & {str(prompt) for prompt in data.evaluation["prompt"]}
    script, _, _, stored = recipe.parse(["--config", write(folder, fields | {"dataset_name": "./data"})])
    assert script.dataset_name is None
    assert "dataset_name" not in stored


def test_options_of_accelerate_in_a_recipe(folder: Path):
    given = recipe.read([write(folder, RECIPE | {"num_processes": 1, "cpu": True}), "--num_machines", "1"])
    assert given.launch == {"num_processes": "1", "cpu": "true"}
    assert given.unknown == ["--num_machines", "1"]
    assert recipe.launch_words({"cpu": "true", "multi_gpu": "false", "num_machines": None, "num_processes": "0"}) == [
        "--num_processes=0",
        "--cpu",
    ]


@pytest.mark.slow
def test_launch_with_options_of_accelerate_in_a_recipe(folder: Path):
    path = write(folder, RECIPE | {"num_processes": 1, "num_machines": 1, "mixed_precision": "no", "max_steps": 1})
    command = [sys.executable, "-m", "opo_trl.launch.cli", "train", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert yaml.safe_load((folder / "run" / "recipe.yaml").read_text())["num_processes"] == "1"


def test_mistaken_option_of_accelerate_is_named_in_one_line(folder: Path, capsys):
    assert cli.main(["train", write(folder, RECIPE | {"num_processes": "many"})]) == 2
    error = capsys.readouterr().err
    assert "num_processes: invalid int value: 'many'. It is an option of accelerate" in error
    assert error.count("\n") == 1


def test_best_checkpoint_is_loaded_at_the_end(folder: Path):
    best = {
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
    }
    assert train.main(["--config", write(folder, RECIPE | best)]) == 0
    state = read_json(folder / "run" / "checkpoint-2" / "trainer_state.json")
    assert state["best_model_checkpoint"].endswith(f"checkpoint-{state['best_global_step']}")


def test_first_split_decides_what_is_taken_for_what(folder: Path):
    rows = [{"problem": f"{i} + {i}", "prompt": "not this", "solution": str(2 * i)} for i in range(4)]
    (folder / "data" / "train.jsonl").write_text(
        "".join(f'{{"question": "{i}?", "answer": "{i}"}}\n' for i in range(8))
    )
    (folder / "data" / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    script, args, *_ = recipe.parse(["--config", write(folder, RECIPE)])
    tokenizer = AutoTokenizer.from_pretrained("./model")
    data = load_data(script, args, tokenizer)
    assert data.prompt_style == "chat"
    assert "problem is its column 'question'; solution is its column 'answer'" in data.plan
    assert data.evaluation[0]["prompt"][0]["content"].startswith("0 + 0\n\n")
