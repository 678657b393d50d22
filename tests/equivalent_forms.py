"""
The equivalence classes: which forms of the canonical run must give the same training, and how exactly.

Where a form adds the same numbers in the same order, the result is bitwise the same. Elsewhere float32 sums have
another order: a gradient of the tiny model then differs by about 1e-6 of its size, which grows over eighteen steps of
AdamW, including the second iterations over each rollout, to about 1e-5 of the distance that the parameters move.
[`TOLERANCE`] leaves a factor of ten.
"""

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from canonical_run import STEPS, Form, run, weights
from device_fields import USE_CPU
from launched_processes import launch, logs
from named_tensors import distance
from torch import Tensor


TOLERANCE = 1e-4

ONE = Form("1 process, 8 × 1")  # rows × accumulation

# A gradient that is not finite.
POISONED = replace(ONE, name="poisoned, 8 × 1", poisoned=True)


# Only the centred escort weight acts on a sample here, and each rollout is used once, so zero-gradient samples can be
# skipped.
_SKIPPING = {"beta": 0.0, "num_iterations": 1}
UNPLANNED = replace(ONE, name="unplanned, 8 × 1", options={**_SKIPPING, "plan_micro_batches": False})

# Three passes of three optimizer steps over each rollout; the second and third draw groups from the latest two.
REPLAY = {"num_iterations": 3, "max_staleness": 1}
SAMPLED_DYNAMICALLY = {**REPLAY, "max_sampling_rounds": 3}
REPLAYED = replace(ONE, name="replay, 8 × 1", options=REPLAY)

FURTHER = replace(
    ONE,
    name="all terms, 8 × 1",
    options={
        "top_entropy_quantile": 0.5,
        "entropy_coef": 0.05,
        "off_policy_mask_threshold": 0.05,
        "use_bias_correction_kl": True,
        "ratio_form": "exact",
        "drive_scaling": "batch",
        "positivity": "project",
        # The terms cancel in some elements of the first gradient, whose rounding error AdamW would make a step of.
        "adam_epsilon": 1e-6,
    },
)


@dataclass(frozen=True)
class EquivalenceClass:
    """
    Args:
        name: what its members differ in.
        reference: the form that the others are compared with.
        members: the others.
        tolerance: bound on the relative differences; 0 demands the same bits.
        quick: members that the default test run includes, by index.
    """

    name: str
    reference: Form
    members: tuple[Form, ...]
    tolerance: float = TOLERANCE
    quick: tuple[int, ...] = ()


def _sharded(*configs: str, **fields) -> tuple[Form, ...]:
    return tuple(Form(f"{config}, 2 processes", rows=4, processes=2, config=config, **fields) for config in configs)


CLASSES = (
    EquivalenceClass("identical rerun", ONE, (replace(ONE, name="again"),), tolerance=0.0),
    EquivalenceClass("rows × accumulation", ONE, (Form("1 × 8", rows=1),)),
    EquivalenceClass(
        "padding and checkpointing",
        ONE,
        (replace(ONE, name="1 process", options={"pad_to_multiple_of": 16, "gradient_checkpointing": True}),),
        quick=(0,),
    ),
    EquivalenceClass(
        "processes",
        ONE,
        (
            # Two processes are also in classes below, with more terms and with replay.
            Form("2 processes, 4 × 1", rows=4, processes=2, config="multi_gpu"),
            Form("4 processes, 1 × 2", rows=1, processes=4, config="multi_gpu"),
        ),
        quick=(1,),
    ),
    # By default, shards are in classes below.
    EquivalenceClass("sharding", ONE, _sharded("zero1", "zero2", "zero3", "fsdp2")),
    EquivalenceClass(
        "further terms of the loss",
        FURTHER,
        (Form("2 processes, 2 × 2", rows=2, processes=2, config="multi_gpu", options=FURTHER.options),),
        quick=(0,),
    ),
    EquivalenceClass(
        "samples skipped, micro-batches planned",
        UNPLANNED,
        (
            Form("planned, 2 × 4, 16 tokens", rows=2, options={**_SKIPPING, "max_tokens_per_micro_batch": 16}),
            Form("zero3, 2 processes, 2 × 2", rows=2, processes=2, config="zero3", options=_SKIPPING),
        ),
        quick=(0, 1),
    ),
    EquivalenceClass(
        "steps skipped",
        POISONED,
        (
            Form("2 processes, 4 × 1", rows=4, processes=2, config="multi_gpu", poisoned=True),
            *_sharded("zero2", "zero3", "fsdp2", poisoned=True),
        ),
        quick=(0, 1, 3),
    ),
    EquivalenceClass(
        "replay",
        REPLAYED,
        (
            Form("2 × 4, unplanned", rows=2, options={**REPLAY, "plan_micro_batches": False}),
            Form("2 processes, 4 × 1", rows=4, processes=2, config="multi_gpu", options=REPLAY),
            *_sharded("zero3", "fsdp2", options=REPLAY),
        ),
        quick=(0, 1),
    ),
    EquivalenceClass(
        "replay, LoRA",
        replace(ONE, name="replay, LoRA", lora=True, options=REPLAY),
        _sharded("zero3", "fsdp2", lora=True, options=REPLAY),
        # The adapter hardly moves: the loss is a small difference of its terms, whose rounding errors stay.
        tolerance=1e-3,
        quick=(1,),
    ),
    EquivalenceClass(
        "replay, dynamic sampling",
        # The second of three groups has zero variance: a second round of generation replaces it.
        replace(ONE, name="replay, dynamic sampling", options=SAMPLED_DYNAMICALLY),
        (
            Form("2 processes, 2 × 2", rows=2, processes=2, config="multi_gpu", options=SAMPLED_DYNAMICALLY),
            *_sharded("zero3", options=SAMPLED_DYNAMICALLY),
        ),
        quick=(0,),
    ),
    EquivalenceClass(
        "sampled by the policy",  # which depends on the random state of each process, so on their number
        Form("multi_gpu, 2 processes", rows=4, processes=2, config="multi_gpu", sampled=True),
        _sharded("zero2", "zero3", "fsdp2", sampled=True),
        # AdamW moves components of the gradient that are only rounding noise like any other.
        tolerance=1e-3,
        quick=(0,),
    ),
)


@dataclass(frozen=True)
class Trained:
    """Result of a form."""

    steps: list[dict]
    start: dict[str, Tensor] | None  # of the reference forms
    end: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """
    How far a form is from its reference; each is the largest of all optimizer steps.

    Args:
        loss: relative to the largest loss, because a loss may be 0.
        gradient_norm: relative.
        parameters: of the trained parameters, relative to the distance that they moved.
    """

    loss: float
    gradient_norm: float
    parameters: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient_norm, self.parameters)


def train(form: Form, model: str, folder: Path) -> Trained:
    """
    Train the canonical run in a form.

    Raises:
        `RuntimeError`: a process failed, or the run was not of this form.
    """
    shutil.rmtree(folder, ignore_errors=True)
    status = launch(run, form, model, str(folder), config=form.config, processes=form.processes, folder=folder)
    if any(status):
        raise RuntimeError(f"{form.name}: exit status {status}\n{logs(folder)}")
    result = json.loads((folder / "result.json").read_text())
    _check_form(form, result)
    steps = [entry for entry in result["log"] if "grad_norm" in entry]
    assert len(steps) == STEPS
    start = folder / "start"
    return Trained(steps, weights(start) if start.exists() else None, weights(folder))


def compare(one: Trained, reference: Trained) -> Difference:
    """How far a form is from its reference."""
    losses = [abs(step["loss"]) for step in reference.steps if math.isfinite(step["grad_norm"])]
    loss_differences = []
    norm_differences = []
    for step, expected in zip(one.steps, reference.steps, strict=True):
        for name in ("loss", "grad_norm"):
            if math.isfinite(step[name]) != math.isfinite(expected[name]):
                return Difference(math.inf, math.inf, math.inf)
        if math.isfinite(expected["grad_norm"]):
            loss_differences.append(abs(step["loss"] - expected["loss"]))
            norm_differences.append(abs(step["grad_norm"] / expected["grad_norm"] - 1))
    return Difference(
        loss=max(loss_differences) / max(losses),
        gradient_norm=max(norm_differences),
        parameters=distance(one.end, reference.end) / distance(reference.end, reference.start),
    )


def _check_form(form: Form, result: dict):
    several = "MULTI_CPU" if USE_CPU else "MULTI_GPU"
    distributed = {None: "NO", "multi_gpu": several, "fsdp2": "FSDP"}.get(form.config, "DEEPSPEED")
    stage = int(form.config[-1]) if distributed == "DEEPSPEED" else None
    expected = {
        "processes": form.processes,
        "distributed": distributed,
        "zero_stage": stage,
        "checkpointing": form.options.get("gradient_checkpointing", False),
    }
    actual = {name: result[name] for name in expected}
    if actual != expected:
        raise RuntimeError(f"{form.name} was to run as {expected}, but ran as {actual}")
    if result["sharded"] != (form.config in ("zero3", "fsdp2")):
        raise RuntimeError(f"{form.name}: {result['sharded']:.0%} of the parameters are sharded")
