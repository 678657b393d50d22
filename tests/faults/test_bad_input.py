"""
One message before any work says what is wrong with a recipe, its data, model, rewards or folder.

Each case changes one thing in a small run that works, and ends with status 2 and one message that names it and the
fix, without a traceback unless `--debug` is given, and leaves every file unchanged.
"""

import dataclasses
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import yaml
from device_fields import USE_CPU
from safetensors.torch import load_file, save_file
from trl import GRPOConfig

from opo_trl import OPOConfig
from opo_trl.command import cli, train
from opo_trl.command.run_folder import KEPT


RECIPE = {
    "output_dir": "run",
    "model_name_or_path": "./model",
    "dtype": "float32",
    "dataset_name": "./data",
    "levels": ["Level 1", "Level 2"],
    "reward_funcs": ["my_rewards.length"],
    "reward_workers": 0,
    "num_generations": 2,
    "max_completion_length": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 1,
    "use_cpu": USE_CPU,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
}

ROWS = [
    {"problem": f"{i} + {i}", "level": f"Level {1 + i % 2}", "type": "sum", "solution": f"\\boxed{{{2 * i}}}"}
    for i in range(8)
]

REWARDS = """
def length(completions, **columns):
    return [float(len(completion[0]["content"])) for completion in completions]

def compare(completions, gold, **columns):
    return [0.0 for _ in completions]

def fails(completions, **columns):
    raise KeyError("gold")
"""


def write(folder: Path, name: str, content: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content)


def write_recipe(folder: Path, fields: dict[str, Any]) -> None:
    write(folder, "recipe.yaml", yaml.safe_dump({**RECIPE, **fields}))


def rows(*changed: dict[str, Any]) -> Callable[[Path], None]:
    return lambda folder: write(folder, "data/train.jsonl", "".join(f"{json.dumps(row)}\n" for row in changed))


def without_tensor(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def earlier_run(folder: Path) -> None:
    """A run in `run/`, with a complete checkpoint."""
    settings = {"alpha": 0.9, "lora_r": 8, "model_name_or_path": "./model", "optim": "sgd"}
    write(folder, "run/settings.json", json.dumps(settings))
    for name in ("model.safetensors", "rollout_state_0.pt", "trainer_state.json"):
        write(folder, f"run/checkpoint-1/{name}", "{}")


def finished_run(folder: Path) -> None:
    """A run in `run/`, without a checkpoint."""
    write(folder, "run/settings.json", "{}")
    write(folder, "run/summary.json", json.dumps({"before": {}, "after": {}, "optimizer_steps": 1}))


# What the message contains, fields of the recipe, and a change of the folder.
CASES: dict[str, tuple[list[str], dict[str, Any], Callable[[Path], Any]]] = {
    "misspelt key": (["alhpa=0.4", "Did you mean `alpha`?"], {"alhpa": 0.4}, str),
    "field of an earlier version": (["torch_dtype=bfloat16", "it is `dtype`"], {"torch_dtype": "bfloat16"}, str),
    "out of range": (["alpha=1.5", "Set `alpha`", "[0, 1]"], {"alpha": 1.5}, str),
    "together": (["mu=1.0", "chi2_radius=0.1", "Remove one"], {"mu": 1, "chi2_radius": 0.1}, str),
    "fewer prompts than a rollout": (["needs 16 prompts", "has 8"], {"per_device_train_batch_size": 32}, str),
    "no effect": (["lora_r=4 has no effect without `use_peft: true`"], {"lora_r": 4}, str),
    "no model": (["model_name_or_path=None", "to a model"], {"model_name_or_path": None}, str),
    "mistyped folder": (["model_name_or_path='./mode'", "folder that exists"], {"model_name_or_path": "./mode"}, str),
    "no streaming": (["dataset_streaming=True has no effect"], {"dataset_streaming": True}, str),
    "no template": (
        ["prompt_style='chat'", "no chat template", "Set `prompt_style` to 'plain'"],
        {},
        lambda folder: (folder / "model/chat_template.jinja").unlink(),
    ),
    "unknown level": (["levels=['Level 9']", "['Level 1', 'Level 2']"], {"levels": ["Level 9"]}, str),
    "unknown task": (["'sum' does not exist", "addition"], {"dataset_name": "few_shot", "levels": ["sum"]}, str),
    "split of a file": (["a file has no other"], {"dataset_name": "data/test.jsonl", "dataset_train_split": "x"}, str),
    "missing tensor": (["model='./model'", "lack model.layers.1.mlp.up_proj.weight"], {}, without_tensor),
    "missing reward": (["reward_funcs='no.reward'", "No module named 'no'"], {"reward_funcs": ["no.reward"]}, str),
    "module as a reward": (["reward_funcs='os.path'", "it is a module"], {"reward_funcs": ["os.path"]}, str),
    "class as a reward": (["reward_funcs='enum.Enum'", "to a function"], {"reward_funcs": ["enum.Enum"]}, str),
    "module as a tool": (
        ["tools='os.path'", "it is a module. Set `tools` to a function"],
        {"tools": ["os.path"]},
        str,
    ),
    "no package": (["use_liger_kernel=True", "pip install 'liger-kernel'"], {"use_liger_kernel": True}, str),
    "no package of a tracker": (["report_to=['dvclive']", "Install it"], {"report_to": "dvclive"}, str),
    "no package of an optimizer": (["optim='galore_adamw'", "galore_torch"], {"optim": "galore_adamw"}, str),
    "column of a reward": (["reward_funcs='compare'", "'gold'"], {"reward_funcs": ["my_rewards.compare"]}, str),
    "folder of another run": (
        ["output_dir='run'", "holds another run", "--resume_from_checkpoint last", "--overwrite"],
        {},
        earlier_run,
    ),
    "finished run": (["output_dir='run' holds another run"], {"resume_from_checkpoint": "auto"}, finished_run),
    "checkpoint of another recipe": (
        ["resume_from_checkpoint=", "alpha=0.9 there", "alpha=0.4 here", "lora_r=8 there", "optim='sgd' there", "Set"],
        {"resume_from_checkpoint": "last"},
        earlier_run,
    ),
}


@pytest.fixture
def folder(tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the run that a case changes."""
    fill(tmp_path, tiny_model)
    enter(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    """The same run, completed."""
    folder = tmp_path_factory.mktemp("works")
    fill(folder, tiny_model)
    write_recipe(folder, {"save_steps": 1})
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stderr(io.StringIO()) as errors:
        enter(folder, monkeypatch)
        assert train.main(["recipe.yaml"]) == 0
    assert "Loading weights" in errors.getvalue()  # no case may get so far
    return folder


def fill(folder: Path, model: str) -> None:
    shutil.copytree(model, folder / "model")
    rows(*ROWS)(folder)
    held_out = [{**row, "problem": row["problem"].replace("+", "*")} for row in ROWS]
    write(folder, "data/test.jsonl", "".join(f"{json.dumps(row)}\n" for row in held_out))
    write(folder, "my_rewards.py", REWARDS)
    write_recipe(folder, {})


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a folder, with its time of modification and the content of files."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def message(error_output: str) -> str:
    """The command's own message, after warnings of libraries."""
    return re.findall(r"^opo-trl \w+: error: .*", error_output, re.DOTALL | re.MULTILINE)[-1]


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_rejected_before_any_work(name: str, folder: Path, capsys):
    says, fields, change = CASES[name]
    write_recipe(folder, fields)
    change(folder)
    before = snapshot(folder)
    assert train.main(["recipe.yaml"]) == 2
    output = capsys.readouterr().err
    assert "Traceback" not in output
    assert "Loading weights" not in output
    for text in says:
        assert text in message(output)
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "no.yaml"], "No such file or directory: 'no.yaml'"),
        (["train", "recipe.yaml", "--learning_rat", "1"], "Did you mean `learning_rate`?"),
        (["train", "recipe.yaml", "--num_proceses", "2"], "Did you mean `num_processes`?"),
        (["train", "recipe.yaml", "--accelerate_config", "zero9"], "accelerate_config='zero9' is neither a file"),
        (["report", "nothing"], "'nothing' has no settings.json"),
        (["recipes", "no/such.yaml"], "is not one of the package's. `opo-trl recipes` lists them"),
    ],
)
def test_bad_command_is_rejected(folder: Path, capsys, words, says):
    before = snapshot(folder)
    assert cli.main(words) == 2
    output = capsys.readouterr().err
    assert says in message(output)
    assert "Traceback" not in output
    assert cli.main([*words, "--debug"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    assert snapshot(folder) == before


SECRETS = {"hub_token": "plainword1", "WANDB_API_KEY": "plainword2", "user": "plainword3", "model": "plainword4"}


def test_no_file_or_message_of_a_run_shows_a_secret_and_it_can_be_repeated(folder: Path, monkeypatch, capfd):
    address = f"http://user:{SECRETS['user']}@localhost:8000"
    recipe = {"env": {"WANDB_API_KEY": SECRETS["WANDB_API_KEY"], "SHOWN": "1"}, "vllm_server_base_url": address}
    recipe |= {"model_init_kwargs": {"token": SECRETS["model"]}, "save_steps": 1, "report_to": "tensorboard"}
    monkeypatch.setenv("WANDB_API_KEY", "")  # so that what the recipe sets is removed again
    monkeypatch.setenv("SHOWN", "")
    write_recipe(folder, recipe)
    command = ["--config", "recipe.yaml", "--hub_token", SECRETS["hub_token"]]
    monkeypatch.setattr(sys, "argv", ["train", *command])
    assert train.main() == 0

    def shown() -> list[str]:
        files = [path for path in (folder / "run").rglob("*") if path.is_file()]
        values = [value.encode() for value in SECRETS.values()]
        return [str(path) for path in files if any(value in path.read_bytes() for value in values)]

    assert (folder / "run" / "checkpoint-1" / "training_args.bin").is_file()
    assert not shown()
    said = [*capfd.readouterr(), *sys.argv]
    assert not any(value in text for text in said for value in SECRETS.values())
    stored = yaml.safe_load((folder / "run" / "recipe.yaml").read_text())
    assert stored["env"] == {"WANDB_API_KEY": "<secret>", "SHOWN": "1"}
    assert stored["hub_token"] == "<secret>"
    assert stored["vllm_server_base_url"] == "http://<secret>@localhost:8000"

    again = ["--config", "run/recipe.yaml", "--resume_from_checkpoint", "last", "--max_steps", "2"]
    given = ["--vllm_server_base_url", address, "--model_init_kwargs", json.dumps({"token": SECRETS["model"]})]
    assert train.main([*again, *given]) == 0
    assert json.loads((folder / "run" / "summary.json").read_text())["optimizer_steps"] == 2
    assert not shown()


def test_reward_that_fails_in_training_is_named_and_leaves_checkpoints_alone(
    works: Path, tmp_path: Path, monkeypatch, capsys
):
    folder = shutil.copytree(works, tmp_path / "copy")
    code = REWARDS.replace("def length(", "def unused(").replace("def fails(", "def length(")
    (folder / "my_rewards.py").write_text(code)
    enter(folder, monkeypatch)
    saved = snapshot(folder / "run" / "checkpoint-1")
    assert train.main(["recipe.yaml", "--resume_from_checkpoint", "last", "--max_steps", "2"]) == 1
    output = capsys.readouterr().err
    assert "Traceback" not in output
    assert "length has raised KeyError: 'gold'" in message(output)
    assert snapshot(folder / "run" / "checkpoint-1") == saved


def test_every_field_of_the_objective_is_fixed_on_resume():
    own = {f.name for f in dataclasses.fields(OPOConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)}
    work = {"plan_micro_batches", "max_tokens_per_micro_batch", "skip_inert_rows"}
    bounds = {"max_completions", "max_skipped_steps", "save_rollouts"}
    assert own - set(KEPT) == work | bounds
