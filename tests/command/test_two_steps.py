"""Every shipped recipe trains for two optimizer steps, on a CPU, with a small model where its own is not here."""

import gzip
import json
import math
import shutil
from pathlib import Path

import pytest
from device_fields import DEVICE_FIELDS
from transformers import AutoTokenizer

from opo_trl.checks.files import read_lines
from opo_trl.command.recipe import read
from opo_trl.command.train import main
from opo_trl.data.arithmetic import make_problems


ROOT = Path(__file__).resolve().parents[2] / "recipes"
ALL = sorted(path for path in ROOT.rglob("*.yaml") if path.parent.name != "accelerate")
EMBEDDED = [path for path in ALL if path.relative_to(ROOT).parts[0] in ("arithmetic", "reasoning_gym")]
# Model or data of these are made first: tests/reuse/test_pivots.py, tests/command/test_agent_recipes.py
MADE_FIRST = [path for path in ALL if path.name == "pivots.yaml" or path.parent.name == "agent"]
REST = [path for path in ALL if path not in EMBEDDED + MADE_FIRST]
# Of each experiment, whose recipes differ only in the method (tests/command/test_recipes.py), one method by default.
QUICK_METHODS = {
    "arithmetic/experiment1": "gspo",
    "arithmetic/experiment2": "opo",
    "qwen3-1.7b/experiment1": "grpo",
    "qwen3-1.7b/experiment1_lora": "opo",
    "qwen3-1.7b/experiment2": "dapo",
}
TRAINED_ELSEWHERE = ("arithmetic/opo.yaml", "own_data.yaml")  # by default too, in test_train.py
# What makes a step small, and runs without a GPU or a server.
SMALL = {
    "max_completion_length": 4,
    "validation_size": 2,
    "report_size": 2,
    "save_strategy": "no",
    "max_steps": 2,
    "gradient_checkpointing": "false",
    "gradient_accumulation_steps": 1,
    "dtype": "float32",
    "per_device_train_batch_size": 12,
    "num_generations": 6,
    "use_vllm": "false",
}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def cases(paths: list[Path]) -> list:
    """Recipes as cases of a test; those whose parts others cover are slow."""
    found = []
    for path in paths:
        method = QUICK_METHODS.get(named(path.parent), path.stem)
        is_slow = path.stem != method or named(path) in TRAINED_ELSEWHERE
        found.append(pytest.param(path, id=named(path), marks=[pytest.mark.slow] * is_slow))
    return found


def write_completions(path: Path) -> None:
    """Six completions of each of eight problems; two or more of them are right."""
    lines = []
    problems = list(make_problems("train", ["Level 1"]))
    for row in problems[:8]:
        solution = row["solution"]
        for text in [solution, "1", "2"] * 2:
            completion = {"prompt": row["problem"], "completion": text, "reward": float(text == solution)}
            lines.append(json.dumps(completion) + "\n")
    path.write_text("".join(lines))


def train(path: Path, output: Path, **fields) -> list[dict]:
    recipe = read(["--config", str(path)]).as_stored
    steps = recipe.get("steps_per_generation", 1) // recipe.get("gradient_accumulation_steps", 1)
    fields = {**DEVICE_FIELDS, **SMALL, "output_dir": output, "steps_per_generation": max(steps, 1), **fields}
    if "rollouts" in recipe:
        rollouts = output / "rows.jsonl"
        write_completions(rollouts)
        fields["rollouts"] = rollouts
        fields["rollouts_model"] = recipe["model_name_or_path"]
    argv = ["--config", str(path)]
    for name, value in fields.items():
        argv += [f"--{name}", str(value)]
    assert main(argv) == 0
    return [entry for entry in read_lines(output / "log.jsonl") if "grad_norm" in entry]


def check(log: list[dict]) -> None:
    assert [entry["step"] for entry in log] == [1, 2]
    for entry in log:
        assert math.isfinite(entry["loss"])
        assert math.isfinite(entry["grad_norm"])


@pytest.mark.parametrize("path", cases(EMBEDDED))
def test_recipe_of_an_embedded_model(path, tmp_path):
    if "reasoning_gym" in path.parts:
        pytest.importorskip("reasoning_gym")
    log = train(path, tmp_path, max_completion_length=32, per_device_train_batch_size=24)
    check(log)
    assert any(entry["grad_norm"] > 0 for entry in log)


@pytest.fixture(scope="module")
def some_of(shared_data, tmp_path_factory):
    """The shortest rows of MATH's levels 3 and 4, and of GSM8K, in folders."""
    folders = {}
    for name in ("math", "gsm8k"):
        folder = tmp_path_factory.mktemp(name)
        for split in ("train", "test"):
            with gzip.open(shared_data / name / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
                rows = [line for line in file if name == "gsm8k" or '"Level 3"' in line or '"Level 4"' in line]
            rows.sort(key=len)
            shortest = "".join(rows[:100])
            (folder / f"{split}.jsonl").write_text(shortest, encoding="utf-8")
        folders[name] = folder
    return folders


@pytest.fixture(scope="module")
def model(shared_data, tiny_model, tmp_path_factory):
    """A tiny model that reads bytes, with Qwen3's chat template."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("model"), dirs_exist_ok=True)
    template = AutoTokenizer.from_pretrained(shared_data / "Qwen3-1.7B").chat_template
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = 4096  # bytes are many
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("path", cases(REST))
def test_recipe_of_another_model(path, tmp_path, model, some_of):
    fields = {"model_name_or_path": model, "attn_implementation": "sdpa"}
    name = "gsm8k" if "gsm8k" in path.parts else "math"
    if path.name == "own_data.yaml":
        fields["dataset_name"] = some_of[name] / "train.jsonl"
    elif "smollm2-135m" not in path.parts:
        fields["dataset_name"] = some_of[name]
    if "overlong_cache" in path.read_text():
        fields["overlong_cache"] = 2
    if name == "gsm8k":  # a folder has no configurations
        of_the_hub = ("dataset_config:", "accelerate_config:")
        lines = [line for line in path.open(encoding="utf-8") if not line.startswith(of_the_hub)]
        path = tmp_path / "some.yaml"
        path.write_text("".join(lines), encoding="utf-8")
    check(train(path, tmp_path / "run", **fields))
