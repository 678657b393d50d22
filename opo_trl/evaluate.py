"""
Accuracy of the policy on problems with a checkable answer, with its confidence interval.

Completions come from the engine that training uses (transformers or vLLM, gathered weights under ZeRO-3 and FSDP
included), the problems spread over the processes. The random state of training is left as it was.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from statistics import NormalDist, stdev
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate.utils import gather_object
from datasets import Dataset


if TYPE_CHECKING:
    from trl import GRPOTrainer

Decoding = Literal["greedy", "sampled"]


@dataclass
class Evaluation:
    """
    Result of [`evaluate`].

    Args:
        correct (`int`), scored (`int`):
            How many completions were right, of how many that could be scored.
        unscorable (`int`):
            How many completions the reward function returned `None` for; they are in neither count.
        samples (`list[dict]`):
            Prompt, completion and reward of each completion, in the order of the data set.
        per_problem (`int`, *optional*, defaults to `1`):
            Completions of each problem.
    """

    correct: int
    scored: int
    unscorable: int
    samples: list[dict[str, Any]] = field(repr=False)
    per_problem: int = 1

    @property
    def accuracy(self) -> float:
        """Share of the scored completions that were right; NaN when none could be scored."""
        return self.correct / self.scored if self.scored else float("nan")

    @property
    def by_problem(self) -> list[tuple[int, int]]:
        """Right and scored completions of each problem that has any."""
        rewards = [sample["reward"] for sample in self.samples]
        groups = [rewards[i : i + self.per_problem] for i in range(0, len(rewards), self.per_problem)]
        scored = [[reward >= 1.0 for reward in group if reward is not None] for group in groups]
        return [(sum(right), len(right)) for right in scored if right]

    def pass_at(self, k: int) -> float:
        """
        Mean probability that at least one of `k` of a problem's completions is right, by the unbiased estimate of
        Chen et al. (2021, arXiv 2107.03374); problems with fewer than `k` scored completions are left out, and NaN
        without any other.
        """
        shares = [1 - math.comb(n - right, k) / math.comb(n, k) for right, n in self.by_problem if n >= k]
        return sum(shares) / len(shares) if shares else float("nan")

    def summary(self) -> dict[str, Any]:
        """
        Counts, accuracy and its 95 % interval (`low`, `high`), without the samples: Wilson's for one completion per
        problem; for several, the normal one over problems. These also have `pass_at`, for 1, 2, 4 … completions.
        """
        counts = {"correct": self.correct, "scored": self.scored, "unscorable": self.unscorable}
        if self.per_problem == 1:
            low, high = wilson_interval(self.correct, self.scored)
            return {"accuracy": self.accuracy, "low": low, "high": high, **counts}
        low, high = _interval_over_problems([right / n for right, n in self.by_problem], self.accuracy)
        powers = [2**i for i in range(self.per_problem.bit_length())]
        pass_at = {str(k): self.pass_at(k) for k in powers}
        return {"accuracy": self.accuracy, "low": low, "high": high, **counts, "pass_at": pass_at}


def _interval_over_problems(shares: list[float], mean: float) -> tuple[float, float]:
    if len(shares) < 2:
        return 0.0, 1.0
    half = NormalDist().inv_cdf(0.975) * stdev(shares) / len(shares) ** 0.5
    return max(mean - half, 0.0), min(mean + half, 1.0)


def wilson_interval(correct: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """
    Score interval of a proportion (Wilson, 1927), which stays inside [0, 1] and holds its level near both ends.

    Args:
        correct (`int`), total (`int`):
            Successes of trials.
        confidence (`float`, *optional*, defaults to `0.95`):
            Confidence level, in `(0, 1)`.

    Returns:
        `tuple[float, float]`: lower and upper bound; `(0, 1)` without any trial.
    """
    if total == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = correct / total
    center = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * (share * (1 - share) / total + z**2 / (4 * total**2)) ** 0.5
    # At the ends the bound is exactly 0 or 1, which rounding would miss.
    return 0.0 if correct == 0 else center - half, 1.0 if correct == total else center + half


def evaluate(
    trainer: "GRPOTrainer", dataset: Dataset, *, decoding: Decoding = "sampled", seed: int = 0, samples: int = 1
) -> Evaluation:
    """
    Let the policy solve each problem of a data set. To be called on every process.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trainer that holds the policy, the generation engine and the reward functions. A problem counts as solved
            when the first reward function gives its completion the full 1.0.
        dataset (`datasets.Dataset`):
            Rows with `prompt` and the columns that the reward function reads.
        decoding (`str`, *optional*, defaults to `"sampled"`):
            `"greedy"`, or `"sampled"` with the trainer's own temperature and truncation.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sampling.
        samples (`int`, *optional*, defaults to `1`):
            Completions of each problem.

    Returns:
        [`Evaluation`]: the same on every process.

    Raises:
        `ValueError`: an empty data set, or an unknown decoding.
    """
    if len(dataset) == 0:
        raise ValueError("dataset has 0 rows: there is nothing to evaluate. Pass at least one problem.")
    accelerator = trainer.accelerator
    batch = trainer.args.per_device_eval_batch_size
    total = len(dataset) * samples
    per_process = -(-total // accelerator.num_processes)
    first = accelerator.process_index * per_process
    # Every process has to take part in every generation, so a short share is filled up with rows that do not count.
    mine = [dataset[min(i, total - 1) // samples] for i in range(first, first + per_process)]
    with _evaluation_mode(trainer, decoding), _own_random_state(seed, accelerator.process_index):
        solved = [s for start in range(0, per_process, batch) for s in _solve(trainer, mine[start : start + batch])]
    gathered = gather_object(solved)[:total]
    scored = [sample["reward"] for sample in gathered if sample["reward"] is not None]
    return Evaluation(
        correct=sum(reward >= 1.0 for reward in scored),
        scored=len(scored),
        unscorable=len(gathered) - len(scored),
        samples=gathered,
        per_problem=samples,
    )


def _solve(trainer: "GRPOTrainer", rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    prompts = [row["prompt"] for row in rows]
    _, completion_ids, _, completions, *_ = trainer._generate(prompts)
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    score: Any = trainer.reward_funcs[0]
    rewards = score(
        prompts=prompts, completions=completions, completion_ids=completion_ids, trainer_state=trainer.state, **columns
    )
    return [
        {"prompt": prompt, "completion": completion, "reward": reward}
        for prompt, completion, reward in zip(prompts, completions, rewards, strict=True)
    ]


@contextmanager
def _evaluation_mode(trainer: "GRPOTrainer", decoding: Decoding) -> Iterator[None]:
    """One completion per prompt, the wanted decoding, and no trace of it in the trainer's own metrics."""
    if decoding not in ("greedy", "sampled"):
        raise ValueError(f"decoding={decoding!r} is unknown. Use 'greedy' or 'sampled'.")
    holder, name = (trainer.vllm_generation, "temperature") if trainer.use_vllm else (trainer, "generation_config")
    was_training, generations, setting = trainer.model.training, trainer.num_generations_eval, getattr(holder, name)
    trainer.model.eval()
    trainer.num_generations_eval = 1
    if decoding == "greedy":
        setattr(holder, name, 0.0 if trainer.use_vllm else _greedy(setting))
    try:
        yield
    finally:
        setattr(holder, name, setting)
        trainer.num_generations_eval = generations
        trainer.model.train(was_training)
        trainer._metrics["eval"].clear()


def _greedy(generation_config):
    greedy = copy(generation_config)
    greedy.do_sample = False
    greedy.temperature = greedy.top_p = greedy.top_k = greedy.min_p = None
    return greedy


@contextmanager
def _own_random_state(seed: int, process_index: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed + 10_007 * process_index)
        yield
