"""Runs on the embedded arithmetic task with completions of a given age: training and measuring, in this process."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.data.arithmetic import arithmetic_reward, base_model_path, make_problems

from .sampling import sample, up_to_end


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


@dataclass(frozen=True)
class Written:
    """A rollout that was written before it is trained on, at a number of rollouts since the first."""

    at: int
    prompts: list[Any]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logps: list[Tensor]


class StaleTrainer(OPOTrainer):
    """
    Trains on completions that the policy wrote `age` rollouts ago, or before the first step as long as there were
    fewer. They are sampled with a generator of their own, from the model in evaluation. The policy of a rollout writes
    those of `age` rollouts later, so that no earlier weights have to be kept.

    Args:
        model, rewards, args, tokenizer: as for [`OPOTrainer`].
        age (`int`): in rollouts.
        problems (`Dataset`): that are trained on in their order, once.
        ends (`Iterable[int]`, *optional*): tokens that end a completion; by default the end of a sequence.

    Recorded runs were made by `AsyncOPOTrainer`, which commit 6495d6c5ac08 has. With the same seed this is the same
    run up to rounding: prompts, samples, ages and optimizer steps are the same.
    """

    sample = staticmethod(sample)

    def __init__(
        self,
        model: str,
        rewards: Any,
        *,
        args: OPOConfig,
        age: int,
        problems: Dataset,
        tokenizer: Any,
        ends: Iterable[int] = (),
    ):
        super().__init__(
            model,
            rewards,
            args=args,
            train_dataset=problems,
            processing_class=tokenizer,
            rollout_func=self._take,
        )
        self._age, self._problems = age, problems
        self._ends = torch.tensor([*ends] or [tokenizer.eos_token_id])
        self._writer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._generator = torch.Generator().manual_seed(args.seed)
        self._ahead: deque[Written] = deque()
        self._n_written = self._n_taken = 0
        self._current: Written | None = None  # the rollout that is trained on

    def _take(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`."""
        n_rollouts = self.args.max_steps // self.args.num_iterations
        self._writer.load_state_dict(self.model.state_dict(), assign=True)  # the same tensors, not copies of them
        while self._n_written < min(self._n_taken + self._age + 1, n_rollouts):
            self._ahead.append(self._write())
            self._n_written += 1
        self._current = self._ahead.popleft()
        self._n_taken += 1
        if self._current.prompts != prompts:
            raise RuntimeError("The prompts of this rollout are not the next problems in their order.")
        logprobs = [row.tolist() for row in self._current.logps]
        return {
            "prompt_ids": self._current.prompt_ids,
            "completion_ids": self._current.completion_ids,
            "logprobs": logprobs,
        }

    def _write(self) -> Written:
        """The next rollout, of the next problems."""
        group = self.args.num_generations
        n_prompts = self.args.per_device_train_batch_size // group
        first = self._n_written * n_prompts
        prompts = [prompt for prompt in self._problems["prompt"][first : first + n_prompts] for _ in range(group)]
        prompt_ids = self._ids_of(prompts)
        tokens, logps = self.sample(
            self._writer,
            prompt_ids,
            max_tokens=self.args.max_completion_length,
            temperature=self.args.temperature,
            eos=self._ends,
            generator=self._generator,
        )
        ends = self._ends.tolist()
        completion_ids = [up_to_end(ids, *ends) for ids in tokens.tolist()]
        kept = [row[: len(ids)] for row, ids in zip(logps, completion_ids, strict=True)]
        return Written(self._n_taken, prompts, prompt_ids, completion_ids, kept)

    def _ids_of(self, prompts: list[Any]) -> list[list[int]]:
        if isinstance(prompts[0], str):
            return self.processing_class(prompts)["input_ids"]
        template = {"add_generation_prompt": True, "return_dict": True}
        return self.processing_class.apply_chat_template(prompts, **template)["input_ids"]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rollout = super()._generate_and_score_completions(inputs)
        assert self._current is not None
        rollout["old_per_token_logps"] = pad_sequence(self._current.logps, batch_first=True)
        age_in_steps = (self._n_taken - 1 - self._current.at) * self.args.num_iterations
        rollout["age"] = torch.full_like(rollout["advantages"], age_in_steps)
        return rollout

    def _samples(self, inputs: Mapping[str, Any], logps: Tensor) -> Any:
        samples = super()._samples(inputs, logps)
        return replace(samples, age=samples.age + inputs["age"], reused=True)


def of_arithmetic(args: OPOConfig) -> dict[str, Any]:
    """What a [`StaleTrainer`] on the embedded task is made of."""
    return {
        "model": base_model_path(),
        "rewards": arithmetic_rewards,
        "problems": training_problems(args.seed),
        "tokenizer": make_tokenizer(),
    }


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
    policy = _base_model()
    policy.load_state_dict(model.state_dict(), strict=False)
    problems = list(make_problems("test", [LEVEL]))
    problems = problems[TEST_PROBLEMS:] if for_tuning else problems[:TEST_PROBLEMS]
    solutions = [problem["solution"] for problem in problems]
    prompts = [tokenizer(problem["problem"])["input_ids"] for problem in problems]
    found = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 1e-4)):
        tokens, _ = sample(
            policy,
            prompts,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            eos=torch.tensor([tokenizer.eos_token_id]),
            generator=torch.Generator().manual_seed(draws),
        )
        ends = [up_to_end(ids, tokenizer.eos_token_id) for ids in tokens.tolist()]
        texts = tokenizer.batch_decode(ends, skip_special_tokens=True)
        found[name] = sum(arithmetic_reward(texts, solutions)) / len(texts)
    return found


def _base_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(base_model_path(), dtype=torch.float32).eval()
