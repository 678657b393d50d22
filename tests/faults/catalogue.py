"""
Everything that a user can get wrong before a run starts, case by case.

Each case changes one thing in a small training run that works: the recipe `recipe.yaml`, the data
`data/{train,test}.jsonl`, the tokenizer and weights in `model/`, and the rewards in `my_rewards.py`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers import USE_CPU
from safetensors.torch import load_file, save_file


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

def too_few(completions, **columns):
    return [0.0]

def fails(completions, **columns):
    raise KeyError("gold")

async def exits_later(completions, **columns):
    raise SystemExit(0)
"""

Change = Callable[[Path], Any]


@dataclass(frozen=True)
class Case:
    """One mistake."""

    name: str
    says: list[str]  # what the message must contain: the field, its value and the fix
    recipe: dict[str, Any] = field(default_factory=dict)  # fields to set in it
    fields: list[str] = field(default_factory=list)  # options to add to the command line
    change: Change = lambda folder: None  # of the folder
    command: str = "train"  # the program that a launch starts in each process; otherwise a command of `opo-trl`


def write_rows(rows: list[Any], name: str = "train.jsonl") -> Change:
    def change(folder: Path) -> None:
        (folder / "data" / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    return change


def write(name: str, content: bytes | str) -> Change:
    content = content.encode() if isinstance(content, str) else content

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    return change


def edit(name: str, **values: Any) -> Change:
    """Change entries of a JSON file; `None` removes one."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return change


def without_tensor(name: str) -> Change:
    """Leave one tensor out of the model's weights."""

    def change(folder: Path) -> None:
        file = folder / "model" / "model.safetensors"
        tensors = load_file(file)
        del tensors[name]
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def earlier_run(settings: dict[str, Any] | None = None, **files: bytes) -> Change:
    """A run in `run/` with a checkpoint of its first step, complete except that `files` replace its files."""

    def change(folder: Path) -> None:
        content = {"model.safetensors": b"weights", "rollout_state_0.pt": b"state", "trainer_state.json": b"{}"}
        write("run/recipe.yaml", "alpha: 0.4\n")(folder)
        write("run/settings.json", json.dumps(settings or {}))(folder)
        for name, part in {**content, **files}.items():
            write(f"run/checkpoint-1/{name}", part)(folder)

    return change


RESUME = {"resume_from_checkpoint": "last"}
DATASET = {"prompt_style": "dataset", "levels": None}
KNOWN_LEVELS = "['Level 1', 'Level 2']"
TRAINED = {"alpha": 0.4, "model_name_or_path": "./model", "learning_rate": 1e-6}  # settings of an earlier run


RECIPES = [
    Case("missing recipe", ["No such file or directory: 'no.yaml'"], fields=["--config", "no.yaml"]),
    Case("misspelt key", ["alhpa=0.4", "Did you mean `alpha`?"], {"alhpa": 0.4}),
    Case("field of an earlier version", ["torch_dtype=bfloat16", "it is `dtype`"], {"torch_dtype": "bfloat16"}),
    Case("misspelt option", ["--learning_rat", "Did you mean `learning_rate`?"], fields=["--learning_rat", "1"]),
]

OBJECTIVE = [
    Case("alpha above 1", ["alpha=1.5", "Set `alpha`", "[0, 1]"], {"alpha": 1.5}),
    Case("mu and radius", ["mu=1.0", "chi2_radius=0.1", "Remove one"], {"mu": 1, "chi2_radius": 0.1}),
]

BATCHES = [
    Case(
        "generations that do not divide the batch",
        ["num_generations=3", "4 completions", "one of 2, 4", "`per_device_train_batch_size` to a multiple of 3"],
        {"num_generations": 3},
    ),
    Case(
        "fewer prompts than a rollout needs",
        ["generation_batch_size=32", "needs 16 prompts", "has 8", "Provide at least 16"],
        {"per_device_train_batch_size": 32},
    ),
]

DATA = [
    Case("missing data", ["'./no'", "on the Hub"], {"dataset_name": "./no"}),
    Case(
        "no column of solutions",
        ["no column ['solution']", "only ['problem', 'level', 'type']", "Rename"],
        change=write_rows([{k: v for k, v in row.items() if k != "solution"} for row in ROWS]),
    ),
    Case(
        "column that a reward needs",
        ["reward_funcs='compare'", "missing a required", "'gold'", "and the columns [", "Rename a column"],
        {"reward_funcs": ["my_rewards.compare"]},
    ),
    Case("unknown level", ["levels=['Level 9']", KNOWN_LEVELS], {"levels": ["Level 9"]}),
    Case(
        "every prompt too long",
        ["8 of 8 rows are longer than max_prompt_length=", "change the data, the limit"],
        {"max_prompt_length": 1},
    ),
]

MODELS = [
    Case(
        "prompt longer than the context",
        ["max_completion_length=4", "prompt, '1 + 1 + ", "context has 512", "Set `max_prompt_length` to 508"],
        change=write_rows([*ROWS, {**ROWS[0], "problem": "1 + " * 200 + "1"}]),
    ),
    Case(
        "tokenizer without a chat template",
        ["prompt_style='chat'", "model", "no chat template", "Set `prompt_style` to 'plain'"],
        change=lambda folder: (folder / "model/chat_template.jinja").unlink(),
    ),
    Case(
        "tensor missing from the weights",
        ["model='./model'", "lack model.layers.1.mlp.up_proj.weight", "Restore"],
        change=without_tensor("model.layers.1.mlp.up_proj.weight"),
    ),
    Case(
        "language model as a reward model",
        ["reward_funcs='./model'", "lack score.weight"],
        {"reward_model_name_or_path": "./model"},
    ),
    Case(
        "generation_config.json with num_beams=4",
        ["generation_config.json", "num_beams=4", "num_beams: 1"],
        change=edit("model/generation_config.json", num_beams=4),
    ),
]

REWARD_FUNCTIONS = [
    Case(
        "reward in a missing module",
        ["reward_funcs='no.reward'", "No module named 'no'", "accuracy_reward"],
        {"reward_funcs": ["no.reward"]},
    ),
    Case(
        "more weights than rewards",
        ["reward_weights=[1.0, 2.0]", "does not fit 1 rewards", "Set `reward_weights`"],
        {"reward_weights": [1.0, 2.0]},
    ),
    Case(
        "overlong punishment beyond the completion",
        ["overlong_cache=5", "Set `overlong_cache`", "up to max_completion_length=4"],
        {"overlong_cache": 5, "reward_funcs": ["my_rewards.length", "soft_overlong_punishment"]},
    ),
]

RUNS = [
    Case(
        "folder of another run",
        ["output_dir='run'", "holds another run", "--resume_from_checkpoint last", "--overwrite"],
        change=earlier_run(),
    ),
    Case(
        "checkpoint of another recipe",
        ["resume_from_checkpoint=", "alpha=0.9 there", "alpha=0.4 here", "learning_rate=0.1 there", "Set"],
        RESUME,
        change=earlier_run({**TRAINED, "alpha": 0.9, "learning_rate": 0.1}),
    ),
]

KINDS = [
    Case(
        "option that the template does not use",
        ["chat_template_kwargs=", "'enable_thinking' has no effect", "Remove"],
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    Case(
        "best checkpoint without evaluation",
        ["load_best_model_at_end=True", "Remove"],
        {"load_best_model_at_end": True, "save_strategy": "no"},
    ),
    Case("LoRA options without LoRA", ["lora_r=4 has no effect without `use_peft: true`"], {"lora_r": 4}),
]

LAUNCH = [
    Case(
        "missing accelerate configuration",
        ["accelerate_config='zero9'", "neither a file"],
        {"accelerate_config": "zero9"},
        command="launch",
    ),
    Case(
        "misspelt launcher option",
        ["--num_proceses", "Did you mean `num_processes`?"],
        fields=["--num_proceses", "2"],
        command="launch",
    ),
]

OTHER_COMMANDS = [
    Case("report without a run", ["'nothing' has no settings.json"], fields=["nothing"], command="report"),
]

ALL = [
    *RECIPES,
    *OBJECTIVE,
    *BATCHES,
    *DATA,
    *MODELS,
    *REWARD_FUNCTIONS,
    *RUNS,
    *KINDS,
    *LAUNCH,
    *OTHER_COMMANDS,
]
