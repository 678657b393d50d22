"""
Accuracy of the policy on problems with a checkable answer, with its confidence interval.

Completions are generated and scored by the trainer's own methods, as in training: by its engine (transformers or vLLM,
including gathered weights under ZeRO-3 and FSDP), with its tools, environments and images, and with a subclass's
overrides. The problems are distributed over the processes. An evaluation leaves no trace in the trainer: no metric,
counter or log entry, training continues from its own random state, and its environments are not touched.
"""

import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from statistics import NormalDist, stdev
from typing import TYPE_CHECKING, Any, Literal, cast


# First, because it checks versions: another release may lack names that are imported below.
from . import compatibility  # isort: skip  # noqa: F401

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from scipy.stats import binomtest
from tqdm import tqdm
from transformers import set_seed
from trl.trainer.utils import strip_images_from_messages

from .patching import temporarily


if TYPE_CHECKING:
    from trl import GRPOTrainer

Decoding = Literal["greedy", "sampled"]


@dataclass
class Evaluation:
    """
    Result of [`evaluate`]: how many completions are `correct`, `scored` and `unscorable`, and the `accuracy`, the
    fraction of the scored ones that are correct (NaN without any).

    `samples` are prompt, completion and reward of each completion, in the order of the dataset, with `None` for the
    reward of an unscored one; there are `per_problem` for each problem.
    """

    samples: list[dict[str, Any]] = field(repr=False)
    per_problem: int = 1

    def __post_init__(self):
        """Count the completions by their rewards: 1 or more is correct, `None` cannot be scored."""
        rewards = [sample["reward"] for sample in self.samples]
        self.by_problem = []  # (number of correct, number of scored completions) of each problem with a scored one
        for start in range(0, len(rewards), self.per_problem):
            of_problem = rewards[start : start + self.per_problem]
            are_correct = [reward >= 1.0 for reward in of_problem if reward is not None]
            if are_correct:
                self.by_problem.append((sum(are_correct), len(are_correct)))
        self.correct = sum(n_correct for n_correct, _ in self.by_problem)
        self.scored = sum(n_scored for _, n_scored in self.by_problem)
        self.unscorable = len(rewards) - self.scored  # the reward function returned `None`
        self.accuracy = self.correct / self.scored if self.scored else float("nan")

    def summary(self) -> dict[str, Any]:
        """
        Counts, accuracy and its 95 % interval (`low`, `high`), without the samples. With one completion per problem it
        is Wilson's interval; with several it is the normal one over problems, or Wilson's where these are all equal.
        """
        shares = [n_correct / n_scored for n_correct, n_scored in self.by_problem]  # of correct ones, of each problem
        are_equal = len(set(shares)) <= 1  # Without spread, the normal interval would be a single point.
        if self.per_problem == 1 or are_equal:
            low, high = wilson_interval(round(sum(shares)), len(shares))
        else:
            half_width = NormalDist().inv_cdf(0.975) * stdev(shares) / len(shares) ** 0.5
            low = max(self.accuracy - half_width, 0.0)
            high = min(self.accuracy + half_width, 1.0)
        return {
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "correct": self.correct,
            "scored": self.scored,
            "unscorable": self.unscorable,
        }


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """
    95 % score interval of `correct` of `total` trials (Wilson, 1927): it stays inside [0, 1] and keeps its coverage
    near both ends; `(0, 1)` without trials.
    """
    if total == 0:
        return 0.0, 1.0
    interval = binomtest(correct, total).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


def evaluate(
    trainer: "GRPOTrainer", dataset: Dataset, *, decoding: Decoding = "sampled", seed: int = 0, samples: int = 1
) -> Evaluation:
    """
    Measure the policy's accuracy on the problems of a dataset. Call it on every process.

    Before `train()` this works on one device and under DDP. DeepSpeed and FSDP place and shard the model in `train()`;
    with them, call it in a callback's `on_train_begin` or later.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trainer with the policy, the generation engine and the reward functions. All of these are called; a
            completion is correct when the first one gives it 1.0.
        dataset (`datasets.Dataset`), samples (`int`, *optional*, defaults to `1`):
            Rows as for training: `prompt` and the columns that the reward functions read; and completions of each.
        decoding (`str`, *optional*, defaults to `"sampled"`):
            `"greedy"`, or `"sampled"` with the trainer's own temperature and truncation. A `rollout_func` decodes as
            it does in training.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sampling, and of Python's and NumPy's random numbers. A vLLM server draws its own.

    Returns:
        [`Evaluation`]: the same on every process.

    Raises:
        `ValueError`: an unknown decoding.
        [`RewardError`]: a reward function raises, or does not return one number, or `None`, for each completion.
    """
    if decoding not in ("greedy", "sampled"):
        raise ValueError(f"decoding={decoding!r} is unknown. Use 'greedy' or 'sampled'.")
    accelerator = trainer.accelerator
    batch_size = trainer.args.per_device_eval_batch_size
    total = len(dataset) * samples  # completions
    per_process = math.ceil(total / accelerator.num_processes)
    # Completions are numbered through all problems, `samples` of each, and a process makes those of one stretch.
    first = accelerator.process_index * per_process
    rows = []
    for number in range(first, first + per_process):
        # Every process takes part in every generation, so one with fewer completions repeats the last, uncounted.
        number = min(number, total - 1)
        rows.append(dataset[number // samples])
    twin = _twin(trainer)
    was_training = trainer.model.training
    scored_rows = []
    try:
        with _decoding_as(twin, decoding), _own_random_state(trainer, seed):
            is_hidden = trainer.args.disable_tqdm or not accelerator.is_main_process
            starts = range(0, per_process, batch_size)
            for start in tqdm(starts, f"accuracy, {decoding}", leave=False, disable=is_hidden):
                scored_rows += _complete_and_score(twin, rows[start : start + batch_size])
    finally:
        trainer.model.train(was_training)
        if trainer.use_vllm:  # the twin has given vLLM the weights of this step: they need not be sent again
            trainer._last_loaded_step = twin._last_loaded_step
    return Evaluation(gather_object(scored_rows)[:total], per_problem=samples)


def _twin(trainer: "GRPOTrainer") -> Any:
    """
    A shallow copy of a trainer that makes one completion per prompt. It has the trainer's model, engine, tools and
    rewards; its metrics, logs and counters, and whatever an override sets in it, are its own.
    """
    twin: Any = copy(trainer)
    twin.num_generations_eval = 1
    # No score depends on the log-probabilities of behaviour policy, reference and vLLM's correction.
    twin.vllm_importance_sampling_correction = False
    twin._get_per_token_logps_and_entropies = lambda *args, **named: (None, None, None)
    twin.state = copy(trainer.state)  # It counts tokens.
    twin.args = copy(trainer.args)
    twin.args.report_to = []  # TRL logs how long it generates; to trackio even if its run has not begun or is over.
    attributes = vars(twin)
    for name in ("_metrics", "_logs", "_pending_metrics", "_pending_extra_logs", "_evaluated"):
        if name in attributes:  # `_evaluated` is of our trainers only.
            attributes[name] = _empty_like(attributes[name])
    factories = cast(dict, trainer.environment_factories)
    if factories:
        # Environments of evaluations only, kept for the next one: those of training may have a state of their own.
        unused: dict[str, list] = {name: [] for name in factories}
        twin._environment_pool = vars(trainer).setdefault("_environments_of_evaluations", unused)
    return twin


def _empty_like(records: Any) -> Any:
    """A new, empty container of the same type and limit; a dictionary keeps its fixed keys."""
    if type(records) is dict:
        return {name: _empty_like(values) for name, values in records.items()}
    empty = copy(records)
    empty.clear()
    return empty


def _complete_and_score(twin: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Prompt, completion and reward of each row of this process, by the trainer's own generation and scoring; the reward
    is that of the first reward function, and `None` for an unscored completion. Images are left out.
    """
    # Prompts and completions of this process, and rewards of all processes, of each call
    scored: list[tuple[list[Any], list[Any], torch.Tensor]] = []
    outermost = twin._calculate_rewards

    def calculate(inputs, prompts, completions, completion_ids_list, **named):
        # TRL returns neither completions as text nor rewards by function: they are noted where it computes these.
        rewards = outermost(inputs, prompts, completions, completion_ids_list, **named)
        scored.append((prompts, completions, rewards))
        return rewards

    twin.model.eval()  # for each batch: TRL's continuous batching leaves the model in training mode
    with temporarily(twin, _calculate_rewards=calculate):
        twin._generate_and_score_completions(rows)
    prompts, completions, rewards = scored[-1]
    # The rewards, `[completions, functions]`, are of all processes, in their order.
    start = twin.accelerator.process_index * len(rows)
    rewards_of_rows = rewards[start : start + len(rows), 0].tolist()
    samples = []
    for prompt, completion, reward in zip(prompts, completions, rewards_of_rows, strict=True):
        samples.append(
            {
                "prompt": strip_images_from_messages(prompt),
                "completion": strip_images_from_messages(completion),
                "reward": reward if math.isfinite(reward) else None,
            }
        )
    return samples


def _decoding_as(twin: Any, decoding: Decoding) -> AbstractContextManager[None]:
    """
    A context in which the trainer's twin decodes greedily or samples. vLLM's engine is the trainer's own, so its
    options are restored afterwards; the generation configuration of Transformers is set in the twin for good.
    """
    if decoding == "sampled":
        return nullcontext()
    if twin.use_vllm:
        engine = twin.vllm_generation
        options = {name: value for name, value in engine.generation_kwargs.items() if name != "temperature"}
        return temporarily(engine, temperature=0.0, generation_kwargs=options)
    greedy = copy(twin.generation_config)
    greedy.do_sample = False
    greedy.temperature = greedy.top_p = greedy.top_k = greedy.min_p = None
    twin.generation_config = greedy
    return nullcontext()


@contextmanager
def _own_random_state(trainer: "GRPOTrainer", seed: int) -> Iterator[None]:
    """
    A context that draws random numbers from this seed, other ones on each process, and afterwards restores the random
    states of Python, NumPy and PyTorch.
    """
    accelerator = trainer.accelerator
    # Processes that share a colocated vLLM engine must draw the same tokens.
    colocated = trainer.use_vllm and trainer.vllm_mode == "colocate"
    group = trainer.vllm_tensor_parallel_size if colocated else 1  # number of processes that draw alike
    seed += 10_007 * (accelerator.process_index // group)
    device = accelerator.device
    has_generators = device.type not in ("cpu", "mps")
    devices = [device] if has_generators else []  # only this process's
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type=device.type if has_generators else "cuda"):
            set_seed(seed % 2**32)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
