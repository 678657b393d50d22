"""
What an update on pivots costs: prompts many times as long as actions, beside TRL's GRPOTrainer on the same rollout.

    python -m benchmarks.updates.pivot_updates run         # what is missing of pivot_updates.jsonl
    python -m benchmarks.updates.pivot_updates families    # what is missing of pivot_families.jsonl
    python -m benchmarks.updates.pivot_updates long        # what is missing of long_prompts.jsonl
    python -m benchmarks.updates.pivot_updates report      # → pivot_updates.md

Each case has `GROUPS` prompts of random tokens and G actions of each, of half to all of `ACTION` tokens; no group has
zero variance. One optimizer step, in micro-batches of a group; a random Qwen3 of two layers, one thread of a CPU. The
trainers alternate, three phases of each, and a ratio is to GRPOTrainer's phase of the same turn. Time is processor
time; tokens are counted at the model's input, with padding; peak memory is what PyTorch's allocator hands out for a
phase, besides weights and moments. `families` measures other models in one of the cases. `long` compares the gradients
of a prompt of thousands of tokens that is computed once and of rows, of the sum of all log-probabilities, with the
peaks of the forward and backward pass.
"""

import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from opo_trl.updates.shared_prompts import arrange, model_for

from ..many_runs import read_command_line
from ..pages import table
from ..staged import read, run_missing
from .passes import count_tokens, counted_passes
from .replay import Rollout, allocated_peak, make_trainer, peak_of, phase, ratio, take_turns
from .shapes import SMALL_GEMMA3, SMALL_QWEN3_MOE, small_qwen3


RECORD = Path(__file__).resolve().with_name("pivot_updates.jsonl")
GROUPS, ACTION, WIDTH, REPEATS = 2, 24, 128, 3
METHODS = ("GRPO", "OPO", "our GRPO")  # the first is TRL's trainer
SHOWN = {"OPO": "OPO", "our GRPO": "`objective: grpo`"}


@dataclass(frozen=True)
class Case:
    """Tokens of a prompt for each token of the longest action, and actions of each prompt."""

    tokens_ratio: int
    generations: int


CASES = [Case(*each) for each in product((5, 20, 80), (8, 16))]


def draw_rollout(case: Case) -> Rollout:
    """Random tokens. The first of an action decides its reward, and every other action gets 1."""
    rng = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(16, 1024) for _ in range(n)]

    prompts, actions = [], []
    for _ in range(GROUPS):
        prompt = tokens(case.tokens_ratio * ACTION)
        for number in range(case.generations):
            length = rng.randint(ACTION // 2, ACTION)
            prompts.append(prompt)
            actions.append([100 + number % 2, *tokens(length - 1)])
    return Rollout(prompts, actions, case.generations)


def measure(case: Case) -> dict[str, Any]:
    """What each trainer takes for a case."""
    return {**asdict(case), **measure_updates(case, small_qwen3(WIDTH))}


def measure_updates(case: Case, shape: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """
    Tokens, bytes and seconds of a phase of each trainer, and the ratios of seconds to GRPOTrainer's. `options` are
    fields of the trainers.
    """
    torch.set_num_threads(1)
    rollout = draw_rollout(case)
    options |= {"rows": case.generations, "steps": 1}
    trainers = {name: make_trainer(name, shape, rollout, **options) for name in METHODS}
    line: dict[str, Any] = {}
    for name, trainer in trainers.items():
        phase(trainer)  # creates the moments
        with counted_passes(trainer.model) as passes:
            phase(trainer)
        line[name] = {**count_tokens(passes), "bytes": allocated_peak(trainer)}
    seconds = take_turns(trainers, REPEATS)
    for name in METHODS:
        line[name]["seconds"] = round(statistics.median(seconds[name]), 3)
        line[name]["time"] = ratio(seconds[name], seconds[METHODS[0]])
    return line


# Other families


@dataclass(frozen=True)
class Family:
    """A model of another family, and its coefficient of the router's loss; `None` for one without a router."""

    model_type: str
    router_aux_loss_coef: float | None = None


FAMILIES = [Family("gemma3_text"), Family("qwen3_moe", 0.001), Family("qwen3_moe", 0.0)]
FAMILY_RECORD = RECORD.with_name("pivot_families.jsonl")
SHAPES = {shape["model_type"]: shape for shape in (SMALL_GEMMA3, SMALL_QWEN3_MOE)}
OF_FAMILIES = Case(20, 8)


def measure_family(family: Family) -> dict[str, Any]:
    """What each trainer takes for a model."""
    options = {"router_aux_loss_coef": family.router_aux_loss_coef}
    return {**asdict(family), **measure_updates(OF_FAMILIES, SHAPES[family.model_type], **options)}


# Long prompts


@dataclass(frozen=True)
class LongPrompt:
    """Tokens of a prompt, and actions of `ACTION` tokens of it."""

    prompt: int
    generations: int


LONG_PROMPTS = [LongPrompt(8_000, 8), LongPrompt(20_000, 4)]
LONG_RECORD = RECORD.with_name("long_prompts.jsonl")


def compare(case: LongPrompt) -> dict[str, Any]:
    """How far apart the gradients are, relative to their norm, and bytes and seconds of each way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small_qwen3(64)))
    add_fused_lm_head(model, temperature=1.0)
    prompt_ids = torch.randint(16, 1024, (1, case.prompt)).repeat(case.generations, 1)
    completion_ids = torch.randint(16, 1024, (case.generations, ACTION))
    batch = {"prompt_ids": prompt_ids, "completion_ids": completion_ids}
    lengths = np.array([[case.prompt, ACTION]] * case.generations)
    places = arrange(batch, lengths, np.zeros(case.generations))
    line: dict[str, Any] = asdict(case)
    gradients = {}
    for name, called in (("rows", model), ("once", model_for(model, {**batch, **places}))):
        model.zero_grad()
        began = time.process_time()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            backward(called, batch)
        line[f"{name}, seconds"] = round(time.process_time() - began, 2)
        line[f"{name}, bytes"] = peak_of(profiler)
        gradients[name] = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    difference = (gradients["once"] - gradients["rows"]).norm() / gradients["rows"].norm()
    return {**line, "difference": difference.item()}


def backward(called: Any, batch: Mapping[str, torch.Tensor]) -> None:
    """The gradient of the sum of all log-probabilities of completions."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    labels = ids.clone()
    labels[:, : batch["prompt_ids"].size(1)] = -100
    outputs = called(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
    outputs["log_probs"].sum().backward()


# The page


def page(found: Mapping[Case, Mapping[str, Any]]) -> str:
    """The finished cases as a page."""
    rows = []
    for case in CASES:
        if case in found:
            cells = [f"{case.tokens_ratio}", f"{case.generations}"]
            rows += [[*cells, *of_method] for of_method in _beside_grpo(found[case])]
    header = ["prompt : longest action", "G", *_MEASURED]
    return f"{_INTRODUCTION}\n{table(header, rows)}\n{_family_table()}{_long_table()}"


def _beside_grpo(line: Mapping[str, Any]) -> Iterator[list[str]]:
    """Cells under `_MEASURED` of each of our methods."""
    theirs = line[METHODS[0]]
    for name, shown in SHOWN.items():
        own = line[name]
        tokens_ratio = tokens_of(own) / tokens_of(theirs)
        bytes_ratio = own["bytes"] / theirs["bytes"]
        time = "{median:.3f} ({low:.3f}–{high:.3f})".format(**own["time"])
        yield [shown, f"{tokens_ratio:.3f}", time, f"{bytes_ratio:.3f}", f"{theirs['seconds']:.1f}"]


def _family_table() -> str:
    """The models of other families; nothing if none has been measured."""
    found = read(Family, FAMILY_RECORD)
    if not found:
        return ""
    rows = []
    for family, line in found.items():
        coefficient = family.router_aux_loss_coef
        cells = [f"`{family.model_type}`", "" if coefficient is None else f"{coefficient:g}"]
        rows += [[*cells, *of_method] for of_method in _beside_grpo(line)]
    header = ["model", "`router_aux_loss_coef`", *_MEASURED]
    return f"\n## Other families\n\n{_FAMILIES}\n{table(header, rows)}\n"


def _long_table() -> str:
    """The comparisons of long prompts."""
    rows = []
    for case, line in read(LongPrompt, LONG_RECORD).items():
        ratios = [f"{line[f'once, {what}'] / line[f'rows, {what}']:.3f}" for what in ("seconds", "bytes")]
        rows.append([f"{case.prompt:,}", f"{case.generations}", *ratios, f"{line['difference']:.0e}"])
    header = ["tokens of the prompt", "G", "time", "peak memory", "difference of the gradients"]
    return f"\n## Long prompts: computed once, beside rows\n\n{_LONG}\n{table(header, rows)}\n"


def tokens_of(counts: Mapping[str, int]) -> int:
    """Padded tokens in units of forward passes: a backward pass takes about as long as two."""
    return counts["forward padded"] + 3 * counts["gradient padded"]


_INTRODUCTION = f"""# An update on pivots, beside GRPOTrainer

Fractions of what TRL's GRPOTrainer takes on the same rollout: {GROUPS} prompts, G actions of {ACTION // 2} to {ACTION}
tokens, a random Qwen3 of two layers on one thread of an idle CPU. Medians (ranges) of {REPEATS} phases; tokens are
padded ones, with gradient counted three times. [How it is measured](pivot_updates.py);
[record](pivot_updates.jsonl).
"""
_MEASURED = ["", "tokens", "time", "peak memory", "GRPOTrainer, seconds"]
_FAMILIES = f"""The same of other random models, with prompts {OF_FAMILIES.tokens_ratio} times as long as the longest
action and {OF_FAMILIES.generations} actions of each. Gemma 3, and a mixture of experts with its router's loss, compute
a prompt for each action: what is left is saved by sorting and trimming.
"""
_LONG = f"""Fractions of what rows take: one forward and backward pass over G actions of {ACTION} tokens, measured
once. A prompt attends to itself without a mask; that of the actions has a byte for each of their tokens and each token
of the row. In both ways, about 0.65 GB of the peak are the LM head's, however many tokens there are.
"""


def main() -> int:
    arguments = read_command_line(__doc__, "run", "families", "long", "report")
    if arguments.command == "report":
        RECORD.with_suffix(".md").write_text(page(read(Case, RECORD)))
        return 0
    kind, cases, make, record = {
        "run": (Case, CASES, measure, RECORD),
        "families": (Family, FAMILIES, measure_family, FAMILY_RECORD),
        "long": (LongPrompt, LONG_PROMPTS, compare, LONG_RECORD),
    }[arguments.command]
    missing = [lambda: [case for case in cases if case not in read(kind, record)]]
    return run_missing(missing, make, record, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
