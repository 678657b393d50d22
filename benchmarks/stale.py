"""Runs on the embedded arithmetic task with completions of a given age: training and measuring, in this process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from opo_trl.asynchronous.attention import in_pytorch
from opo_trl.asynchronous.in_process import InProcessWorker, sample
from opo_trl.data.arithmetic import arithmetic_reward, base_model_path, make_problems


LEVEL, TEST_PROBLEMS, MAX_TOKENS, BATCH, GROUP = "Level 3", 500, 40, 48, 6


def common_fields(folder: str | Path, learning_rate: float, seed: int, *, max_steps: int) -> dict[str, Any]:
    """Fields of every run: 8 prompts × 6 completions per optimizer step, without clipping, on a CPU, silent."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "num_generations": GROUP,
        "max_completion_length": MAX_TOKENS,
        "max_steps": max_steps,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "seed": seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def make_trainer(kind: Any, args: Any, staleness: int) -> Any:
    """An asynchronous trainer whose completions are written in this process, by a policy some versions old."""
    model, tokenizer, data = base_model_path(), make_tokenizer(), training_problems(args.seed)
    worker = InProcessWorker(model, args, data, arithmetic_rewards, tokenizer, staleness=staleness)
    named = {"processing_class": tokenizer, "rollout_worker": worker, "weight_transfer": worker}
    with in_pytorch(torch.device("cpu")):
        return kind(model, args=args, train_dataset=data, **named)


def make_tokenizer() -> Any:
    """The base model's tokenizer, with a chat template that adds nothing."""
    tokenizer = AutoTokenizer.from_pretrained(base_model_path())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
    return tokenizer


def training_problems(seed: int) -> Dataset:
    """The problems as conversations, in the order of a seed."""
    prompts = [
        {"prompt": [{"role": "user", "content": problem["problem"]}], "solution": problem["solution"]}
        for problem in make_problems("train", [LEVEL])
    ]
    return Dataset.from_list(prompts).shuffle(seed=seed)


def arithmetic_rewards(completions: list, solution: list[str], **_: Any) -> list[float]:
    """Whether a conversation's only answer is right."""
    return arithmetic_reward([turns[0]["content"] for turns in completions], solution)


def accuracies(model: Any, tokenizer: Any, *, for_tuning: bool = False, draws: int = 7) -> Mapping[str, float]:
    """Sampled and greedy accuracy on the first half of the test problems, or the other, in float32 as trained."""
    policy = AutoModelForCausalLM.from_pretrained(base_model_path(), dtype=torch.float32).eval()
    policy.load_state_dict(model.state_dict(), strict=False)
    problems = list(make_problems("test", [LEVEL]))
    problems = problems[TEST_PROBLEMS:] if for_tuning else problems[:TEST_PROBLEMS]
    solutions, found = [problem["solution"] for problem in problems], {}
    for name, temperature in (("sampled", 1.0), ("greedy", 1e-4)):
        tokens, _ = sample(
            policy,
            [tokenizer(problem["problem"])["input_ids"] for problem in problems],
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            eos=torch.tensor([tokenizer.eos_token_id]),
            generator=torch.Generator().manual_seed(draws),
        )
        texts = [_text(ids, tokenizer) for ids in tokens.tolist()]
        found[name] = sum(arithmetic_reward(texts, solutions)) / len(texts)
    return found


def _text(ids: list[int], tokenizer: Any) -> str:
    """What was written up to the end of the turn."""
    end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else None
    return tokenizer.decode(ids[:end], skip_special_tokens=True)
