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
from collections.abc import Callable, Sequence
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
from ..compatibility import TESTED
from ..config import OPOConfig
from ..data.arithmetic import base_model_path, make_problems
from ..generation.first_step import FirstStep
from ..trainer import OPOTrainer
from .reference import Completion, Reference, Weights, chosen


NOT_SEEN = "vLLM, GPUs, several processes, sharding, half precision, adapters, images, tools and environments"

_MODEL_FOLDER = "model"  # in the folder of a test
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
_FIELDS_OF_OBJECTIVES: dict[str, dict[str, Any]] = {
    "opo": {"scale_rewards": "group", "temperature": 0.5},
    "topr": {"scale_rewards": "batch", "push": "advantage", "off_policy_mask_threshold": 0.02},
    "grpo": {
        "scale_rewards": "none",
        "beta": 0.1,
        "temperature": 0.7,
        "use_bias_correction_kl": True,
        "entropy_coef": 0.05,
    },
    "dapo": {
        "multi_objective_aggregation": "normalize_then_sum",
        "mask_truncated_completions": True,
        "top_entropy_quantile": 0.7,
    },
}
_WITH_ROLLOUT_FUNC = "topr"  # whose completions a `rollout_func` writes, some tokens of them as a tool
_FIELDS_OF_TRL_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.1, "temperature": 0.7, "use_bias_correction_kl": True},
    "dapo": {},
}

_SAMPLING = "sampling, by how likely its tokens are"
_BEHAVIOUR_LOGPS = "log-probabilities of the behaviour policy"
_REFERENCE_LOGPS = "log-probabilities of the reference"
# How far quantities may be off, in which unit: ten times what float32 leaves, or more.
_ALLOWED_ERRORS = {
    "advantages": (1e-4, ""),
    "number of tokens that count": (0, ""),
    "log-probabilities": (1e-4, " nats"),
    _SAMPLING: (5, " standard deviations"),
    "gradient": (1e-3, ""),
    "weights after step": (1e-6, ""),
}


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that depends on every token of a completion: the share of its tokens with an even number."""
    shares = []
    for tokens in completion_ids:
        n_even = sum(token % 2 == 0 for token in tokens)
        shares.append(n_even / len(tokens))
    return shares


async def prompt_and_first_token(length: list[int], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """
    A reward that depends on the prompt, whose `length` is a column of the dataset, and on a completion's first token;
    `None` for a first token below 4, so that some completions do not get it.
    """
    rewards: list[float | None] = []
    for of_prompt, tokens in zip(length, completion_ids, strict=True):
        reward = of_prompt / 16 + tokens[0] / 100
        rewards.append(None if tokens[0] < 4 else reward)
    return rewards


def partly_own(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """
    A `rollout_func` whose completions are random tokens, the same in each call; the second token of each is marked as
    the output of a tool.
    """
    draw = random.Random(0)
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions = []
    tool_masks = []
    for _ in prompts:
        length = draw.randrange(3, 10)
        completions.append([draw.randrange(2, 16) for _ in range(length)])
        tool_masks.append([1, 0] + [1] * (length - 2))  # a tool has written the second token
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "env_mask": tool_masks}


def prompts() -> Dataset:
    """A dataset of 64 prompts, with two lengths in turns, and of their `length` in characters."""
    short_problems = make_problems("train", ["Level 1"])[:32]
    long_problems = make_problems("train", ["Level 2"])[:32]
    texts: list[str] = []
    for short, long in zip(short_problems, long_problems, strict=True):
        texts += (short["problem"], long["problem"])
    return Dataset.from_dict({"prompt": texts, "length": [len(text) for text in texts]})


def save_model(folder: str) -> str:
    """Save a small random model, whose completions end sooner or later, with the tokenizer of the arithmetic one."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(base_model_path())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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
        """Begin to record; returns the trainer."""
        self.initial = weights_of(self.model)
        self.rollouts: list[tuple[Weights, dict[str, Any]]] = []  # with the weights of the policy that has sampled it
        self.steps: list[tuple[Weights, dict[str, Tensor]]] = []
        self.add_callback(_BeforeOptimizer(self))
        return self


class _BeforeOptimizer(TrainerCallback):
    """Notes weights and gradients before each step of the optimizer."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        model = self.trainer.model
        gradient = {name: weight.grad.clone() for name, weight in model.named_parameters()}
        self.trainer.steps.append((weights_of(model), gradient))


class RecordingOPO(Recording, OPOTrainer):
    """With the checks of an untested release, whichever is installed."""

    def _begin(self, resumed=None):
        super()._begin(resumed)
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
        """
        Print how far a quantity is off, which is right if that is at most what [`_ALLOWED_ERRORS`] has for it. `what`
        is a title and, after a colon, the quantity.
        """
        [(allowed, unit)] = [bound for name, bound in _ALLOWED_ERRORS.items() if f": {name}" in what]
        self.line(f"{what}: off by {error:.1g}{unit}, {allowed:g} is allowed", is_right=error <= allowed)

    def line(self, what: str, *, is_right: bool) -> None:
        """Print a line with its verdict, and note it in `wrong` if it is not right."""
        verdict = "ok   " if is_right else "WRONG"
        print(f"{verdict}  {what}", flush=True)
        if not is_right:
            self.wrong.append(what)

    def attempt(self, what: str, part: Callable[..., None], *arguments: Any) -> None:
        """Run a part of the test; if it raises an error, that is wrong, and the next parts still run."""
        try:
            part(*arguments)
        except Exception as error:
            self.line(f"{what}: {type(error).__name__}: {error}", is_right=False)


def train_and_compare(report: Report, name: str, kind: Any, folder: str) -> None:
    """
    Train three optimizer steps with the objective or loss of this name, and compare two rollouts and the steps with
    those computed in float64. `kind` is the class of the trainer, ours or TRL's, that records what it does.
    """
    args: GRPOConfig
    if kind is RecordingGRPO:
        title = f"{name} of TRL"
        args = GRPOConfig(
            output_dir=f"{folder}/{title}", **_THREE_STEPS, loss_type=name, **_FIELDS_OF_TRL_LOSSES[name]
        )
    else:
        title = name
        args = OPOConfig(output_dir=f"{folder}/{title}", **_THREE_STEPS, objective=name, **_FIELDS_OF_OBJECTIVES[name])
    trainer = kind(
        model=f"{folder}/{_MODEL_FOLDER}",
        reward_funcs=[even_tokens, prompt_and_first_token],
        args=args,
        train_dataset=prompts(),
        rollout_func=partly_own if name == _WITH_ROLLOUT_FUNC else None,  # the other runs generate
    ).record()
    train(trainer)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{_MODEL_FOLDER}", dtype=torch.float64).eval()
    references = [Reference(model, args, name, completions_of(trainer, rollout)) for _, rollout in trainer.rollouts]
    compare_rollouts(report, title, trainer, references)
    compare_steps(report, title, trainer, references)


def compare_rollouts(report: Report, title: str, trainer: Any, references: list[Reference]) -> None:
    """
    Compare rollouts of 16 completions with the references made of their tokens, and report for each quantity the
    largest error of any rollout.
    """
    errors: dict[str, list[float]] = {}  # of each quantity, those of all rollouts
    are_grouped = True
    for (policy, rollout), reference in zip(trainer.rollouts, references, strict=True):
        are_grouped &= has_four_groups(trainer, reference.completions)
        for name, error in errors_of_rollout(trainer, policy, rollout, reference).items():
            errors.setdefault(name, []).append(error)
    report.line(f"{title}: 4 completions of each of 4 prompts", is_right=are_grouped)
    for name, errors_of_quantity in errors.items():
        report.number(f"{title}: {name}", torch.tensor(errors_of_quantity).max().item())  # NaN if one of them is


def has_four_groups(trainer: Any, completions: Sequence[Completion]) -> bool:
    """Whether 16 completions are four of each of four prompts, one after the other, and of the dataset."""
    texts = [trainer.processing_class.decode(completion.prompt) for completion in completions]
    known_texts = {*prompts()["prompt"]}
    if len(texts) != 16 or not known_texts.issuperset(texts):
        return False
    first_of_group = [texts[index - index % 4] for index in range(16)]
    return texts == first_of_group


def errors_of_rollout(
    trainer: Any, policy: Weights, rollout: dict[str, Any], reference: Reference
) -> dict[str, float]:
    """
    Quantity of a rollout → how far it is off from the reference; `policy` are the weights that have sampled it. What
    TRL does not put into a rollout is left out.
    """
    differences = (rollout["advantages"] - reference.advantages).abs()
    errors = {"advantages": differences.max().item()}
    if "num_items_in_batch" in rollout:
        n_tokens = sum(sum(completion.counts) for completion in reference.completions)
        of_trl = int(rollout["num_items_in_batch"])
        errors["number of tokens that count"] = abs(of_trl - n_tokens)
    if "old_per_token_logps" in rollout:
        errors[_BEHAVIOUR_LOGPS] = largest_difference(rollout["old_per_token_logps"], reference, policy)
    if "ref_per_token_logps" in rollout:
        errors[_REFERENCE_LOGPS] = largest_difference(rollout["ref_per_token_logps"], reference, trainer.initial)
    if trainer.rollout_func is None:  # which does not sample from the policy
        errors[_SAMPLING] = abs(reference.surprise(policy))
    return errors


def compare_steps(report: Report, title: str, trainer: Any, references: list[Reference]) -> None:
    """
    Compare the gradient of each optimizer step with the reference's, and the weights after the first step with what
    SGD makes of its gradient.
    """
    for index, (policy, gradient) in enumerate(trainer.steps):
        rollout = index // trainer.args.num_iterations  # each rollout serves as many steps
        behaviour, _ = trainer.rollouts[rollout]
        exact = references[rollout].gradient(policy, behaviour, trainer.initial)
        report.number(f"{title}: gradient of step {index + 1}", relative_error(gradient, exact))
    initial, gradient = trainer.steps[0]
    after_step, _ = trainer.steps[1]
    rate = trainer.args.learning_rate
    expected = {name: weight - rate * gradient[name] for name, weight in initial.items()}
    report.number(f"{title}: weights after step 1", relative_error(after_step, expected))


def completions_of(trainer: Any, rollout: dict[str, Any]) -> list[Completion]:
    """The completions of a rollout, by its tokens and masks, with rewards that are computed from them here."""
    completions = []
    for index, prompt in enumerate(rollout["prompt_ids"]):
        prompt_mask = rollout["prompt_mask"][index].bool()
        prompt_ids = prompt[prompt_mask].tolist()
        mask = rollout["completion_mask"][index].bool()
        # The mask of a truncated completion may be 0 throughout; it has as many tokens as a completion can have.
        length = int(mask.sum()) or len(mask)
        counted = mask
        if "tool_mask" in rollout:
            counted = mask & rollout["tool_mask"][index].bool()
        completion_ids = rollout["completion_ids"][index, :length].tolist()
        text = trainer.processing_class.decode(prompt_ids)
        [reward] = even_tokens([completion_ids])
        [other_reward] = asyncio.run(prompt_and_first_token([len(text)], [completion_ids]))
        counts = counted[:length].tolist()
        completions.append(Completion(prompt_ids, completion_ids, counts, [reward, other_reward]))
    return completions


def largest_difference(logps: Tensor, reference: Reference, weights: Weights) -> float:
    """Largest difference of log-probabilities `[B, T]`, of tokens that count, to the reference; NaN if one is NaN."""
    differences = []
    for logps_of_completion, completion in zip(logps, reference.completions, strict=True):
        exact = chosen(reference.logps(weights, completion), completion)
        difference = (logps_of_completion[: len(exact)] - exact).abs()
        differences.append(difference[completion.counted()])
    return torch.cat(differences).max().item()


def relative_error(tensors: Weights, exact: Weights) -> float:
    """Norm of the difference of tensors from the exact ones, all together, over the norm of the exact ones."""
    differences = {name: tensors[name].double() - tensor for name, tensor in exact.items()}
    return norm(differences) / norm(exact)


def norm(tensors: Weights) -> float:
    """Norm of several tensors together."""
    sums = [tensor.square().sum().item() for tensor in tensors.values()]
    return math.sqrt(sum(sums))


def train(trainer: Any, **options: Any) -> None:
    """Train without printing."""
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(**options)


def six_steps(folder: str, name: str, *callbacks: TrainerCallback) -> OPOTrainer:
    """
    A run of six optimizer steps, of which four serve the first rollout, with a checkpoint after each, that writes to
    this name in the folder, where the model is, too. It is not started.
    """
    options = _SHORT_RUN | {"lr_scheduler_type": "linear"}
    args = OPOConfig(
        **options,
        output_dir=f"{folder}/{name}",
        steps_per_generation=2,
        num_iterations=2,
        max_steps=6,
        save_steps=1,
        learning_rate=1e-3,
    )
    rewards = [even_tokens, prompt_and_first_token]
    return OPOTrainer(f"{folder}/{_MODEL_FOLDER}", rewards, args, prompts(), callbacks=[*callbacks])


class Kill(TrainerCallback):
    """Kills the run inside its first rollout."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_and_resume(report: Report, folder: str) -> None:
    """
    Compare a run that was killed within a rollout and resumed with one that was not: the gradient norms in the log and
    the weights must be equal to the bit. The run that is killed is a process of its own.
    """
    whole = six_steps(folder, "whole")
    train(whole)
    command = [sys.executable, "-m", __package__, folder]
    killed = subprocess.run(command, capture_output=True, text=True)
    title = "a run that is killed inside a rollout, and resumed"
    if killed.returncode != -signal.SIGKILL:
        report.line(f"{title}: it has ended before that: {killed.stderr[-500:]}", is_right=False)
        return
    resumed = six_steps(folder, "killed")
    train(resumed, resume_from_checkpoint="last")
    report.line(f"{title}: the same gradients in the log", is_right=logged_norms(whole) == logged_norms(resumed))
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    are_equal = all(torch.equal(weight, resumed_weight) for weight, resumed_weight in pairs)
    report.line(f"{title}: the same weights, to the bit", is_right=are_equal)


def logged_norms(trainer: OPOTrainer) -> list[float | None]:
    """Norm of the gradient in each entry of a run's log."""
    return [entry.get("grad_norm") for entry in trainer.state.log_history]


def main() -> int:
    """Run all parts of the test, and print a line for each thing checked; returns 1 if anything is wrong, or 0."""
    for library in (logging, datasets_logging):
        library.disable_progress_bar()
        library.set_verbosity_error()
    installed = ", ".join(f"{name} {version(name)} (tested: {TESTED[name]})" for name in TESTED)
    print(f"opo_trl {__version__} with {installed}; minutes on a CPU", flush=True)
    report = Report()
    verdict = contract.examine()
    report.line(f"names and parameters: {verdict.word}", is_right=not verdict.breaks)
    for difference in verdict.differences:
        print(f"       {difference}")
    with tempfile.TemporaryDirectory() as folder:
        save_model(f"{folder}/{_MODEL_FOLDER}")
        for name in _FIELDS_OF_OBJECTIVES:
            report.attempt(name, train_and_compare, report, name, RecordingOPO, folder)
        for name in _FIELDS_OF_TRL_LOSSES:
            report.attempt(f"{name} of TRL", train_and_compare, report, name, RecordingGRPO, folder)
        report.attempt("resumption", kill_and_resume, report, folder)
    print(f"Not seen: {NOT_SEEN}.")
    if report.wrong:
        print(f"{len(report.wrong)} wrong: do not train with these releases. docs/compatibility.md names tested ones.")
    return 1 if report.wrong else 0
