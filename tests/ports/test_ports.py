"""
The public GRPO scripts of docs/migrating.md, reduced to what each relies on: only the class names change.

A reduced script keeps a script's interface (how it makes prompts, rewards, model and trainer, and what it reads
afterwards) at a size that a CPU trains in a second.
"""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch
import trl
import yaml
from datasets import Dataset
from helpers import snapshot
from peft import PeftModel
from side_by_side import SMALL, Run, side_by_side
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.rewards import accuracy_reward
from trl.scripts import grpo as trl_script


SUMS = [(f"{a} + {b} =", a + b) for a, b in ((1, 1), (2, 5), (9, 3), (4, 4), (7, 6), (8, 2), (3, 0), (5, 5))]


def ask(question: str, system: str | None = None) -> list[dict[str, str]]:
    user = [{"role": "user", "content": question}]
    return [{"role": "system", "content": system}, *user] if system else user


def texts(completions: list[list[dict[str, str]]]) -> list[str]:
    assert all(message["role"] == "assistant" for messages in completions for message in messages)
    return [messages[0]["content"] for messages in completions]


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


# 2. trl/scripts/grpo.py, as installed


def scripts_grpo(config_class, trainer_class, out: Run, model: str, data: Path, monkeypatch):
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


# 3. GSM8K, by willccbb


def tagged(text: str) -> str:
    return text.rsplit("<answer>", 1)[-1].split("</answer>", 1)[0].strip()


def correctness_reward(prompts, completions, answer, **kwargs) -> list[float]:
    question, responses = prompts[0][-1]["content"], texts(completions)
    print(f"{question}\n{answer[0]}\n{responses[0]}\n{tagged(responses[0])}")
    return [2.0 if tagged(r) == a else 0.0 for r, a in zip(responses, answer, strict=True)]


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
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        num_generations=4,
    )
    rewards = out.record(count_reward, correctness_reward)
    trainer = trainer_class(
        model=model, processing_class=tokenizer, reward_funcs=rewards, args=args, train_dataset=Dataset.from_list(rows)
    )
    trainer.train()
    # The script's own object is what is trained.
    assert not all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert trainer.model is model
    return trainer


def test_gsm8k(tiny_model, tmp_path, capsys):
    """Model and tokenizer are objects; rewards index messages, print, and take the column `answer`."""
    for made in side_by_side(gsm8k, tmp_path, tiny_model):
        first = made.given("correctness_reward")[0]
        assert [message["role"] for message in first["prompts"][0]] == ["system", "user"]
        assert len({*first["answer"]}) == 1
        assert made.entries[0]["rewards/count_reward/std"] > 0
        assert made.trainer.processing_class.pad_token == "<|im_end|>"
        assert made.trainer.args.run_name == "gsm8k"
    assert all(capsys.readouterr().out.count(f"{question}\n{value}\n") in (0, 2) for question, value in SUMS)


# 4. The reward functions of the documentation


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
