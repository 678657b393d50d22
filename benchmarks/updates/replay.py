"""
A fixed rollout instead of generation, and the cost of an update phase on it: shared by the benchmarks of an update.

An update phase is everything after generation: rewards and advantages, log-probabilities under the behaviour policy,
and the forward and backward passes and optimizer steps on the rollout.
"""

import contextlib
import functools
import io
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.data.arithmetic import base_model_path


MATH_LENGTHS = Path(__file__).resolve().with_name("math_lengths.json")

Lengths = Literal["math", "uniform", "equal"]


# The rollout


@dataclass(frozen=True)
class Rollout:
    """
    A fixed rollout, in groups.

    Args:
        prompts: token ids of each completion's prompt, the same within a group.
        completions: token ids of each completion.
        generations: completions per group.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    generations: int

    @property
    def tokens(self) -> int:
        """Tokens of prompts and completions."""
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))


def draw_rollout(
    lengths: Lengths, *, groups: int, generations: int, vocab_size: int, dead: float = 0.0, shorter: int = 1
) -> Rollout:
    """
    A rollout of random tokens, the same on every call; its lengths are evenly spaced quantiles, in random order.

    Args:
        lengths (`str`):
            Distribution of completion lengths. `"math"`: that of MATH's solutions (`math_lengths.json`), without the
            longest percent, which a limit would truncate. `"uniform"`: from 2 to the longest of these. `"equal"`: the
            longest of these. Prompts always have the lengths of MATH's problems.
        groups (`int`), generations (`int`):
            Number of prompts, and of completions per prompt.
        vocab_size (`int`):
            Size of the vocabulary.
        dead (`float`, *optional*, defaults to 0):
            Fraction of zero-variance groups, in which [`parity`] gives every completion the same reward; in the others
            rewards alternate between 0 and 1.
        shorter (`int`, *optional*, defaults to 1):
            Divisor of every length.
    """
    rng = random.Random(0)
    eos = tokenizer().eos_token_id
    of_solutions = math_lengths("solution", shorter)
    longest = of_solutions[-1]
    distributions = {"math": of_solutions, "uniform": range(2, longest + 1), "equal": [longest]}

    def shuffled(values: Sequence[int], n: int) -> list[int]:
        return rng.sample(quantiles(values, n), n)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(eos + 1, vocab_size) for _ in range(n)]

    prompts = [tokens(length) for length in shuffled(math_lengths("problem", shorter), groups)]
    n_dead = generations * round(dead * groups)  # completions, which come first
    completions = []
    for row, length in enumerate(shuffled(distributions[lengths], groups * generations)):
        first = 2 * rng.randrange(eos // 2 + 1, vocab_size // 2)
        if row >= n_dead:
            first += row % 2
        completions.append([first, *tokens(length - 2), eos])
    return Rollout([ids for ids in prompts for _ in range(generations)], completions, generations)


def math_lengths(of: Literal["problem", "solution"], shorter: int) -> list[int]:
    """Percentiles 0 to 99 of the tokens of MATH's problems or solutions, divided by `shorter`; at least 2."""
    percentiles = json.loads(MATH_LENGTHS.read_text())["percentiles"][of]
    return [max(length // shorter, 2) for length in percentiles[:100]]


def quantiles(values: Sequence[int], n: int) -> list[int]:
    """`n` of some sorted values, evenly spaced."""
    chosen = []
    for number in range(n):
        share = (number + 0.5) / n
        chosen.append(values[int(share * len(values))])
    return chosen


def parity(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward: whether a completion starts with an even token."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


@functools.cache
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded tokenizer, for its special tokens."""
    return AutoTokenizer.from_pretrained(base_model_path())


# The trainers


class ReplayingGRPOTrainer(GRPOTrainer):
    """TRL's trainer, which returns `rollout` instead of generating."""

    rollout: Rollout

    def _generate(self, prompts: list) -> tuple:
        start = self.accelerator.process_index * len(prompts)
        own = slice(start, start + len(prompts))
        prompt_ids, completion_ids = self.rollout.prompts[own], self.rollout.completions[own]
        return prompt_ids, completion_ids, None, [""] * len(prompts), None, {}, None, []


class ReplayingOPOTrainer(OPOTrainer, ReplayingGRPOTrainer):
    """OPO's trainer with a fixed rollout."""


TRAINERS: dict[str, tuple[type, Callable[..., Any]]] = {
    "GRPO": (ReplayingGRPOTrainer, GRPOConfig),
    "OPO": (ReplayingOPOTrainer, OPOConfig),
    "our GRPO": (ReplayingOPOTrainer, functools.partial(OPOConfig, objective="grpo")),
}


def make_trainer(
    method: str,
    shape: Mapping[str, Any],
    rollout: Rollout,
    *,
    rows: int,
    steps: int,
    processes: int = 1,
    checkpointing: bool = False,
    **options: Any,
) -> Any:
    """
    A trainer with a new random model, which each call of [`phase`] trains on the rollout.

    Args:
        method (`str`):
            One of `TRAINERS`.
        shape (`Mapping`):
            Arguments of the model's configuration. On a GPU, its weights are bfloat16.
        rollout ([`Rollout`]):
            The rollout of all processes.
        rows (`int`):
            Completions per micro-batch and process.
        steps (`int`):
            Optimizer steps per rollout.
        processes (`int`, *optional*, defaults to 1), checkpointing (`bool`, *optional*, defaults to `False`):
            Number of processes; whether activations are recomputed in the backward pass.
        **options:
            Other fields of the trainer's configuration.
    """
    on_gpu = torch.cuda.is_available()
    trainer_class, config_class = TRAINERS[method]
    n_completions = len(rollout.completions)
    micro_batches, surplus = divmod(n_completions, rows * processes)
    if surplus or micro_batches % steps:
        raise ValueError(
            f"rows={rows} does not cut {n_completions} completions on {processes} processes into {steps} "
            f"equal optimizer steps. Choose a divisor of {n_completions / (processes * steps):g}."
        )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        fields = {
            "output_dir": folder,
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": micro_batches // steps,
            "steps_per_generation": micro_batches,
            "max_steps": steps,
            "num_generations": rollout.generations,
            "max_completion_length": max(map(len, rollout.completions)),
            "learning_rate": 2e-6,
            "lr_scheduler_type": "constant",
            "optim": "adamw_torch_fused",
            "beta": 0.0,
            "bf16": on_gpu,
            "use_cpu": not on_gpu,
            "gradient_checkpointing": checkpointing,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        args = config_class(**fields | options)
    prompts = list(map(str, range(n_completions)))  # of which nothing is generated
    trainer = trainer_class(
        model=model,
        reward_funcs=parity,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
    )
    trainer.rollout = rollout
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Stopwatch())
    return trainer


# Time


def now() -> float:
    """Processor time in seconds, which does not depend on other programs; with a GPU wall-clock time, synchronized."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


class Stopwatch(TrainerCallback):
    """Seconds from the start of the first optimizer step to the end of the last one, in the latest call of `train`."""

    seconds = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self._started = now()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds = now() - self._started


def phase(trainer: Any) -> float:
    """Train on the rollout once; returns the seconds."""
    with contextlib.redirect_stdout(io.StringIO()):  # the training plan
        trainer.train()
    stopwatch = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Stopwatch))
    return stopwatch.seconds


def take_turns(trainers: Mapping[str, Any], repeats: int) -> dict[str, list[float]]:
    """Seconds of each trainer's phases, alternating, so that a machine that slows down slows all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for repeat in range(repeats):
        names = list(trainers)
        if repeat % 2:
            names.reverse()
        for name in names:
            seconds[name].append(phase(trainers[name]))
    return seconds


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Median and range of the ratios of phases in the same turn."""
    ratios = sorted(own / other for own, other in zip(seconds, reference, strict=True))
    middle = statistics.median(ratios)
    return {"median": round(middle, 3), "low": round(ratios[0], 3), "high": round(ratios[-1], 3)}


def allocated_peak(trainer: Any) -> int:
    """Peak bytes of a phase on the CPU, besides what existed before: weights and moments."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        phase(trainer)
    return peak_of(profiler)


def peak_of(profiler: profile) -> int:
    """The most bytes that were allocated at once while a profiler watched."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))
