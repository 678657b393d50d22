"""Every shipped recipe trains for two optimizer steps, on a CPU, with a small model where its own is not here."""

import gzip
import json
import math
import shutil
from pathlib import Path

import pytest
from helpers import DEVICE_FIELDS
from transformers import AutoTokenizer

from opo_trl.command.recipe import read
from opo_trl.command.train import main
from opo_trl.data.arithmetic import make_problems


ROOT = Path(__file__).resolve().parents[2] / "recipes"
ALL = sorted(path for path in ROOT.rglob("*.yaml") if path.parent.name != "accelerate")
EMBEDDED = [path for path in ALL if path.relative_to(ROOT).parts[0] in ("arithmetic", "reasoning_gym")]
PIVOTS = [path for path in ALL if path.name == "pivots.yaml"]  # their data are made first: tests/reuse/test_pivots.py
REST = [path for path in ALL if path not in EMBEDDED + PIVOTS]
# What makes a step small, and runs without a GPU or a server.
SMALL = {"max_completion_length": 4, "validation_size": 2, "report_size": 2, "save_strategy": "no", "max_steps": 2}
SMALL |= {"gradient_checkpointing": "false", "dtype": "float32", "per_device_train_batch_size": 12}


def train(path: Path, output: Path, **fields) -> list[dict]:
    recipe = read(["--config", str(path)]).as_stored
    steps = recipe.get("steps_per_generation", 1) // recipe.get("gradient_accumulation_steps", 1)
    fields = {**DEVICE_FIELDS, **SMALL, "gradient_accumulation_steps": 1, "output_dir": output, **fields}
    fields |= {"use_vllm": "false", "steps_per_generation": max(steps, 1), "num_generations": 6}
    if "rollouts" in recipe:
        fields |= {"rollouts": output / "rows.jsonl", "rollouts_model": recipe["model_name_or_path"]}
        rows = [
            {"prompt": row["problem"], "completion": text, "reward": float(text == row["solution"])}
            for row in [*make_problems("train", ["Level 1"])][:8]
            for text in [row["solution"], "1", "2"] * 2
        ]
        fields["rollouts"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    assert main(["--config", str(path), *argv]) == 0
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [entry for entry in log if "grad_norm" in entry]


def check(log: list[dict]) -> None:
    assert [entry["step"] for entry in log] == [1, 2]
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in log)


@pytest.mark.parametrize("path", EMBEDDED, ids=lambda path: str(path.relative_to(ROOT)))
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
        folders[name] = tmp_path_factory.mktemp(name)
        for split in ("train", "test"):
            with gzip.open(shared_data / name / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
                rows = [line for line in file if name == "gsm8k" or '"Level 3"' in line or '"Level 4"' in line]
            (folders[name] / f"{split}.jsonl").write_text("".join(sorted(rows, key=len)[:100]), encoding="utf-8")
    return folders


@pytest.fixture(scope="module")
def model(shared_data, tiny_model, tmp_path_factory):
    """A tiny model that reads bytes, with Qwen3's chat template."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("model"), dirs_exist_ok=True)
    template = AutoTokenizer.from_pretrained(shared_data / "Qwen3-1.7B").chat_template
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))  # bytes are many
    return folder


@pytest.mark.parametrize("path", REST, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipe_of_another_model(path, tmp_path, model, some_of):
    fields = {"model_name_or_path": model, "attn_implementation": "sdpa"}
    name = "gsm8k" if "gsm8k" in path.parts else "math"
    if "smollm2-135m" not in path.parts:
        fields["dataset_name"] = some_of[name] / "train.jsonl" if path.name == "own_data.yaml" else some_of[name]
    if "overlong_cache" in path.read_text():
        fields["overlong_cache"] = 2
    if name == "gsm8k":  # a folder has no configurations
        own = ("dataset_config:", "accelerate_config:")
        text = "".join(line for line in path.open(encoding="utf-8") if not line.startswith(own))
        path = tmp_path / "some.yaml"
        path.write_text(text, encoding="utf-8")
    check(train(path, tmp_path / "run", **fields))
