"""The page on migrating: its fields exist, its numbers are those of a run, and its code runs as it stands."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from device_fields import SMALL, USE_CPU
from trl import ModelConfig

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.command.arguments import OPOScriptArguments
from opo_trl.command.named_rewards import load_reward
from opo_trl.command.recipe import parse
from opo_trl.command.train import main


ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
LIBRARIES = ["verl", "Unsloth"]
FIELDS = {field.name for kind in (OPOConfig, OPOScriptArguments, ModelConfig) for field in fields(kind)}


def section(library: str) -> str:
    return PAGE.split(f"\n## From {library}\n")[1].split("\n## ")[0]


def blocks(library: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", section(library), flags=re.DOTALL | re.MULTILINE)


def rows(library: str) -> list[list[str]]:
    """Rows of the tables whose second column has our fields."""
    table, ours = [], False
    for line in section(library).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            ours = False
        elif cells[1] == "opo_trl":
            ours = True
        elif ours and set(cells[0]) != {"-"}:
            table.append(cells)
    return table


@pytest.mark.pages
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_field_in_the_tables_exists(library):
    table = rows(library)
    assert len(table) > 12
    for theirs, ours, *_ in table:
        named = re.findall(r"`(\w+)(?::[^`]*)?`", ours)
        assert named or ours == "–", theirs
        assert set(named) <= FIELDS, theirs


@pytest.mark.parametrize("library", LIBRARIES)
def test_values_in_the_tables_are_accepted(library, tmp_path):
    """Each `field: value` of the middle column, in a recipe of its own."""
    for _, ours, *_ in rows(library):
        settings = {}
        for text in re.findall(r"`(\w+: [^`…]+)`", ours):
            settings |= {name: value for name, value in yaml.safe_load(text).items() if settings.get(name) is None}
        if settings:
            recipe = tmp_path / "recipe.yaml"
            base = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": str(tmp_path)}
            recipe.write_text(yaml.safe_dump({**base, "bf16": False, "use_cpu": True, **settings}))
            parse(["--config", str(recipe)])


# verl


def test_numbers_of_verl_are_those_of_a_run(tiny_model, tmp_path):
    """8 prompts × 2 completions, mini-batches of 4 prompts, 2 epochs: 4 optimizer steps for 16 completions."""
    names: dict = {}
    exec(blocks("verl", "python")[0], names)
    converted = names["from_verl"](train_batch_size=8, n=2, ppo_mini_batch_size=4, ppo_epochs=2, gpus=1, micro_batch=2)
    assert converted["gradient_accumulation_steps"] * converted["per_device_train_batch_size"] == 4 * 2
    args = OPOConfig(
        output_dir=str(tmp_path),
        **converted,
        **{**SMALL, "max_steps": 8, "max_completion_length": 4},
    )
    prompts = Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(16)]})

    def length(completions, **columns):
        return [float(len(completion)) for completion in completions]

    trainer = OPOTrainer(tiny_model, length, args, prompts)
    trainer.train()
    rollouts = [entry for entry in trainer.state.log_history if "completions/generated" in entry]
    assert [(entry["step"], entry["completions/generated"]) for entry in rollouts] == [(1, 16), (5, 32)]


def test_parquet_files_and_rewards_of_verl_train_as_they_are(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("verl_data").mkdir()
    data = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i}+1="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(8)
    ]
    for split in ("train", "test"):
        Dataset.from_list(data).to_parquet(f"verl_data/{split}.parquet")
    Path("verl_rewards.py").write_text(blocks("verl", "python")[1])
    settings = {
        **yaml.safe_load(blocks("verl", "yaml")[0]),
        **{"model_name_or_path": tiny_model, "output_dir": "run", "max_steps": 1, "max_completion_length": 4},
        **{"num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
        **{"use_cpu": USE_CPU, "bf16": False, "report_to": "none", "gradient_checkpointing": False},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(settings))
    assert main(["--config", "recipe.yaml"]) == 0
    assert "rewards/verl_reward/mean" in Path("run/log.jsonl").read_text()

    reward = load_reward("verl_rewards.verl_reward")
    columns = {name: [row[name] for row in data[:2]] for name in ("data_source", "reward_model", "extra_info")}
    conversation = [[{"role": "assistant", "content": text}] for text in ("so 1", "so 1")]
    assert reward(conversation, prompts=[], completion_ids=[], **columns) == [1.0, 0.0]
    assert reward(["1", "2 "], **columns) == [1.0, 1.0]
