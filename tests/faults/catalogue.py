"""
Everything that a user can get wrong before a run starts, case by case.

Each case changes one thing in a small training run that works: the recipe `recipe.yaml`, the data
`data/{train,test}.jsonl`, the tokenizer and weights in `model/`, and the rewards in `my_rewards.py`.
"""

import gzip
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers import USE_CPU
from safetensors.torch import load_file, save_file

from opo_trl.rollout.prompts import RESERVED


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

def text(completions, **columns):
    return ["good" for _ in completions]

def single(completions, **columns):
    return 1.0

def fails(completions, **columns):
    raise KeyError("gold")

def exits(completions, **columns):
    exit()

async def exits_later(completions, **columns):
    raise SystemExit(0)

def leave():
    exit(0)

constant = 3
"""

Change = Callable[[Path], Any]


@dataclass(frozen=True)
class Case:
    """
    One mistake.

    Args:
        name (`str`):
            What is wrong.
        says (`list[str]`):
            What the message must contain: the field, its value and the fix.
        recipe (`dict`):
            Fields to set in the recipe.
        fields (`list[str]`):
            Options to add to the command line.
        change (`Callable`):
            A change to the folder.
        environment (`dict`):
            Environment variables to set.
        absent (`str`):
            Package to hide.
        command (`str`):
            `train`: the program that a launch starts in each process; otherwise a command of `opo-trl`.
    """

    name: str
    says: list[str]
    recipe: dict[str, Any] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    change: Change = lambda folder: None
    environment: dict[str, str] = field(default_factory=dict)
    absent: str | None = None
    command: str = "train"


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


def append(name: str, text: str) -> Change:
    def change(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write(text)

    return change


def remove(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def truncate(name: str) -> Change:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return change


def edit(name: str, **values: Any) -> Change:
    """Change entries of a JSON file; `None` removes one."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return change


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def without_tensor(name: str) -> Change:
    """Leave one tensor out of the model's weights."""

    def change(folder: Path) -> None:
        file = folder / "model" / "model.safetensors"
        tensors = load_file(file)
        del tensors[name]
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def cut_gzip(folder: Path) -> None:
    rows = [{**row, "problem": os.urandom(30).hex()} for row in ROWS]
    content = gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode())
    write("data/train.jsonl.gz", content[: len(content) // 2])(folder)


def move(name: str, to: str) -> Change:
    def change(folder: Path) -> None:
        (folder / to).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(folder / to)

    return change


def earlier_run(settings: dict[str, Any] | None = None, **files: bytes) -> Change:
    """A run in `run/` with a checkpoint of its first step, complete except that `files` replace its files."""

    def change(folder: Path) -> None:
        run, content = folder / "run", {"model.safetensors": b"weights", "trainer_state.json": b"{}", **files}
        listed = {"model.safetensors": {"size": len(b"weights"), "crc32": zlib.crc32(b"weights")}}
        write("run/_lock", "process 1 on host\n")(folder)
        write("run/recipe.yaml", "alpha: 0.4\n")(folder)
        write("run/settings.json", json.dumps(settings or {}))(folder)
        for name, part in content.items():
            write(f"run/checkpoint-1/{name}", part)(folder)
        (run / "checkpoint-1" / "manifest.json").write_text(json.dumps({"files": listed}))

    return change


def read_only(folder: Path) -> None:
    (folder / "locked").mkdir()
    (folder / "locked").chmod(0o555)


RESUME = {"resume_from_checkpoint": "last"}
DATASET = {"prompt_style": "dataset", "levels": None}
KNOWN_LEVELS = "['Level 1', 'Level 2']"
TRAINED = {"alpha": 0.4, "model_name_or_path": "./model", "learning_rate": 1e-6}  # settings of an earlier run
# Field → the optional package that it needs.
EXTRAS = {"use_vllm": "vllm", "use_peft": "peft", "load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes"}
LIGER = {"use_liger_kernel": True}


# `tests/checks/test_strict_yaml.py` covers how recipes are read.
RECIPES = [
    Case("missing recipe", ["config='no.yaml'", "`opo-trl recipes`"], fields=["--config", "no.yaml"]),
    Case("recipe that is not YAML", ["config='recipe.yaml'", "not valid YAML"], change=write("recipe.yaml", "a: [1")),
    Case(
        "recipe that would run code",
        ["config='recipe.yaml'", "not valid YAML", "python/object/apply"],
        change=write("recipe.yaml", "fsdp_config: {a: !!python/object/apply:os.system ['touch ran']}\n"),
    ),
    Case(
        "recipe in another encoding",
        ["config='recipe.yaml'", "not valid YAML", "'utf-8' codec"],
        change=write("recipe.yaml", "output_dir: é".encode("latin-1")),
    ),
    Case("misspelt key", ["alhpa=0.4", "Did you mean `alpha`?"], {"alhpa": 0.4}),
    Case("unknown key", ["xyzzy=1", "Remove it"], {"xyzzy": 1}),
    Case("field of an earlier version", ["torch_dtype=bfloat16", "it is `dtype`"], {"torch_dtype": "bfloat16"}),
    Case("misspelt option", ["--learning_rat", "Did you mean `learning_rate`?"], fields=["--learning_rat", "1"]),
    Case(
        "key of another trainer", ["weight_sync_steps=2", "belongs to `trainer: async_opo`"], {"weight_sync_steps": 2}
    ),
    Case("unknown trainer", ["trainer='ppo'", "Set `trainer` to one of opo"], {"trainer": "ppo"}),
    Case("env that is not a mapping", ["env=['A=1']", "Set `env` to a mapping"], {"env": ["A=1"]}),
    Case("word for a number", ["alpha: invalid float value: 'high'", "Set it to"], {"alpha": "high"}),
    Case("fraction for a count", ["max_steps: invalid int value: '2.5'", "Set it to"], {"max_steps": 2.5}),
    Case("null for a number", ["num_generations=None", "Set `num_generations`"], {"num_generations": None}),
    Case("unknown choice", ["ratio_form", "'linear'", "'exact'"], {"ratio_form": "linear"}),
    Case("no model", ["model_name_or_path is not set", "Set it"], {"model_name_or_path": None}),
    Case("no data", ["dataset_name is not set", "Set it"], {"dataset_name": None}),
]

OBJECTIVE = [
    Case("alpha above 1", ["alpha=1.5", "Set `alpha`", "[0, 1]"], {"alpha": 1.5}),
    Case("alpha below 0", ["alpha=-0.1", "Set `alpha`", "[0, 1]"], {"alpha": -0.1}),
    Case("alpha of NaN", ["alpha=nan", "Set `alpha`", "[0, 1]"], {"alpha": float("nan")}),
    Case("mu of 0", ["mu=0.0", "Set `mu`", "positive"], {"mu": 0}),
    Case("mu below 0", ["mu=-1.0", "Set `mu`", "positive"], fields=["--mu", "-1"]),
    Case("mu of NaN", ["mu=nan", "Set `mu`", "positive"], {"mu": float("nan")}),
    Case("infinite mu", ["mu=inf", "Set `mu`", "finite"], {"mu": float("inf")}),
    Case("mu and radius", ["mu=1.0", "chi2_radius=0.1", "Remove one"], {"mu": 1, "chi2_radius": 0.1}),
    Case("radius of 0", ["chi2_radius=0.0", "Set `chi2_radius`", "positive"], {"chi2_radius": 0}),
    Case("temperatures in reverse order", ["[1.5, 0.2]", "the lower first"], {"temperature_range": [1.5, 0.2]}),
    Case("another loss", ["loss_type='grpo'", "ratio_form", "Remove `loss_type`"], {"loss_type": "grpo"}),
    Case("a clip range", ["epsilon=0.3", "bound the update with `mu`, or", "Remove `epsilon`"], {"epsilon": 0.3}),
    Case("a parameter of SAPO", ["sapo_temperature_pos=2.0", "Remove"], {"sapo_temperature_pos": 2.0}),
    Case("sampling at temperature 0", ["temperature=0.0", "Set `temperature`", "positive"], {"temperature": 0}),
    Case("negative learning rate", ["learning_rate=-1.0", "Set `learning_rate`", "0 or more"], {"learning_rate": -1}),
    Case("learning rate of NaN", ["learning_rate=nan", "Set `learning_rate`"], {"learning_rate": "nan"}),
]

BATCHES = [
    Case("a single generation", ["num_generations=1", "Set `num_generations`", "at least 2"], {"num_generations": 1}),
    Case(
        "generations that do not divide the batch",
        ["num_generations=3", "4 completions", "one of 2, 4", "`per_device_train_batch_size` to a multiple of 3"],
        {"num_generations": 3},
    ),
    Case(
        "generations that do not divide over two processes",
        ["num_generations=6", "8 completions", "one of 2, 4, 8", "to a multiple of 3"],
        {"num_generations": 6},
        environment={"WORLD_SIZE": "2"},
    ),
    Case(
        "generation batch that is not a multiple",
        ["generation_batch_size=10", "8 or 12", "Set `generation_batch_size`"],
        {"generation_batch_size": 10},
    ),
    Case(
        "generation batch and steps",
        ["generation_batch_size=8", "steps_per_generation=2", "Remove one"],
        {"generation_batch_size": 8, "steps_per_generation": 2},
    ),
    Case("empty batches", ["per_device_train_batch_size=0", "at least 1"], {"per_device_train_batch_size": 0}),
    Case("no steps", ["steps_per_generation=0", "at least 1"], {"steps_per_generation": 0}),
    Case("empty completions", ["max_completion_length=0", "at least 1"], {"max_completion_length": 0}),
    Case(
        "fewer prompts than a rollout needs",
        ["generation_batch_size=32", "needs 16 prompts", "has 8", "Provide at least 16"],
        {"per_device_train_batch_size": 32},
    ),
    Case("no sampling rounds", ["max_sampling_rounds=0", "at least 1"], {"max_sampling_rounds": 0}),
]

DATA = [
    Case("missing data", ["dataset_name='./no'", "Pass an existing"], {"dataset_name": "./no"}),
    Case("data in an unknown format", ["dataset_name='recipe.yaml'", ".jsonl"], {"dataset_name": "recipe.yaml"}),
    Case("no such split", ["dataset_name='./data'", "split='dev'", "dev.jsonl"], {"dataset_train_split": "dev"}),
    Case("config of local data", ["dataset_config='main'", "Remove it"], {"dataset_config": "main"}),
    Case(
        "no column of solutions",
        ["dataset_name=", "no column ['solution']", "only ['problem', 'level', 'type']", "Rename"],
        change=write_rows([{k: v for k, v in row.items() if k != "solution"} for row in ROWS]),
    ),
    Case(
        "columns that the data lack",
        ["columns={'problem': 'question'}", "does not fit", "problem, level, type, solution", "Set `columns`"],
        {"columns": {"problem": "question"}},
    ),
    Case(
        "levels of data without levels",
        ["levels=['Level 1', 'Level 2']", "has no levels"],
        change=write_rows([{"problem": "1 + 1", "answer": "2"}] * 8),
    ),
    Case(
        "column that a reward needs",
        [
            "reward_funcs='compare'",
            "missing a required",
            "'gold'",
            "and the columns [",
            "'solution'",
            "Rename a column",
        ],
        {"reward_funcs": ["my_rewards.compare"]},
    ),
    Case(
        "dataset without prompts",
        ["prompt_style='dataset'", "no column 'prompt'", "'problem'", "Rename"],
        DATASET,
    ),
    Case(
        "prompts without the column that a reward needs",
        [
            "reward_funcs='accuracy_reward' needs answers",
            "'result'",
            "columns: {solution: ",
        ],
        {**DATASET, "reward_funcs": ["accuracy_reward"]},
        change=both(
            write_rows([{"prompt": "1 + 1", "result": "2"}] * 8),
            write_rows([{"prompt": "2 + 2", "result": "4"}] * 8, "test.jsonl"),
        ),
    ),
    Case(
        "solutions that are lists",
        ["no row that can be used", "its solution is of type list, not a string", "Use other data"],
        change=write_rows([{**row, "solution": [4, 5]} for row in ROWS]),
    ),
    Case(
        "settings of a dataset without any",
        ["dataset_settings={'size': 5}", "no effect with dataset_name='./data'", "Remove it"],
        {"dataset_settings": {"size": 5}},
    ),
    Case(
        "mixture and name",
        ["dataset_name='./data' has no effect with `datasets`", "Remove"],
        {"datasets": [{"path": "./data"}]},
    ),
    Case(
        "mixture of what does not exist",
        ["datasets=", "'./nowhere'", "cannot be loaded", "Change it"],
        {"dataset_name": None, "datasets": [{"path": "./nowhere"}]},
    ),
    Case(
        "mixture without a test split",
        ["report_levels: test_split_size=None", "Set `test_split_size`"],
        {"dataset_name": None, "datasets": [{"path": "./data"}], "report_levels": ["all"]},
    ),
    Case(
        "mixture that is held out completely",
        ["test_split_size=8", "none of the 8 rows", "Lower it"],
        {"dataset_name": None, "datasets": [{"path": "./data"}], "levels": None, "test_split_size": 8},
    ),
    Case(
        "configuration of a mixture",
        ["dataset_config='main' has no effect with `datasets`", "Remove"],
        {"dataset_name": None, "datasets": [{"path": "./data"}], "dataset_config": "main"},
    ),
    Case(
        "test split of no mixture", ["test_split_size=0.1 has no effect without `datasets`"], {"test_split_size": 0.1}
    ),
    Case("empty file", ["dataset_name=", "train.jsonl", "is empty"], change=write("data/train.jsonl", "")),
    Case("blank file", ["dataset_name=", "train.jsonl", "is empty"], change=write("data/train.jsonl", "\n \n")),
    Case(
        "a single row",
        ["generation_batch_size=4", "needs 2 prompts", "has 1", "Provide at least 2"],
        {"levels": ["Level 1"]},
        change=write_rows(ROWS[:1]),
    ),
    Case("unknown level", ["levels=['Level 9']", KNOWN_LEVELS], {"levels": ["Level 9"]}),
    Case(
        "unknown level of validation",
        ["validation_levels", "'Level 9'", KNOWN_LEVELS],
        {"validation_levels": ["Level 9"], "validation_steps": 1},
    ),
    Case("unknown level of the report", ["report_levels", "'Level 9'", KNOWN_LEVELS], {"report_levels": ["Level 9"]}),
    Case("fraction without rows", ["fraction=0.01 of 8 rows", "Use a larger one"], {"fraction": 0.01}),
    Case("fraction above 1", ["fraction=1.5", "(0, 1]", "Use 1.0"], {"fraction": 1.5}),
    Case("fraction of NaN", ["fraction=nan", "(0, 1]", "Use 1.0"], {"fraction": float("nan")}),
    Case(
        "broken line",
        ["dataset_name=", "line 9", "Fix that line"],
        change=write("data/train.jsonl", "".join(f"{json.dumps(row)}\n" for row in ROWS) + '{"problem": "1'),
    ),
    Case(
        "line that is not an object",
        ["dataset_name=", "line 9 is [1, 2]", "Write rows as"],
        change=write_rows([*ROWS, [1, 2]]),
    ),
    Case(
        "wrong encoding",
        ["dataset_name=", "line 9", "UTF-8", "Save it as UTF-8"],
        change=write(
            "data/train.jsonl",
            "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in [*ROWS, {"problem": "é"}]).encode("latin-1"),
        ),
    ),
    Case(
        "gzip cut short",
        ["dataset_name=", "train.jsonl.gz", "truncated", "replace the file"],
        change=both(remove("data/train.jsonl"), cut_gzip),
    ),
    Case(
        "file that is not gzip",
        ["dataset_name=", "train.jsonl.gz", "replace the file"],
        change=both(remove("data/train.jsonl"), write("data/train.jsonl.gz", json.dumps(ROWS[0]))),
    ),
    Case(
        "truncated parquet",
        ["dataset_name=", "train.parquet", "replace the file"],
        change=both(remove("data/train.jsonl"), write("data/train.parquet", b"PAR1...")),
    ),
    Case("validation of 0 problems", ["validation_size=0", "at least 1"], {"validation_size": 0}),
    Case("report of 0 completions", ["report_samples=0 is not allowed", "at least 1"], {"report_samples": 0}),
    Case("streaming", ["dataset_streaming=True", "Remove"], {"dataset_streaming": True}),
    Case(
        "instruction for ready-made prompts",
        ["instruction='Be brief.' has no effect", "Remove `instruction`"],
        {"instruction": "Be brief.", "levels": None},
        change=write_rows([{"prompt": "1 + 1"}] * 8),
    ),
    *(
        Case(
            f"column {name!r}",
            [f"the dataset has a column {name!r}", f"Rename it: `columns: {{my_{name}: {name}}}`"],
            DATASET,
            change=write_rows([{"prompt": "1 + 1", name: "x"}] * 8),
        )
        for name in RESERVED
    ),
    Case(
        "test fraction next to a test split",
        ["dataset_test_split='train' has no effect with test_fraction=0.5"],
        {"dataset_test_split": "train", "test_fraction": 0.5},
    ),
    Case("test fraction of 1", ["test_fraction=1.0", "such as 0.2"], {"test_fraction": 1.0}),
    Case(
        "table with a value too many",
        ["train.csv", "line 3", "3 values for 2 columns", "into quotes"],
        {"levels": None},
        change=both(remove("data/train.jsonl"), write("data/train.csv", "problem,answer\n1+1,2\n1+1,2,000\n")),
    ),
    Case(
        "levels of ready-made prompts",
        ["levels=", "the dataset has no levels", "Leave `levels` out"],
        change=write_rows([{"prompt": "1 + 1"}] * 8),
    ),
    Case(
        "every prompt too long",
        ["max_prompt_length", "all 8 rows", "Change `max_prompt_length`"],
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
        "completion longer than the context",
        ["max_completion_length=512", "context has 512", "Shorten `max_completion_length`"],
        {"max_completion_length": 512},
    ),
    Case(
        "tokenizer without a chat template",
        ["prompt_style='chat'", "model", "no chat template", "Set `prompt_style` to 'plain'"],
        change=remove("model/chat_template.jinja"),
    ),
    Case(
        "no chat template, with a prompt limit",
        ["prompt_style='chat'", "no chat template", "Set `prompt_style` to 'plain'"],
        {"max_prompt_length": 100},
        change=remove("model/chat_template.jinja"),
    ),
    Case(
        "tokenizer without eos token",
        ["model_name_or_path='./model'", "no eos_token", "Set `eos_token`"],
        change=edit("model/tokenizer_config.json", eos_token=None),
    ),
    Case(
        "pad token beyond the embedding",
        ["model_name_or_path='./model'", "pad_token='<pad>'", "is token 259", "has 259", "resize"],
        change=edit("model/tokenizer_config.json", pad_token="<pad>"),
    ),
    Case(
        "eos token beyond the embedding",
        ["model_name_or_path='./model'", "eos_token='<end>'", "is token 259", "has 259", "resize"],
        change=edit("model/tokenizer_config.json", eos_token="<end>"),
    ),
    Case(
        "prompt with a token beyond the embedding",
        ["dataset_name=", "'1 <extra> 1\\n\\n", " contains '<extra>', token 259", "Remove it from the prompt"],
        change=both(
            edit("model/tokenizer_config.json", extra_special_tokens=["<extra>"]),
            write_rows([*ROWS, {**ROWS[0], "problem": "1 <extra> 1"}]),
        ),
    ),
    Case(
        "prompt with a token beyond the embedding, in a shuffled part of a mixture",
        [
            "datasets=[{'data_files': 'data/train.jsonl', 'path': 'json'}]: '0 <extra> 1",
            " contains '<extra>', token 259",
        ],
        {
            "dataset_name": None,
            "datasets": [{"path": "json", "data_files": "data/train.jsonl"}],
            "test_split_size": 0.5,
        },
        change=both(
            edit("model/tokenizer_config.json", extra_special_tokens=["<extra>"]),
            write_rows(
                [{**row, "problem": f"{index} <extra> 1"} if index == 0 else row for index, row in enumerate(ROWS)]
            ),
        ),
    ),
    Case(
        "tools beside recorded rollouts",
        ["tools=['my_rewards.add'] has no effect on the recorded rollouts='r.jsonl'"],
        {"dataset_name": None, "levels": None, "rollouts": "r.jsonl", "tools": ["my_rewards.add"]},
    ),
    Case(
        "held-out prompt with a token beyond the embedding",
        [
            "report_levels='Level 1'",
            "'1 <extra> 1\\n\\n",
            " contains '<extra>', token 259",
            "Remove it from the prompt",
        ],
        {"report_levels": ["Level 1"]},
        change=both(
            edit("model/tokenizer_config.json", extra_special_tokens=["<extra>"]),
            write_rows([{**ROWS[0], "problem": "1 <extra> 1"}], "test.jsonl"),
        ),
    ),
    *[
        Case(
            f"chat template that {what}",
            ["./model", *says],
            recipe,
            change=write("model/chat_template.jinja", template),
        )
        for what, template, recipe, says in (
            (
                "raises",
                "{{ raise_exception('Roles must alternate') }}",
                {},
                ["'0 + 0", "with the roles ['user']", "Roles must alternate", "chat_template.jinja"],
            ),
            (
                "raises, with a prompt limit",
                "{{ raise_exception('Roles must alternate') }}",
                {"max_prompt_length": 100},
                ["'0 + 0", "with the roles ['user']", "Roles must alternate", "chat_template.jinja"],
            ),
            ("fails", "{{ messages[0]['content'] + 1 }}", {}, ["'0 + 0", "with the roles ['user']", "concatenate"]),
            ("is not valid", "{% for m in messages %}", {}, ["'0 + 0", "Unexpected end of template"]),
            ("renders nothing", "{% if false %}x{% endif %}", {}, ["'0 + 0", " has no tokens", "chat_template.jinja"]),
            ("drops the user turn", "<|im_start|>assistant", {}, ["leaves out the user turn '0 + 0", "Use the"]),
            (
                "ignores the start of an answer",
                "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}",
                {},
                ["ignores add_generation_prompt", r"'<|im_start|>assistant\n'", "{% if add_generation_prompt %}"],
            ),
        )
    ],
    *[
        Case(
            f"generation_config.json with {name}={value}",
            ["generation_config.json", f"{name}", f"{shown}", "num_beams: 1"],
            change=edit("model/generation_config.json", **{name: value}),
        )
        for name, value, shown in (("num_beams", 4, 4),)
    ],
    Case(
        "context shorter than prompt and completion, with a prompt limit",
        ["max_completion_length=500", "the longest prompt, ", "context has 512", "Set `max_prompt_length` to 12"],
        {"max_completion_length": 500, "max_prompt_length": 200},
    ),
    Case(
        "no tokenizer",
        ["model_name_or_path='./model'", "tokenizer", "Put"],
        change=remove("model/tokenizer.json", "model/tokenizer_config.json"),
    ),
    Case(
        "missing model",
        ["model_name_or_path='./no'", "does not exist", "Set `model_name_or_path`"],
        {"model_name_or_path": "./no"},
    ),
    Case(
        "model that is not on the Hub",
        ["model_name_or_path='no/model'", "cannot be loaded", "Set `model_name_or_path`"],
        {"model_name_or_path": "no/model"},
    ),
    Case(
        "folder without a model",
        ["model_name_or_path='./data'", "cannot be loaded", "Set `model_name_or_path`"],
        {"model_name_or_path": "./data"},
    ),
    Case(
        "model without weights",
        ["model_name_or_path='./model'", "has no weights", "no file named model.safetensors", "Restore"],
        change=remove("model/model.safetensors"),
    ),
    Case(
        "truncated weights",
        ["model_name_or_path='./model'", "model.safetensors", "truncated", "Restore"],
        change=truncate("model/model.safetensors"),
    ),
    Case(
        "missing shard of the weights",
        ["model_name_or_path='./model'", "No such file", "model-2.safetensors", "Restore"],
        change=both(
            remove("model/model.safetensors"),
            write(
                "model/model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": "model-2.safetensors"}}'
            ),
        ),
    ),
    Case(
        "tensor missing from the weights",
        ["model_name_or_path='./model'", "lack model.layers.1.mlp.up_proj.weight", "Restore"],
        change=without_tensor("model.layers.1.mlp.up_proj.weight"),
    ),
    Case(
        "more layers in the configuration than in the weights",
        ["model_name_or_path='./model'", "lack model.layers.2.input_layernorm.weight", "and 8 more", "config.json"],
        change=edit("model/config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3),
    ),
    Case(
        "fewer layers in the configuration than in the weights",
        ["model_name_or_path='./model'", "leaves out layers", "model.layers.1.", "num_hidden_layers"],
        change=edit("model/config.json", num_hidden_layers=1, layer_types=["full_attention"]),
    ),
    Case(
        "another size in the configuration than in the weights",
        ["model_name_or_path='./model'", "mlp.down_proj.weight has the shape (32, 64)", "(32, 32)", "config.json"],
        change=edit("model/config.json", intermediate_size=32),
    ),
    Case(
        "language model as a reward model",
        ["reward_model_name_or_path='./model'", "lack score.weight"],
        {"reward_model_name_or_path": "./model"},
    ),
    Case(
        "truncated configuration",
        ["model_name_or_path='./model'", "config.json", "Set `model_name_or_path`"],
        change=truncate("model/config.json"),
    ),
    Case(
        "unknown architecture",
        ["model_name_or_path='./model'", "nosuch", "Set `model_name_or_path`"],
        change=edit("model/config.json", model_type="nosuch"),
    ),
    Case(
        "model that brings its own code",
        ["model_name_or_path='./model'", "custom code", "Set `trust_remote_code` to true"],
        change=both(
            edit("model/config.json", model_type="own", auto_map={"AutoConfig": "own.Config"}),
            write("model/own.py", "open('ran', 'w')\n"),
        ),
    ),
    Case(
        "adapter instead of a model",
        ["model_name_or_path='./adapter'", "adapter for 'some/base'", "Set `model_name_or_path` to that"],
        {"model_name_or_path": "./adapter"},
        change=write("adapter/adapter_config.json", '{"base_model_name_or_path": "some/base"}'),
    ),
    Case(
        "missing reward model",
        ["reward_model_name_or_path='./no'", "does not exist", "Set `reward_model_name_or_path`"],
        {"reward_model_name_or_path": "./no"},
    ),
    Case("unknown dtype", ["dtype", "float8", "'bfloat16'"], {"dtype": "float8"}),
]

REWARD_FUNCTIONS = [
    Case(
        "reward in a missing module",
        ["reward_funcs='no.reward'", "No module named 'no'", "accuracy_reward"],
        {"reward_funcs": ["no.reward"]},
    ),
    Case(
        "reward missing from its module",
        ["reward_funcs='my_rewards.no'", "accuracy_reward"],
        {"reward_funcs": ["my_rewards.no"]},
    ),
    Case(
        "reward whose module exits",
        ["reward_funcs='my_rewards.length'", "cannot be imported (SystemExit: 0)"],
        change=write("my_rewards.py", "raise SystemExit(0)"),
    ),
    Case(
        "tool whose module exits, with a long message",
        ["tools='my_rewards.leave'", r"cannot be imported (SystemExit: \x1b[2Jyyyy", "…)"],
        {"tools": ["my_rewards.leave"]},
        change=write("my_rewards.py", "raise SystemExit('\\x1b[2J' + 'y' * 10**6)"),
    ),
    Case(
        "environment that exits when it is made",
        ["environment_factory='my_rewards.leave'", "cannot be created (SystemExit: 0)"],
        {"environment_factory": "my_rewards.leave"},
    ),
    Case("misspelt reward", ["reward_funcs='accuracy'", "accuracy_reward"], {"reward_funcs": ["accuracy"]}),
    Case(
        "reward that is not a function",
        ["reward_funcs='my_rewards.constant'", "not a function", "accuracy_reward"],
        {"reward_funcs": ["my_rewards.constant"]},
    ),
    Case(
        "reward that is a class",
        ["reward_funcs='collections.Counter'", "is a class", "accuracy_reward"],
        {"reward_funcs": ["collections.Counter"]},
    ),
    Case(
        "reward without a signature",
        ["'hypot'", "no signature", "set `reward_funcs`"],
        {"reward_funcs": ["math.hypot"]},
    ),
    Case(
        "reward that takes too few arguments",
        ["reward_funcs='bare'", "unexpected keyword argument", "set `reward_funcs`"],
        {"reward_funcs": ["bare.bare"]},
        change=write("bare.py", "def bare(completions):\n    return [0.0 for _ in completions]\n"),
    ),
    Case(
        "reward with a positional-only argument",
        ["reward_funcs='first'", "missing a required", "'texts'", "set `reward_funcs`"],
        {"reward_funcs": ["nameless.first"]},
        change=write("nameless.py", "def first(texts, /, **columns):\n    return [0.0 for _ in texts]\n"),
    ),
    Case(
        "reward in a module that fails",
        ["reward_funcs='broken.reward'", "ZeroDivisionError", "accuracy_reward"],
        {"reward_funcs": ["broken.reward"]},
        change=write("broken.py", "1 / 0\n"),
    ),
    Case("no time for a reward", ["reward_timeout=0.0", "positive"], {"reward_timeout": 0}),
    Case(
        "more weights than rewards",
        ["reward_weights=[1.0, 2.0]", "does not fit 1 rewards", "Set `reward_weights`"],
        {"reward_weights": [1.0, 2.0]},
    ),
    Case("overlong cache without the punishment", ["overlong_cache=2", "Set both, or neither"], {"overlong_cache": 2}),
    Case(
        "overlong punishment beyond the completion",
        ["overlong_cache=5", "Set `overlong_cache`", "up to max_completion_length=4"],
        {"overlong_cache": 5, "reward_funcs": ["my_rewards.length", "soft_overlong_punishment"]},
    ),
    Case("failure rate above 1", ["max_reward_failure_rate=2.0", "[0, 1]"], {"max_reward_failure_rate": 2}),
]

RUNS = [
    Case(
        "folder of another run",
        ["output_dir='run'", "not empty", "--resume_from_checkpoint last", "--overwrite"],
        change=earlier_run(),
    ),
    Case(
        "folder that is not a run",
        ["output_dir='run'", "not a run", "Choose another"],
        {"overwrite": True},
        change=write("run/thesis.tex", "x"),
    ),
    Case("file instead of a folder", ["output_dir='run'", "not a folder", "Choose another"], change=write("run", "x")),
    Case(
        "no permission to write",
        ["output_dir=", "no permission to write", "Choose another"],
        {"output_dir": "locked/run" if os.getuid() else "/proc/sys/run"},  # not even root may write there
        change=read_only,
    ),
    Case("nothing to resume", ["resume_from_checkpoint='last'", "no complete checkpoint", "auto"], RESUME),
    Case(
        "missing checkpoint",
        ["resume_from_checkpoint='run/checkpoint-9'", "does not exist", "Remove"],
        {"resume_from_checkpoint": "run/checkpoint-9"},
    ),
    Case(
        "truncated checkpoint",
        ["resume_from_checkpoint='run/checkpoint-1'", "model.safetensors is cut short", "Remove"],
        {"resume_from_checkpoint": "run/checkpoint-1"},
        change=earlier_run(**{"model.safetensors": b"wei"}),
    ),
    Case(
        "truncated state of a checkpoint",
        ["resume_from_checkpoint='run/checkpoint-1'", "trainer_state.json is cut short", "Remove"],
        {"resume_from_checkpoint": "run/checkpoint-1"},
        change=earlier_run(**{"trainer_state.json": b"{"}),
    ),
    Case(
        "checkpoint of another model",
        ["resume_from_checkpoint=", "model_name_or_path='./other' there", "model_name_or_path='./model' here", "Set"],
        RESUME,
        change=earlier_run({**TRAINED, "model_name_or_path": "./other"}),
    ),
    Case(
        "checkpoint of another recipe",
        ["resume_from_checkpoint=", "alpha=0.9 there", "alpha=0.4 here", "learning_rate=0.1 there", "Set"],
        RESUME,
        change=earlier_run({**TRAINED, "alpha": 0.9, "learning_rate": 0.1}),
    ),
    Case(
        "adapter for another base",
        ["resume_from_checkpoint=", "adapter for './other'", "model_name_or_path='./model'", "Set"],
        {"resume_from_checkpoint": "run/checkpoint-1", "use_peft": True},
        change=both(
            earlier_run(**{"adapter_config.json": b'{"base_model_name_or_path": "./other"}'}),
            remove("run/settings.json"),
        ),
    ),
]


def link(to: str, name: str = "link") -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(to)

    return change


def inside(what: str, said: str, change: Change, recipe: dict[str, Any] | None = None, **named: Any) -> Case:
    """An earlier run cannot be deleted, because its folder contains what the new run reads."""
    says = ["output_dir=", f"contains {said}", "cannot be deleted", "Choose another"]
    recipe = {"overwrite": True, **(recipe or {})}
    return Case(f"{what} in the folder of a run", says, recipe, change=both(earlier_run(), change), **named)


INSIDE = [
    inside(
        "recipe", "config='run/mine.yaml'", move("recipe.yaml", "run/mine.yaml"), fields=["--config", "run/mine.yaml"]
    ),
    inside("data", "dataset_name='./run/data'", move("data", "run/data"), {"dataset_name": "./run/data"}),
    inside(
        "mixed data",
        "datasets='run/d'",
        move("data", "run/d"),
        {"dataset_name": None, "datasets": [{"path": "run/d"}]},
    ),
    inside("model", "model_name_or_path='./run'", move("model", "run/model"), {"model_name_or_path": "./run"}),
    inside("linked model", "model_name_or_path='link'", link("run"), {"model_name_or_path": "link"}),
    inside(
        "weights of the model",
        "model_name_or_path='./model'",
        both(
            move("model/model.safetensors", "run/model.safetensors"),
            link("../run/model.safetensors", "model/model.safetensors"),
        ),
    ),
    inside(
        "reward model",
        "reward_model_name_or_path='run/checkpoint-1'",
        lambda folder: None,
        {"reward_model_name_or_path": "run/checkpoint-1"},
    ),
    inside(
        "reward",
        "reward_funcs=",
        move("my_rewards.py", "run/my_rewards.py"),
        {"reward_funcs": ["run.my_rewards.length"]},
    ),
    inside(
        "configuration of accelerate",
        "accelerate_config=",
        write("run/a.yaml", "{}"),
        {"accelerate_config": "run/a.yaml"},
    ),
    Case(
        "overwriting the current folder",
        ["output_dir='.'", "contains config='recipe.yaml'", "Choose another"],
        {"output_dir": ".", "overwrite": True},
        change=write("thesis.txt", "x"),
    ),
    Case(
        "overwriting everything",
        ["output_dir='/'", "contains config='recipe.yaml'", "Choose another"],
        {"output_dir": "/", "overwrite": True},
    ),
]


LONG = "x" * 300
NUL = {"output_dir": "run\0"}

PATHS = [
    Case(
        "folder below a file",
        ["output_dir='recipe.yaml/run'", "recipe.yaml' is not a folder", "Choose another"],
        {"output_dir": "recipe.yaml/run"},
    ),
    Case(
        "broken link",
        ["output_dir='link'", "broken link", "Choose another"],
        {"output_dir": "link"},
        change=link("nothing"),
    ),
    Case(
        "folder below a link to itself",
        ["output_dir='link/run'", "broken link", "Choose another"],
        {"output_dir": "link/run"},
        change=link("link"),
    ),
    Case(
        "home of an unknown user",
        ["output_dir='~nobody_has_this/run'", "no home directory", "Choose another"],
        {"output_dir": "~nobody_has_this/run"},
    ),
    Case("empty folder name", ["output_dir='' is empty", "Set `output_dir`"], {"output_dir": ""}),
    Case("folder name of a space", ["output_dir=' ' is empty", "Set `output_dir`"], {"output_dir": " "}),
    Case("folder name with a NUL", ["output_dir='run\\x00'", "NUL", "Remove it"], NUL),
    Case("folder name that is too long", ["output_dir='xxx", "is too long", "Shorten"], {"output_dir": LONG}),
    Case("model's name that is too long", ["model_name_or_path='xxx", "Shorten"], {"model_name_or_path": LONG}),
    Case("dataset's name that is too long", ["dataset_name='./xxx", "Shorten"], {"dataset_name": f"./{LONG}"}),
    Case("dataset's name with a NUL", ["dataset_name='da\\x00ta'", "NUL"], {"dataset_name": "da\0ta"}),
    Case(
        "checkpoint's name that is too long",
        ["resume_from_checkpoint='xxx", "Shorten"],
        {"resume_from_checkpoint": LONG},
    ),
    Case(
        "deepspeed configuration that is not the package's",
        ["deepspeed='recipes/ds.json'", "does not exist, as seen from", "`opo-trl recipes` lists"],
        {"deepspeed": "recipes/ds.json"},
    ),
    Case(
        "data of the checkout",
        ["dataset_name='benchmarks/data/gpu/x.jsonl'", "does not exist", "source checkout"],
        {"dataset_name": "benchmarks/data/gpu/x.jsonl"},
    ),
    Case("missing file of fsdp", ["fsdp_config='no.json'", "does not exist"], {"fsdp_config": "no.json"}),
    Case(
        "file of deepspeed that is not JSON",
        ["deepspeed='recipe.yaml'", "not a JSON file", "Fix it"],
        {"deepspeed": "recipe.yaml"},
    ),
]

# One case of each kind: `tests/checks/test_ranges.py` covers all ranges, `test_silent.py` what libraries ignore.
KINDS = [
    Case("top_p above 1", ["top_p=1.5", "Set `top_p`", "(0, 1]"], {"top_p": 1.5}),
    Case("adam_beta1 of 1", ["adam_beta1=1.0", "[0, 1)"], {"adam_beta1": 1.0}),
    Case("negative clipping", ["max_grad_norm=-1.0", "0 for no clipping"], {"max_grad_norm": -1}),
    Case("negative KL", ["beta=-0.1", "0 or more"], {"beta": -0.1}),
    Case("max_steps of 0", ["max_steps=0", "-1 to use `num_train_epochs`"], {"max_steps": 0}),
    Case("no epochs", ["num_train_epochs=0.0", "positive"], {"max_steps": -1, "num_train_epochs": 0}),
    Case("saving every 0 steps", ["save_steps=0.0", "at least 1"], {"save_steps": 0}),
    Case("negative seed", ["seed=-1", "from 0 to"], {"seed": -1}),
    Case("dropout of 1", ["lora_dropout=1.0", "[0, 1)"], {"use_peft": True, "lora_dropout": 1.0}),
    Case("rank of 0", ["lora_r=0", "at least 1"], {"use_peft": True, "lora_r": 0}),
    Case(
        "adapters for another task",
        ["lora_task_type='SEQ_CLS'", "CAUSAL_LM"],
        {"use_peft": True, "lora_task_type": "SEQ_CLS"},
    ),
    *[
        Case(
            f"model with {name} of {value}",
            [f"model_init_kwargs={{'{name}': {value!r}", says],
            {"model_init_kwargs": {name: value}},
        )
        for name, value, says in (("vocab_size", 5, "(5, "),)
    ],
    Case("unknown option of the model", ["model_init_kwargs=", "'layers'"], {"model_init_kwargs": {"layers": 3}}),
    Case(
        "dtype by its earlier name",
        ["'torch_dtype'", "Set `dtype`"],
        {"model_init_kwargs": {"torch_dtype": "float32"}},
    ),
    Case(
        "option that the template does not use",
        ["chat_template_kwargs=", "'enable_thinking' has no effect", "Remove"],
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    Case(
        "option of the template that TRL sets",
        ["chat_template_kwargs=", "'tokenize'", "Remove"],
        {"chat_template_kwargs": {"tokenize": False}},
    ),
    Case(
        "best checkpoint without evaluation",
        ["load_best_model_at_end=True has no effect", "`eval_strategy`"],
        {"load_best_model_at_end": True, "save_strategy": "no"},
    ),
    Case("LoRA options without LoRA", ["lora_r=4 has no effect without `use_peft: true`"], {"lora_r": 4}),
    Case(
        "evaluation without data",
        ["eval_strategy: dataset_name='./data' is a folder without split='dev'", "set another split"],
        {"eval_strategy": "steps", "eval_steps": 1, "dataset_test_split": "dev"},
    ),
    Case("synchronized reference without KL", ["sync_ref_model=True", "Set `beta`"], {"sync_ref_model": True}),
    Case(
        "address without a scheme",
        ["vllm_server_base_url='localhost:8000'", "http://"],
        {"vllm_server_base_url": "localhost:8000"},
    ),
]

LAUNCH = [
    *[
        Case(
            f"{package} is not installed ({name})",
            [f"{name}=True", f"needs {package}", "pip install 'opo_trl["],
            {name: True},
            absent=package,
        )
        for name, package in EXTRAS.items()
    ],
    Case(
        "kernels are not installed", ["needs liger_kernel", "`pip install liger-kernel`"], LIGER, absent="liger_kernel"
    ),
    Case(
        "deepspeed is not installed",
        ["deepspeed='ds.json'", "not installed", "pip install 'opo_trl[deepspeed]'"],
        {"deepspeed": "ds.json"},
        absent="deepspeed",
    ),
    Case(
        "deepspeed of accelerate is not installed",
        ["needs deepspeed", "not installed", "pip install 'opo_trl[deepspeed]'"],
        environment={"ACCELERATE_USE_DEEPSPEED": "true"},
        absent="deepspeed",
    ),
    Case(
        "misspelt launcher option",
        ["--num_proceses", "Did you mean `num_processes`?"],
        fields=["--num_proceses", "2"],
        command="launch",
    ),
    Case("missing accelerate file", ["accelerate_config='zero9'", "neither a file"], {"accelerate_config": "zero9"}),
    Case("misspelt key, with launch", ["alhpa=0.4", "Did you mean `alpha`?"], {"alhpa": 0.4}, command="launch"),
]

OTHER_COMMANDS = [
    Case("figures without a run", ["recipe.yaml", "Pass the folder of a run"], fields=["nothing"], command="figures"),
    Case("several without runs", ["'data' has no settings.json"], fields=["data", "data"], command="report"),
]

ALL = [
    *RECIPES,
    *OBJECTIVE,
    *BATCHES,
    *DATA,
    *MODELS,
    *REWARD_FUNCTIONS,
    *RUNS,
    *INSIDE,
    *PATHS,
    *KINDS,
    *LAUNCH,
    *OTHER_COMMANDS,
]
