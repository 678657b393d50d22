"""Runs of a small random model, each compared with [`selftest.reference`], and one that is killed and resumed."""

import asyncio
import contextlib
import io
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from datasets.utils import logging as datasets_logging
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from .. import __version__, contract
from ..config import OPOConfig
from ..data.arithmetic import base_model_path, make_problems
from ..generation.first_step import FirstStep
from ..trainer import OPOTrainer
from ..trl import TESTED
from .reference import Reference, Sample, Weights, chosen


NOT_SEEN = "vLLM, GPUs, several processes, sharding, half precision, adapters, images, tools and environments"

_MODEL = "model"  # in the folder of a test
_SHORT_RUN: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 16,
    "lr_scheduler_type": "constant",
}
# Two optimizer steps over the same 16 completions, the policy being the behaviour policy only in the first; and the
# first step over 16 others, when the policy has left its reference.
_THREE_STEPS: dict[str, Any] = {
    **_SHORT_RUN,
    "save_strategy": "no",
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,
    "max_steps": 3,
    "optim": "sgd",
    "learning_rate": 0.01,
    "max_grad_norm": 0.0,
    "reward_weights": [1.0, 0.5],
}
# Together, they use all that OPO takes from TRL in a rollout of text.
_RUNS: dict[str, dict[str, Any]] = {
    "opo": {"scale_rewards": "group", "temperature": 0.5},
    "topr": {"scale_rewards": "batch", "push": "advantage", "off_policy_mask_threshold": 0.02},
    "grpo": {"scale_rewards": "none", "beta": 0.1, "use_bias_correction_kl": True, "entropy_coef": 0.05},
    "dapo": {
        "multi_objective_aggregation": "normalize_then_sum",
        "mask_truncated_completions": True,
        "top_entropy_quantile": 0.7,
    },
}
_SCRIPTED = "topr"  # whose completions a `rollout_func` writes, some tokens of them as a tool
_OF_TRL: dict[str, dict[str, Any]] = {"grpo": {"beta": 0.1, "use_bias_correction_kl": True}, "dapo": {}}

_SAMPLING = "sampling, by how likely its tokens are"
_POLICIES = {"old": "log-probabilities of the behaviour policy", "ref": "log-probabilities of the reference"}
# How far quantities may be off, in which unit: ten times what float32 leaves, or more.
_ALLOWED = {
    "advantages": (1e-4, ""),
    "number of tokens that count": (0, ""),
    "log-probabilities": (1e-4, " nats"),
    _SAMPLING: (5, " standard deviations"),
    "gradient": (1e-3, ""),
    "weights after step": (1e-6, ""),
}


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that depends on every token."""
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


async def prompt_and_first_token(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A reward that some completions do not get."""
    rewards: list[float | None] = []
    for prompt, tokens in zip(prompts, completion_ids, strict=True):
        reward = len(prompt) / 16 + tokens[0] / 100
        rewards.append(None if tokens[0] < 4 else reward)
    return rewards


def partly_own(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A `rollout_func` whose completions are partly the output of a tool."""
    draw = random.Random(0)
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions = [[draw.randrange(2, 16) for _ in range(draw.randrange(3, 10))] for _ in prompts]
    own = [[int(place != 1) for place in range(len(tokens))] for tokens in completions]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "env_mask": own}


def prompts() -> Dataset:
    """Prompts of two lengths."""
    short, long = (
        [row["problem"] for row in make_problems("train", [level])[:32]] for level in ("Level 1", "Level 2")
    )
    return Dataset.from_dict({"prompt": [prompt for pair in zip(short, long, strict=True) for prompt in pair]})


def save_model(folder: str) -> str:
    """Save a small random model, whose completions end sooner or later, with the tokenizer of the arithmetic one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base_model_path()), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)  # with the usual initialization, all next tokens are equally likely after any prefix
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base_model_path()).save_pretrained(folder)
    return folder


class Recording:
    """A trainer that records its rollouts, and of each optimizer step weights and gradient."""

    def record(self: Any) -> Any:
        self.initial = weights_of(self.model)
        self.rollouts: list[tuple[Weights, dict[str, Any]]] = []  # with the weights of the policy that has sampled it
        self.steps: list[tuple[Weights, dict[str, Tensor]]] = []
        self.add_callback(_BeforeOptimizer(self))
        return self


class _BeforeOptimizer(TrainerCallback):
    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        model = self.trainer.model
        gradient = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        self.trainer.steps.append((weights_of(model), gradient))


class RecordingOPO(Recording, OPOTrainer):
    """With the checks of an untested release, whichever is installed."""

    def _begin(self):
        super()._begin()
        self._first_step = FirstStep(self)

    def _finish_rollout(self, rollout):
        finished = super()._finish_rollout(rollout)
        self.rollouts.append((weights_of(self.model), finished))
        return finished


class RecordingGRPO(Recording, GRPOTrainer):
    """TRL's own trainer and losses."""

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        self.rollouts.append((weights_of(self.model), rollout))
        return rollout


def weights_of(model: Any) -> Weights:
    """A copy of a model's weights."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


class Report:
    """Prints one line for each thing checked."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def number(self, what: str, error: float) -> None:
        """A quantity that is right if its error is at most that of [`_ALLOWED`]."""
        [(allowed, unit)] = [limit for name, limit in _ALLOWED.items() if f": {name}" in what]
        self.line(f"{what}: off by {error:.1g}{unit}, {allowed:g} is allowed", is_right=error <= allowed)

    def line(self, what: str, *, is_right: bool) -> None:
        """A line of the report."""
        print(f"{'ok   ' if is_right else 'WRONG'}  {what}", flush=True)
        if not is_right:
            self.wrong.append(what)

    def attempt(self, what: str, part: Callable[..., None], *arguments: Any) -> None:
        """A part of the test, which is wrong if it raises an error."""
        try:
            part(*arguments)
        except Exception as error:
            self.line(f"{what}: {type(error).__name__}: {error}", is_right=False)


def train_and_compare(report: Report, name: str, kind: Any, folder: str) -> None:
    """Train three optimizer steps with an objective, and compare two rollouts and the steps with float64."""
    of_trl = kind is RecordingGRPO
    title = f"{name} of TRL" if of_trl else name
    options = {"loss_type": name, **_OF_TRL[name]} if of_trl else {"objective": name, **_RUNS[name]}
    args = (GRPOConfig if of_trl else OPOConfig)(output_dir=f"{folder}/{title}", **_THREE_STEPS, **options)
    trainer = kind(
        model=f"{folder}/{_MODEL}",
        reward_funcs=[even_tokens, prompt_and_first_token],
        args=args,
        train_dataset=prompts(),
        rollout_func=partly_own if name == _SCRIPTED else None,
    ).record()
    train(trainer)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{_MODEL}", dtype=torch.float64).eval()
    references = [Reference(model, args, name, samples_of(trainer, rollout)) for _, rollout in trainer.rollouts]
    compare_rollouts(report, title, trainer, references)
    compare_steps(report, title, trainer, references)


def compare_rollouts(report: Report, title: str, trainer: Any, references: list[Reference]) -> None:
    """Compare rollouts of 16 completions with what their tokens say; what is off is the most of any of them."""
    errors: dict[str, list[float]] = {}
    are_grouped = []
    for (policy, rollout), reference in zip(trainer.rollouts, references, strict=True):
        samples, group = reference.samples, trainer.args.num_generations
        texts = [trainer.processing_class.decode(sample.prompt) for sample in samples]
        groups = [{*texts[first : first + group]} for first in range(0, len(texts), group)]
        are_grouped.append([len(each) for each in groups] == [1, 1, 1, 1] and {*texts} <= {*prompts()["prompt"]})
        found = {"advantages": (rollout["advantages"] - reference.advantages).abs().max().item()}
        if "num_items_in_batch" in rollout:
            n_tokens = sum(sum(sample.counts) for sample in samples)
            found["number of tokens that count"] = abs(int(rollout["num_items_in_batch"]) - n_tokens)
        for name, weights in {"old": policy, "ref": trainer.initial}.items():
            if (entry := f"{name}_per_token_logps") in rollout:
                found[_POLICIES[name]] = largest_difference(rollout[entry], reference, weights)
        if trainer.rollout_func is None:
            found[_SAMPLING] = abs(reference.surprise(policy))
        for what, error in found.items():
            errors.setdefault(what, []).append(error)
    report.line(f"{title}: 4 completions of each of 4 prompts", is_right=all(are_grouped))
    for what, values in errors.items():
        report.number(f"{title}: {what}", max(values))


def compare_steps(report: Report, title: str, trainer: Any, references: list[Reference]) -> None:
    """Compare the gradients of optimizer steps, and what the optimizer makes of the first."""
    for index, (policy, gradient) in enumerate(trainer.steps):
        rollout = index // trainer.args.num_iterations
        behaviour, _ = trainer.rollouts[rollout]
        exact = references[rollout].gradient(policy, behaviour, trainer.initial)
        report.number(f"{title}: gradient of step {index + 1}", relative_error(gradient, exact))
    (policy, gradient), (moved, _) = trainer.steps[:2]
    rate = trainer.args.learning_rate
    expected = {name: weight - rate * gradient[name] for name, weight in policy.items()}
    report.number(f"{title}: weights after step 1", relative_error(moved, expected))


def samples_of(trainer: Any, rollout: dict[str, Any]) -> list[Sample]:
    """The samples of a rollout, by its tokens and masks, with rewards that are computed from them here."""
    samples = []
    for index, prompt in enumerate(rollout["prompt_ids"]):
        prompt_ids = prompt[rollout["prompt_mask"][index].bool()].tolist()
        mask = rollout["completion_mask"][index].bool()
        # One that is masked because it is truncated is as long as possible.
        length = int(mask.sum()) or len(mask)
        counts = mask & rollout["tool_mask"][index].bool() if "tool_mask" in rollout else mask
        completion_ids = rollout["completion_ids"][index][:length].tolist()
        text = trainer.processing_class.decode(prompt_ids)
        rewards = [*even_tokens([completion_ids]), *asyncio.run(prompt_and_first_token([text], [completion_ids]))]
        samples.append(Sample(prompt_ids, completion_ids, counts[:length].tolist(), rewards))
    return samples


def largest_difference(logps: Tensor, reference: Reference, weights: Weights) -> float:
    """Of log-probabilities `[B, T]` of a rollout's tokens, among those that count."""
    largest = 0.0
    for row, sample in zip(logps, reference.samples, strict=True):
        exact = chosen(reference.logps(weights, sample), sample)
        difference = (row[: len(exact)] - exact).abs()[torch.tensor(sample.counts)]
        largest = max(largest, *difference.tolist(), 0.0)
    return largest


def relative_error(given: Weights, exact: Weights) -> float:
    """Norm of the difference, over all tensors, relative to that of the exact ones."""
    difference = norm({name: given[name].double() - tensor for name, tensor in exact.items()})
    return difference / norm(exact)


def norm(tensors: Weights) -> float:
    """Norm of several tensors together."""
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors.values()))


def train(trainer: Any, **options: Any) -> None:
    """Train without printing."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(**options)


def six_steps(folder: str, name: str, *callbacks: TrainerCallback) -> OPOTrainer:
    """A run of six optimizer steps, of which four serve the first rollout, with a checkpoint after each."""
    args = OPOConfig(
        **{**_SHORT_RUN, "lr_scheduler_type": "linear"},
        output_dir=f"{folder}/{name}",
        steps_per_generation=2,
        num_iterations=2,
        max_steps=6,
        save_steps=1,
        learning_rate=1e-3,
    )
    rewards = [even_tokens, prompt_and_first_token]
    return OPOTrainer(f"{folder}/{_MODEL}", rewards, args, prompts(), callbacks=[*callbacks])


class Kill(TrainerCallback):
    """Kills the run inside its first rollout."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_and_resume(report: Report, folder: str) -> None:
    """Compare a run that was killed and resumed with one that was not."""
    whole = six_steps(folder, "whole")
    train(whole)
    killed = subprocess.run([sys.executable, "-m", __package__, folder], capture_output=True, text=True)
    title = "a run that is killed inside a rollout, and resumed"
    if killed.returncode != -signal.SIGKILL:
        report.line(f"{title}: it has ended before that: {killed.stderr[-500:]}", is_right=False)
        return
    resumed = six_steps(folder, "killed")
    train(resumed, resume_from_checkpoint="last")
    logs = [[each.get("grad_norm") for each in trainer.state.log_history] for trainer in (whole, resumed)]
    report.line(f"{title}: the same gradients in the log", is_right=logs[0] == logs[1])
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    is_same = all(torch.equal(one, other) for one, other in pairs)
    report.line(f"{title}: the same weights, to the bit", is_right=is_same)


def main() -> int:
    """Returns the exit status."""
    for each in (logging, datasets_logging):
        each.disable_progress_bar()
        each.set_verbosity_error()
    installed = ", ".join(f"{name} {version(name)} (tested: {TESTED[name]})" for name in TESTED)
    print(f"opo_trl {__version__} with {installed}; minutes on a CPU", flush=True)
    report = Report()
    verdict = contract.examine()
    report.line(f"names and parameters: {verdict.word}", is_right=not verdict.breaks)
    for difference in verdict.differences:
        print(f"       {difference}")
    with tempfile.TemporaryDirectory() as folder:
        save_model(f"{folder}/{_MODEL}")
        for name in _RUNS:
            report.attempt(name, train_and_compare, report, name, RecordingOPO, folder)
        for name in _OF_TRL:
            report.attempt(f"{name} of TRL", train_and_compare, report, name, RecordingGRPO, folder)
        report.attempt("resumption", kill_and_resume, report, folder)
    print(f"Not seen: {NOT_SEEN}.")
    if report.wrong:
        print(f"{len(report.wrong)} wrong: do not train with these releases. docs/compatibility.md names tested ones.")
    return 1 if report.wrong else 0
