"""
The public GRPO scripts of docs/migrating.md, reduced to what each relies on: only the class names change.

A reduced script keeps a script's interface (how it makes prompts, rewards, model and trainer, and what it reads
afterwards) at a size that a CPU trains in a second. The page's table names its test.
"""

import asyncio
import json
import re
import signal
import sqlite3
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import datasets
import pytest
import torch
import trl
import yaml
from datasets import Dataset
from helpers import USE_CPU, snapshot
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from side_by_side import CLASSES, Run, moved, run, side_by_side
from tiny_special import save_caller, vision_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import accuracy_reward
from trl.scripts import grpo as trl_script


PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"

SMALL = {
    "use_cpu": USE_CPU,
    "bf16": False,
    "max_completion_length": 12,
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 0.01,
    "report_to": "none",
    "disable_tqdm": True,
}
SUMS = [(f"{a} + {b} =", a + b) for a, b in ((1, 1), (2, 5), (9, 3), (4, 4), (7, 6), (8, 2), (3, 0), (5, 5))]


def ask(question: str, system: str | None = None) -> list[dict[str, str]]:
    user = [{"role": "user", "content": question}]
    return [{"role": "system", "content": system}, *user] if system else user


def texts(completions: list[list[dict[str, str]]]) -> list[str]:
    assert all(message["role"] == "assistant" for messages in completions for message in messages)
    return [messages[0]["content"] for messages in completions]


def vowels(completions, **kwargs) -> list[float]:
    """A reward that a random model's completions differ in."""
    return [float(sum(character in "aeiou0123456789" for character in c[0]["content"])) for c in completions]


# 1. The quick start of TRL


def quick_start(config_class, trainer_class, out: Run, model: str):
    problems = [{"prompt": ask(question), "solution": f"${value}$"} for question, value in SUMS]
    trainer = trainer_class(
        model=model,
        reward_funcs=out.record(accuracy_reward)[0],
        args=config_class(str(out.folder), **SMALL),
        train_dataset=Dataset.from_list(problems),
    )
    trainer.train()
    return trainer


def test_quick_start(tiny_model, tmp_path):
    """Neither `num_generations` nor a batch size is set, and the reward is TRL's, not in a list."""
    for made in side_by_side(quick_start, tmp_path, tiny_model, learns=False):
        calls = made.given("accuracy_reward")
        assert [len(call["completions"]) for call in calls] == [8, 8]
        assert {*calls[0]["solution"]} == {calls[0]["solution"][0]}  # one group
        assert made.entries[0]["rewards/accuracy_reward/mean"] == 0.0
        assert {"model.safetensors", "README.md", "tokenizer.json"} <= {
            name.removeprefix("checkpoint-2/") for name in made.files
        }


# 2. grpo_2048: an environment that rewards a game


class Lamps:
    """A game of three lamps, all of them off at first."""

    def reset(self, **kwargs) -> str:
        self.lamps, self.over = [0, 0, 0], False
        return self.shown

    @property
    def shown(self) -> str:
        return "".join("*" if lamp else "." for lamp in self.lamps)

    def press(self, lamp: int) -> str:
        """
        Switch a lamp.

        Args:
            lamp: its number, 0 to 2.

        Returns:
            The lamps afterwards.
        """
        if self.over:
            raise ValueError("The game is over.")
        self.lamps[lamp] = 1 - self.lamps[lamp]
        self.over = True
        return self.shown


@pytest.fixture(scope="module")
def player(tiny_model, tmp_path_factory) -> str:
    """A model that presses lamp 1, and again, which the game answers with an error."""
    press = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "press", "arguments": {"lamp": 1}}}],
    }
    game = Lamps()
    turns = [
        *ask("Light a lamp." + game.reset()),
        press,
        {"role": "tool", "name": "press", "content": game.press(1)},
        {"role": "assistant", "content": "done"},
    ]
    folder = tmp_path_factory.mktemp("player")
    return save_caller(tiny_model, folder, turns, tools=[game.press], enable_thinking=False)


def reward_lit(environments, **kwargs) -> list[float]:
    return [sum(environment.lamps) + 0.1 * (i % 2) for i, environment in enumerate(environments)]


def grpo_2048(config_class, trainer_class, out: Run, model: str):
    trainer = trainer_class(
        model=model,
        train_dataset=Dataset.from_dict({"prompt": [ask("Light a lamp.") for _ in range(8)]}),
        reward_funcs=out.record(reward_lit)[0],
        args=config_class(
            str(out.folder),
            **{**SMALL, "max_completion_length": 200, "learning_rate": 1e-4},
            chat_template_kwargs={"enable_thinking": False},
            log_completions=True,
            num_completions_to_print=2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
        ),
        environment_factory=Lamps,
        peft_config=LoraConfig(),
    )
    trainer.train()
    return trainer


def test_grpo_2048(player, tmp_path, capsys):
    """An environment per completion; its `reset` ends the prompt, its methods are tools, and the reward reads it."""
    for made in side_by_side(grpo_2048, tmp_path, player):
        first = made.given("reward_lit")[0]
        assert [type(environment) for environment in first["environments"]] == [Lamps] * 8
        assert all(prompt == ask("Light a lamp....") for prompt in first["prompts"])
        turns = [[message["role"] for message in messages] for messages in first["completions"]]
        assert turns.count(["assistant", "tool", "assistant"]) > 5
        assert made.entries[0]["tools/call_frequency"] > 0.5
        assert isinstance(made.trainer.model, PeftModel)
        assert {f"completions/completions_0000{step}.parquet" for step in (1, 2)} <= made.files
    tables = re.findall("─ Step ([12]) ─", capsys.readouterr().out)
    assert tables == ["1", "2", "2"] * 2  # one per step, and one at the end


# 3. grpo_agent: a tool on a database


@contextmanager
def seconds(limit: int):
    """Interrupts by a signal, as the script's tool does: it works in the main thread only."""

    def interrupt(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def look_up(sql: str) -> list[tuple]:
    """
    Read from the table of animals.

    Args:
        sql: a query.

    Returns:
        The rows found.
    """
    with seconds(5), sqlite3.connect("file:animals.db?mode=ro", uri=True) as database:
        return database.execute(sql).fetchall()


QUERY = "SELECT legs FROM animals"


@pytest.fixture(scope="module")
def reader(tiny_model, tmp_path_factory) -> str:
    """A model that queries the database, and answers."""
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"sql": QUERY}}}
    turns = [
        *ask("Has a hen two legs?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "look_up", "content": [(2,)]},
        {"role": "assistant", "content": "*yes*"},
    ]
    folder = tmp_path_factory.mktemp("reader")
    return save_caller(tiny_model, folder, turns, tools=[look_up], enable_thinking=False)


def reward_answer(completions, answer, **kwargs) -> list[float]:
    return [float(f"*{a}*" in c[-1]["content"].lower()) for c, a in zip(completions, answer, strict=True)]


def reward_turns(completions, **kwargs) -> list[float]:
    return [0.1 * any(turn.get("tool_calls") for turn in turns) for turns in completions]


def reward_query(completions, answer, **kwargs) -> list[float]:
    """Reads queries and what they found; in odd rows it is stricter, so that there is something to learn."""
    rewards = []
    for row, turns in enumerate(completions):
        calls = [call for turn in turns for call in turn.get("tool_calls") or ()]
        queries = [call["function"]["arguments"].get("sql", "") for call in calls]
        found = [turn["content"] for turn in turns if turn["role"] == "tool" and isinstance(turn["content"], list)]
        rewards.append(sum("where" not in query.lower() for query in queries) * -0.5 + len(found) - row % 2)
    return rewards


def grpo_agent(config_class, trainer_class, out: Run, model: str, monkeypatch):
    monkeypatch.chdir(out.folder)
    with sqlite3.connect("animals.db") as database:
        database.execute("CREATE TABLE animals (name TEXT, legs INTEGER)")
        database.execute("INSERT INTO animals VALUES ('hen', 2)")
    given = {**SMALL, "max_completion_length": 200, "learning_rate": 1e-4, "disable_tqdm": True}
    line = [f"--{name}={value}" for name, value in given.items()]
    line += [f"--model_name_or_path={model}", f"--output_dir={out.folder}"]
    parser = TrlParser((ScriptArguments, config_class, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config(
        [*line, "--dataset_name=animals", "--push_to_hub=False"]
    )
    assert type(training_args) is config_class
    training_args.chat_template_kwargs = {"enable_thinking": False}
    dataset = Dataset.from_dict({"question": ["Has a hen two legs?"] * 8, "answer": ["yes"] * 8})
    trainer = trainer_class(
        model=model_args.model_name_or_path,
        train_dataset=dataset.map(lambda row: {"prompt": ask(row["question"])}, remove_columns=["question"]),
        eval_dataset=None,
        tools=[look_up],
        reward_funcs=out.record(reward_answer, reward_turns, reward_query),
        args=training_args,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    return trainer


def test_grpo_agent(reader, tmp_path, monkeypatch):
    """The configuration comes from a command line; rewards read tool calls, results and the last message."""
    for made in side_by_side(grpo_agent, tmp_path, reader, monkeypatch):
        (first,) = made.given("reward_query")[:1]
        called = [turns for turns in first["completions"] if len(turns) == 3]
        assert called
        assert called[0][0]["tool_calls"][0]["function"]["arguments"] == {"sql": QUERY}
        assert called[0][1] == {"role": "tool", "name": "look_up", "content": [(2,)]}
        assert first["answer"] == ["yes"] * 8
        assert {f"rewards/reward_{name}/mean" for name in ("answer", "turns", "query")} <= made.entries[0].keys()
        assert {"model.safetensors", "training_args.bin"} <= made.files
        saved = torch.load(made.folder / "training_args.bin", weights_only=False)
        assert saved.to_dict() == made.trainer.args.to_dict()


# 4. trl/scripts/grpo.py, as installed


def scripts_grpo(config_class, trainer_class, out: Run, model: str, data: Path, monkeypatch):
    monkeypatch.setattr(trl, "GRPOTrainer", trainer_class)
    monkeypatch.setattr(trl, "GRPOConfig", config_class)
    made = []

    def kept(*arguments, **named):
        made.append(trainer_class(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(trl, "GRPOTrainer", kept)
    monkeypatch.chdir(data)  # where the dotted path of a reward is looked up
    config = {
        **SMALL,
        "output_dir": str(out.folder),
        "model_name_or_path": model,
        "dataset_name": str(data / "problems"),
        "reward_funcs": ["think_format_reward", "get_soft_overlong_punishment", "own_rewards.vowels"],
        "reward_weights": [1.0, 0.5, 2.0],
        "dtype": "float32",
        "use_peft": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "scale_rewards": False,
        "temperature": 0.9,
        "save_strategy": "no",
    }
    (out.folder.parent / "config.yaml").write_text(yaml.safe_dump(config))
    parser = trl_script.make_parser()
    arguments = parser.parse_args_and_config(
        ["--config", str(out.folder.parent / "config.yaml")], fail_with_unknown_args=False
    )
    trl_script.main(*arguments)
    return made[0]


def test_scripts_grpo(tiny_model, tmp_path, monkeypatch):
    """The script that `trl grpo` runs, in which only the two names are other classes."""
    problems = tmp_path / "problems"
    problems.mkdir()
    for split, rows in (("train", SUMS), ("test", SUMS[:2])):
        lines = [json.dumps({"prompt": ask(question), "solution": f"${value}$"}) for question, value in rows]
        (problems / f"{split}.jsonl").write_text("\n".join(lines))
    (tmp_path / "own_rewards.py").write_text(
        "def vowels(completions, **kwargs):\n"
        "    return [float(sum(c[0]['content'].count(v) for v in 'aeiou')) for c in completions]\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds to it
    for made in side_by_side(scripts_grpo, tmp_path, tiny_model, tmp_path, monkeypatch):
        entry = made.entries[0]
        parts = [
            entry[f"rewards/{n}/mean"] for n in ("think_format_reward", "soft_overlong_punishment_reward", "vowels")
        ]
        assert entry["reward"] == pytest.approx(parts[0] + 0.5 * parts[1] + 2 * parts[2])
        assert isinstance(made.trainer.model, PeftModel)
        assert "adapter_model.safetensors" in made.files
        evaluated = [entry for entry in made.trainer.state.log_history if "eval_reward" in entry]
        assert [entry["step"] for entry in evaluated] == [0, 2]


# 5. GSM8K, by willccbb

XML = re.compile(r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n", re.DOTALL)


def tagged(text: str) -> str:
    return text.rsplit("<answer>", 1)[-1].split("</answer>", 1)[0].strip()


def correctness_reward(prompts, completions, answer, **kwargs) -> list[float]:
    question, responses = prompts[0][-1]["content"], texts(completions)
    print(f"{question}\n{answer[0]}\n{responses[0]}\n{tagged(responses[0])}")
    return [2.0 if tagged(r) == a else 0.0 for r, a in zip(responses, answer, strict=True)]


def int_reward(completions, **kwargs) -> list[float]:
    return [0.5 if tagged(r).isdigit() else 0.0 for r in texts(completions)]


def format_reward(completions, **kwargs) -> list[float]:
    return [0.5 if XML.match(r) else 0.0 for r in texts(completions)]


def count_reward(completions, **kwargs) -> list[float]:
    return [0.125 * r.count("<") - 0.001 * len(r) for r in texts(completions)]


def gsm8k(config_class, trainer_class, out: Run, model_name: str):
    rows = [{"prompt": ask(q, "Use <reasoning> and <answer>."), "answer": str(v), "question": q} for q, v in SUMS]
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    tokenizer.pad_token = tokenizer.eos_token
    before = snapshot(model)
    args = config_class(
        output_dir=str(out.folder),
        run_name="gsm8k",
        **SMALL,
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.1,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        num_generations=4,
        save_steps=100,
        max_grad_norm=0.1,
        log_on_each_node=False,
    )
    rewards = out.record(count_reward, format_reward, int_reward, correctness_reward)
    trainer = trainer_class(
        model=model, processing_class=tokenizer, reward_funcs=rewards, args=args, train_dataset=Dataset.from_list(rows)
    )
    trainer.train()
    assert moved(before, model)  # the script's own object is what is trained
    assert trainer.model is model
    return trainer


def test_gsm8k(tiny_model, tmp_path, capsys):
    """Model and tokenizer are objects; rewards index messages, print, and take the column `answer`."""
    for made in side_by_side(gsm8k, tmp_path, tiny_model):
        first = made.given("correctness_reward")[0]
        assert [message["role"] for message in first["prompts"][0]] == ["system", "user"]
        assert first["question"][0] == first["prompts"][0][-1]["content"]
        assert len({*first["answer"]}) == 1
        assert made.entries[0]["rewards/count_reward/std"] > 0
        assert made.trainer.processing_class.pad_token == "<|im_end|>"
        assert made.trainer.args.run_name == "gsm8k"
    assert all(capsys.readouterr().out.count(f"{question}\n{value}\n") in (0, 2) for question, value in SUMS)


# 6. Countdown, by philschmid


def equation_reward(completions, target, nums, **kwargs) -> list[float]:
    """Completes what the prompt began, and computes the equation found in it."""
    rewards = []
    for completion, wanted, numbers in zip(completions, target, nums, strict=True):
        whole = "<think>" + completion
        try:
            equation = re.search(r"<answer>(.*?)</answer>", whole)[1]
            right = sorted(map(int, re.findall(r"\d+", equation))) == sorted(numbers)
            rewards.append(float(right and eval(equation, {"__builtins__": None}, {}) == wanted))
        except Exception:
            rewards.append(0.0)
    return rewards


def begins_reward(completions, target, **kwargs) -> list[float]:
    return [float(completion[:1].isalpha()) for completion in completions]


def countdown(config_class, trainer_class, out: Run, model: str):
    @dataclass
    class Arguments:
        """The script's own, next to TRL's."""

        dataset_id_or_path: str = "countdown"
        tokenizer_name_or_path: str | None = None

    parser = TrlParser((ModelConfig, Arguments, config_class))
    recipe = {
        **SMALL,
        "model_name_or_path": model,
        "dtype": "float32",
        "use_peft": True,
        "lora_task_type": "CAUSAL_LM",
        "output_dir": str(out.folder),
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "beta": 0.001,
        "use_vllm": False,
        "vllm_gpu_memory_utilization": 0.5,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    path = out.folder.parent / "recipe.yaml"
    del recipe["learning_rate"]
    path.write_text(yaml.safe_dump(recipe) + "learning_rate: 1e-2\n")  # text to YAML, which the parser converts
    model_args, script_args, training_args = parser.parse_args_and_config(["--config", str(path)])
    assert training_args.learning_rate == 0.01
    tokenizer = AutoTokenizer.from_pretrained(script_args.tokenizer_name_or_path or model_args.model_name_or_path)

    def begun(nums: list[int], target: int) -> dict:
        messages = [*ask(f"Make {target} of {nums}."), {"role": "assistant", "content": "Let me think.\n<think>"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        return {"prompt": text, "target": target, "nums": nums}

    rows = [begun([1, 2, n], n + 3) for n in range(10)]
    split = Dataset.from_list(rows).train_test_split(test_size=0.2, seed=0)
    trainer = trainer_class(
        model=model_args.model_name_or_path,
        reward_funcs=out.record(begins_reward, equation_reward),
        args=training_args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        peft_config=get_peft_config(model_args),
    )
    assert get_last_checkpoint(training_args.output_dir) is None
    result = trainer.train(resume_from_checkpoint=None)
    metrics = {**result.metrics, "train_samples": len(split["train"])}
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.model.config.use_cache = True
    trainer.save_model(training_args.output_dir)
    training_args.distributed_state.wait_for_everyone()
    tokenizer.save_pretrained(training_args.output_dir)
    if trainer.accelerator.is_main_process:
        trainer.create_model_card({"tags": ["rl", "tutorial"]})
    out.result = result
    return trainer


def test_countdown(tiny_model, tmp_path):
    """Prompts are text that ends within the assistant's turn; the run is resumable, and its metrics are saved."""
    runs = side_by_side(countdown, tmp_path, tiny_model, learns=False)
    for made in runs:
        first = made.given("equation_reward")[0]
        assert first["prompts"][0].endswith("Let me think.\n<think>")
        assert all(isinstance(completion, str) for completion in first["completions"])
        assert {type(numbers) for numbers in first["nums"]} == {list}
        assert "kl" in made.entries[0]
        assert get_last_checkpoint(str(made.folder)) == str(made.folder / "checkpoint-2")
        assert {"train_results.json", "all_results.json", "trainer_state.json", "README.md"} <= made.files
        # Once more, as the script does when it finds a checkpoint: nothing is left, where GRPOTrainer trains a step.
        again = made.trainer.train(resume_from_checkpoint=get_last_checkpoint(str(made.folder)))
        assert again.global_step == (2 if made is runs[1] else 3)
    of_trl, of_opo = ({*json.loads((made.folder / "train_results.json").read_text())} for made in runs)
    assert of_trl <= of_opo


# 7. The cookbook's language model


def solution_reward(completions, **kwargs) -> list[float]:
    return [float(s in t) for t, s in zip(texts(completions), kwargs["solution"], strict=True)]


def cookbook(config_class, trainer_class, out: Run, model_name: str, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(out.folder / "runs"))
    rows = [{"problem": q, "solution": str(v), "messages": ask(q)} for q, v in SUMS]
    dataset = Dataset.from_list(rows).map(lambda row: {"prompt": ask(row["problem"], "Think first.")})
    dataset = dataset.remove_columns(["messages", "problem"])
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="auto")
    model = get_peft_model(
        model,
        LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
    )
    args = config_class(
        **{**SMALL, "report_to": ["tensorboard"]},
        output_dir=str(out.folder),
        remove_unused_columns=False,
        gradient_accumulation_steps=4,
        per_device_train_batch_size=2,
        num_generations=4,
        push_to_hub=False,
        save_strategy="steps",
        save_steps=1,
    )
    trainer = trainer_class(
        model=model, reward_funcs=out.record(vowels, solution_reward), args=args, train_dataset=dataset
    )
    trainer.train()
    trainer.save_model(args.output_dir)
    return trainer


def test_cookbook_language_model(tiny_model, tmp_path, monkeypatch):
    """The script wraps the model with LoRA itself; a reward finds its column in `kwargs`."""
    for made in side_by_side(cookbook, tmp_path, tiny_model, monkeypatch):
        assert made.given("solution_reward")[0].keys() & {"messages", "problem"} == set()
        assert any(name.startswith("runs/events") for name in made.files)
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), made.folder)
        adapters = [value for name, value in loaded.state_dict().items() if "lora_B" in name]
        assert any(value.any() for value in adapters)
        assert {"checkpoint-1/adapter_model.safetensors", "checkpoint-2/adapter_model.safetensors"} <= made.files


# 8. The cookbook's model of images


def colours_reward(completions: list, solution: list[str], **kwargs) -> list[float | None]:
    return [None if s == "?" else float(len(c[0]["content"])) for c, s in zip(completions, solution, strict=True)]


def cookbook_images(config_class, trainer_class, out: Run, prompt):
    images = [Image.new("RGB", size, "red") for size in ((28, 28), (56, 28), (56, 56), (28, 56))]
    rows = [{"prompt": prompt, "image": image, "solution": s} for image, s in zip(images, "r?gb", strict=True)]
    model, processor = vision_model()
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"]))
    args = config_class(
        **SMALL,
        output_dir=str(out.folder),
        remove_unused_columns=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=2,
        save_strategy="no",
    )
    trainer = trainer_class(
        model=model,
        processing_class=processor,
        reward_funcs=out.record(colours_reward),
        args=args,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    return trainer


def test_cookbook_images(tmp_path):
    """A processor and images; a reward that is `None` for a problem. The chat template is TRL's to apply."""
    for made in side_by_side(cookbook_images, tmp_path, ask("Which colour?")):
        first = made.given("colours_reward")[0]
        assert {image.size for image in first["image"]} <= {(28, 28), (56, 28), (56, 56), (28, 56)}
        assert [part["type"] for part in first["prompts"][0][0]["content"]] == ["image", "text"]
    for side in CLASSES:  # the notebook's text prompts, from which TRL 0.x took the image
        with pytest.raises(ValueError, match="Multimodal training requires conversational prompts"):
            run(cookbook_images, side, tmp_path / "text", "<|vision_start|><|image_pad|><|vision_end|>Which colour?")


# 9. The cookbook's several rewards


def partly_reward(completions, **kwargs) -> list[float]:
    return [sum(0.5 if t.count(tag) == 1 else -1.0 for tag in ("<", ">", "a")) for t in texts(completions)]


def numbers_reward(prompts, completions, answer, **kwargs) -> list[float]:
    found = [re.search(r"[\d.]+", t) for t in texts(completions)]
    return [0 if f is None else 1.5 * (f[0] == a) - 0.5 for f, a in zip(found, answer, strict=True)]


def cookbook_rewards(config_class, trainer_class, out: Run, model_name: str):
    dataset = Dataset.from_list([{"question": q, "answer": f"so #### {v}"} for q, v in SUMS])
    dataset = dataset.map(
        lambda row: {"prompt": ask(row["question"], "Show your work."), "answer": row["answer"].split("#### ")[1]}
    )
    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    )
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_name, quantization_config=in_4_bits, dtype=torch.float32),
        LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], bias="none", task_type="CAUSAL_LM"),
    )
    args = config_class(
        **SMALL,
        output_dir=str(out.folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        max_grad_norm=0.1,
    )
    described = {name: getattr(args, name) for name in ("num_generations", "learning_rate", "max_completion_length")}
    assert described["num_generations"] == 8
    trainer = trainer_class(
        model=model, reward_funcs=out.record(partly_reward, numbers_reward), args=args, train_dataset=dataset
    )
    assert len(trainer.reward_funcs) == 2
    trainer.train()
    # As the notebook tries its model.
    device = trainer.model.device
    tokens = trainer.processing_class("1 + 1 =", return_tensors="pt").to(device)
    assert len(trainer.model.generate(**tokens, max_new_tokens=3)[0]) > len(tokens["input_ids"][0])
    return trainer


def test_cookbook_several_rewards(tiny_model, tmp_path):
    """A base in 4 bits, rewards below 0 and integers, an `answer` that `map` has overwritten, and generation."""
    for made in side_by_side(cookbook_rewards, tmp_path, tiny_model):
        assert made.given("numbers_reward")[0]["answer"][0].isdigit()
        entry = made.entries[0]
        parts = entry["rewards/partly_reward/mean"] + entry["rewards/numbers_reward/mean"]
        assert entry["reward"] == pytest.approx(parts)
        assert entry["reward"] < 0


# 10. The course, chapter 12


def course(config_class, trainer_class, out: Run, model_name: str):
    def reward_len(completions, **kwargs):
        return [-abs(8 - len(completion)) for completion in completions]

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_name, dtype="auto"),
        LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
    )
    dataset = datasets.DatasetDict({"train": Dataset.from_dict({"prompt": [q for q, _ in SUMS]})})
    args = config_class(
        **{**SMALL, "max_steps": -1},
        output_dir=str(out.folder),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=8,
        optim="adamw_torch",
        num_train_epochs=1,
        remove_unused_columns=False,
    )
    trainer = trainer_class(
        model=model, reward_funcs=out.record(reward_len), args=args, train_dataset=dataset["train"]
    )
    trainer.train()
    out.merged = trainer.model.merge_and_unload()
    out.merged.save_pretrained(out.folder / "merged")
    return trainer


def test_course(tiny_model, tmp_path):
    """Plain text, integer rewards, an epoch, and a model that is merged and loads without PEFT."""
    for made in side_by_side(course, tmp_path, tiny_model):
        assert made.trainer.state.global_step == 4  # 8 prompts, 2 in each rollout
        first = made.given("reward_len")[0]
        assert all(isinstance(text, str) for text in first["prompts"] + first["completions"])
        loaded = AutoModelForCausalLM.from_pretrained(made.folder / "merged")
        assert moved(snapshot(AutoModelForCausalLM.from_pretrained(tiny_model)), loaded)


def test_fields_that_trl_has_removed_are_rejected_alike(tmp_path):
    """The course, the cookbook and both gists set them for TRL 0.x: the line has to go with either class."""
    for removed in ("max_prompt_length", "vllm_device", "warmup_ratio"):
        messages = []
        for config_class, _ in CLASSES.values():
            with pytest.raises(TypeError, match=removed) as raised:
                config_class(str(tmp_path), **SMALL, **{removed: 512})
            messages.append(str(raised.value).split(".")[-1].replace(config_class.__name__, "Config"))
        assert messages[0] == messages[1]


# 11. The reward functions of the documentation


def patterns(config_class, trainer_class, out: Run, model: str):
    async def slow_reward(prompts, completions, **kwargs):
        await asyncio.sleep(0.001)
        return [1.0 if completion else 0.0 for completion in completions]

    def tokens_reward(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def reference_reward(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
        rewards = [float(t in c) for c, t in zip(completions, ground_truth, strict=True)]
        log_extra("golden", list(ground_truth))
        log_metric("accuracy", sum(rewards) / len(rewards))
        return rewards

    def math_reward(completions, task, **kwargs):
        return [float(c.count("1")) if t == "math" else None for c, t in zip(completions, task, strict=True)]

    def code_reward(completions, task, trainer_state, **kwargs):
        step = trainer_state.global_step
        return [len(c) / (1 + step) if t == "code" else None for c, t in zip(completions, task, strict=True)]

    rows = [{"prompt": q, "ground_truth": str(v), "task": ("math", "code", "none")[v % 3]} for q, v in SUMS]
    trainer = trainer_class(
        model=model,
        reward_funcs=out.record(tokens_reward, slow_reward, reference_reward, math_reward, code_reward),
        args=config_class(
            str(out.folder),
            **SMALL,
            log_completions=True,
            num_generations=4,
            per_device_train_batch_size=8,
            reward_weights=[0.1, 1.0, 1.0, 2.0, 0.5],
            scale_rewards="batch",
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    return trainer


def test_reward_functions_of_the_documentation(tiny_model, tmp_path):
    """Token IDs, references, `async def`, `None` for another task, the step, own columns and own metrics."""
    runs = side_by_side(patterns, tmp_path, tiny_model)
    for made in runs:
        assert [step for name, _, step in made.calls if name == "code_reward"] == [0, 1]
        assert made.given("code_reward")[0]["trainer_state"] is made.trainer.state
        entry = made.entries[0]
        assert entry["accuracy"] == entry["rewards/reference_reward/mean"]
        # 1 + 1 and 2 + 5: the tasks of the first rollout are "none" and "code".
        assert entry["rewards/math_reward/mean"] is None
        assert entry["rewards/code_reward/mean"] > 0
    tables = [Dataset.from_parquet(str(made.folder / "completions/completions_00001.parquet")) for made in runs]
    of_trl, of_opo = (table.to_dict() for table in tables)
    assert {"golden", "prompt", "completion", "advantage", "slow_reward"} <= of_trl.keys()
    assert json.dumps(of_trl) == json.dumps(of_opo)


# 12. The environments of the documentation


class Counter:
    """Sets its own task, and owns the reward."""

    def reset(self, **kwargs) -> str:
        self.seen, self.count = kwargs, 0
        return "2+3"

    def get_reward(self) -> float:
        return float(self.count)

    def add(self, a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: one number.
            b: the other.

        Returns:
            Their sum.
        """
        self.count += 1
        return a + b


class Silent(Counter):
    """Scores asynchronously."""

    async def get_reward(self) -> float:
        return 0.25


@pytest.fixture(scope="module")
def adder(tiny_model, tmp_path_factory) -> str:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    turns = [
        *ask("2+3"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "assistant", "content": "5"},
    ]
    return save_caller(tiny_model, tmp_path_factory.mktemp("adder"), turns, tools=[Counter().add])


def environments(config_class, trainer_class, out: Run, model: str, several: bool):
    def odd_rows(environments, **kwargs):
        return [float(i % 2) for i, _ in enumerate(environments)]

    options = {**SMALL, "max_completion_length": 150, "learning_rate": 1e-4, "per_device_train_batch_size": 8}
    named = {"counter": Counter, "silent": Silent}
    trainer = trainer_class(
        model=model,
        args=config_class(str(out.folder), **options, num_generations=4),
        train_dataset=Dataset.from_dict({"environment": [*named] * 4, "level": [*range(8)]}) if several else None,
        reward_funcs=out.record(odd_rows) if several else None,
        environment_factory=named if several else Counter,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("several", [False, True])
def test_environments_of_the_documentation(adder, tmp_path, several):
    """Without a dataset or rewards; or several by name, without prompts."""
    for made in side_by_side(environments, tmp_path, adder, several, learns=several):
        trainer, entry = made.trainer, made.entries[0]
        assert entry["tools/call_frequency"] > 0.5
        assert entry["rewards/Counter/mean"] > 0.5
        if several:
            assert entry["rewards/Silent/mean"] == 0.25
            assert {*made.given("odd_rows")[0]["environment"]} == {"counter", "silent"}
            assert "level" in trainer.environments[0].seen
            assert "environment" not in trainer.environments[0].seen
        else:
            assert len(trainer.train_dataset) == 2
            assert trainer.reward_func_names == ["Counter"]


# The page


def test_page_names_the_tests_of_its_scripts():
    table = PAGE.read_text(encoding="utf-8").split("## The twelve scripts")[1].split("\n\n")[2]
    rows = table.splitlines()[2:]
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert len(rows) == 12
    assert all(len(names) == 1 and callable(globals()[names[0]]) for names in named)
    assert len({names[0] for names in named}) == 12
