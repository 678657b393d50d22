"""The recipe for four GPUs, with ZeRO-3 and LoRA, by `opo-trl train` on two pretend ones; tests/with_vllm has vLLM."""

import re
import sys

import pytest
from device_fields import RECIPES
from device_processes import HERE, with_devices
from safetensors.torch import load_file
from started_programs import environment, run_to_its_end
from tiny import save_recipe_without, save_short_problems

from opo_trl.checks.files import read_lines


pytestmark = pytest.mark.slow

RECIPE = RECIPES / "qwen3-1.7b" / "gsm8k" / "four_gpus.yaml"
SMALLER = {
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "max_completion_length": 8,
    "max_steps": 8,  # of which the first pass has two
    "use_vllm": "false",
    "reward_funcs": "scripted_rollouts.even_tokens",  # a tiny model is never right
    "validation_size": 2,
    "validation_steps": 4,
    "report_size": 2,
    "save_strategy": "no",
}


def test_recipe_trains_an_adapter_under_zero3_and_its_plan_is_that_of_a_laptop(
    library, shared_data, tiny_model, tmp_path
):
    data = save_short_problems(shared_data / "gsm8k", tmp_path / "gsm8k")
    recipe = save_recipe_without(RECIPE, tmp_path, "dataset_config", "accelerate_config")
    fields = {**SMALLER, "model_name_or_path": tiny_model, "dataset_name": data, "output_dir": tmp_path / "run"}
    fields["accelerate_config"] = RECIPES / "accelerate" / "zero3.yaml"
    command = [sys.executable, "-m", "opo_trl.command.cli", "train", recipe, "--num_processes", "2"]
    for name, value in fields.items():
        command += [f"--{name}", str(value)]
    on_devices = environment(DS_ACCELERATOR="cuda", **with_devices(2, library))
    status, printed = run_to_its_end(command, on_devices, limit=900)
    assert status == 0, printed[-6000:]
    log = [entry for entry in read_lines(tmp_path / "run" / "log.jsonl") if "grad_norm" in entry]
    assert [entry["step"] for entry in log] == list(range(1, 9))
    assert log[0]["completions/generated"] == 2 * 4 * 6
    assert all(entry["grad_norm"] > 0 for entry in log)
    adapter = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert all(weight.abs().max() > 0 for name, weight in adapter.items() if "lora_B" in name)
    plan = (tmp_path / "run" / "plan.txt").read_text()
    assert "(zero3 over 2; " in plan
    only_plan = [*command, "--plan", "--output_dir", str(tmp_path / "another")]
    status, planned = run_to_its_end(only_plan, environment(HERE.parent), limit=600)
    assert status == 0, planned[-6000:]
    _, marker, planned = planned.partition("OPO training plan\n")
    of_device = r" +fits, with 10% of .*\n"
    assert re.sub(of_device, "", marker + planned) == re.sub(of_device, "", plan)
