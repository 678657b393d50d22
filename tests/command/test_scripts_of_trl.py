"""Command lines and YAML files of `trl grpo` train under `opo-trl train`."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from device_fields import USE_CPU
from trl.scripts import grpo

from opo_trl.checks.files import read_lines
from opo_trl.command import recipe, train, words
from opo_trl.command.named_rewards import load_rewards


ROWS = []
for number in range(12):
    question = [{"role": "user", "content": f"{number} + {number}?"}]
    ROWS.append({"prompt": question, "solution": f"${2 * number}$", "source": "sums"})
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
    data = tmp_path / "data"
    data.mkdir()
    for split, rows in (("train", ROWS[:8]), ("test", ROWS[8:])):
        lines = [f"{json.dumps(row)}\n" for row in rows]
        (data / f"{split}.jsonl").write_text("".join(lines))
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
    assert theirs - words.fields().keys() == {"streaming", "datasets", "test_split_size"}


def test_recipe_trains_as_it_stands(folder: Path, caplog):
    assert train.main(["--config", write(folder, RECIPE)]) == 0
    run = folder / "run"
    log = read_lines(run / "log.jsonl")
    first, second = [entry for entry in log if "loss" in entry]
    for name in ("accuracy_reward", "think_format_reward", "soft_overlong_punishment_reward", "length"):
        assert f"rewards/{name}/mean" in first
    evaluations = [entry for entry in log if "eval_reward" in entry]
    assert len(evaluations) == 2
    assert first["kl"] == 0  # beta acts
    assert second["opo/chi2"] >= 0
    plan = (run / "plan.txt").read_text()
    assert "DrGRPO, beta = 0.04, epsilon = 0.2, epsilon_high = 0.28" in plan
    assert "8 prompts of ./data (train): prompt_style: dataset" in plan
    recipe_of_run = run / "recipe.yaml"
    stored = yaml.safe_load(recipe_of_run.read_text())
    assert stored["loss_type"] == "dr_grpo"
    # What was stored trains again, to the bit.
    assert train.main(["--config", str(recipe_of_run), "--output_dir", "again"]) == 0
    adapter = (run / "adapter_model.safetensors").read_bytes()
    adapter_again = (folder / "again" / "adapter_model.safetensors").read_bytes()
    assert adapter == adapter_again


def test_reward_model_comes_first_as_in_trl(folder: Path):
    fields = {"reward_model_name_or_path": "./model", "reward_funcs": ["accuracy_reward", "my_rewards.length"]}
    weights = {"reward_weights": [3.0, 1.0, 2.0]}
    script, args, *_ = recipe.parse(["--config", write(folder, RECIPE | fields | weights)])
    *_, last_reward = load_rewards(script, args)
    assert last_reward == "./model"
    assert args.reward_weights == [1.0, 2.0, 3.0]
    fields = {name: value for name, value in RECIPE.items() if not name.startswith("reward_")}
    fields["reward_model_name_or_path"] = "./model"
    script, *_ = recipe.parse(["--config", write(folder, fields)])
    assert script.reward_funcs == []


def test_options_of_accelerate_in_a_recipe(folder: Path):
    path = write(folder, RECIPE | {"num_processes": 1, "cpu": True})
    arguments = recipe.read([path, "--num_machines", "1"])
    assert arguments.unknown == ["--num_machines", "1"]
    flags = {"cpu", "multi_gpu"}
    assert words.launch_words(arguments.launch, flags) == ["--cpu", "--num_processes=1"]
    assert words.launch_words({"cpu": "True", "multi_gpu": "no"}, flags) == ["--cpu"]
