"""Runs on devices, and what is checked of them."""

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from helpers import (
    EXACT,
    PROMPTS,
    RECIPES,
    Recording,
    RecordingOPO,
    Reference,
    Script,
    distance,
    even_tokens,
    logged,
    make_trainer,
    norm,
    snapshot,
    without_times,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer

from opo_trl import OPOTrainer
from opo_trl.checks.files import read_json, read_lines


PASSES = {"num_iterations": 2, "max_staleness": 2, "max_steps": 6}
OFF_POLICY = {"steps_per_generation": 4, "max_steps": 4, "learning_rate": 0.02}
# bfloat16 rounds differently with another number of rows. With the kernels for AVX-512, AVX2 and neither, gradients of
# one and two processes differ by up to 0.04, logged values by up to 0.13 (`chi2`).
ROUNDED = {"tolerance": 0.06, "tolerance_of_log": 0.2}
NUMBERS = Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(17)]})


# Tensors


def tensors(value: Any) -> Iterable[Tensor]:
    """All tensors in nested lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors([*value.values()])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)


def to_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: to_host(one) for name, one in value.items()}
    if isinstance(value, list):
        return [to_host(one) for one in value]
    return value.cpu() if isinstance(value, Tensor) else value


def bits(value: Tensor) -> Tensor:
    return value.detach().contiguous().flatten().view(torch.uint8)


def same_bits(one: Any, other: Any) -> bool:
    """Whether the tensors in two values have the same bits."""
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs)


# Runs


class HalfDead(Script):
    """All completions of half of the prompts have the same reward, so dynamic sampling replaces their groups."""

    def reward_functions(self) -> list[Callable]:
        def reward(prompts: list[str], row: list[int], **columns: Any) -> list[float]:
            return [1.0 if prompt in PROMPTS[::2] else float(i % 2) for prompt, i in zip(prompts, row, strict=True)]

        return [reward]


class WithHostEntry(RecordingOPO):
    """Leaves an entry of the rollout on the host."""

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        return {**rollout, "difficulty": torch.arange(len(rollout["advantages"]))}


class WithDtypes(RecordingOPO):
    """Keeps the dtypes of the linear layers' outputs in training, in `dtypes`."""

    def training_step(self, model, *arguments, **named):
        if not hasattr(self, "dtypes"):
            self.dtypes = set()
            for layer in self.model.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.register_forward_hook(lambda layer, given, output: self.dtypes.add(output.dtype))
        return super().training_step(model, *arguments, **named)


def generates(*, reward: Callable = even_tokens, **more: Any) -> dict[str, Any]:
    """Arguments of a trainer whose completions the model writes, on its device."""
    return {"trainer_arguments": {"rollout_func": None, "reward_funcs": reward, **more}}


def on_device(*arguments: Any, resume: str | None = None, **options: Any) -> Recording:
    """[`helpers.make_trainer`] on this process's device, trained and checked."""
    trainer = make_trainer(*arguments, use_cpu=False, **options)
    trainer.train(resume_from_checkpoint=resume)
    check(trainer)
    return trainer


def check(trainer: Trainer) -> None:
    """What holds after any run: everything is on this process's device, and all processes have the same weights."""
    args, reference = trainer.args, getattr(trainer, "ref_model", None)
    assert args.device == torch.device("cuda", trainer.accelerator.local_process_index)
    held: dict[str, Any] = {
        "weights": list(trainer.model.parameters()),
        "moments": [each for each in tensors([*trainer.optimizer.state.values()]) if each.ndim],
        "reference": list(reference.parameters()) if reference else [],
    }
    if isinstance(trainer, OPOTrainer):
        held |= {"replay": [*trainer._replay.rollouts], "parts of the rollout": trainer._cut_pass}
    for name, value in held.items():
        elsewhere = {str(each.device) for each in tensors(value)} - {str(args.device)}
        assert not elsewhere, f"{name} on {elsewhere}"
    assert trainer.state.global_step == args.max_steps
    assert all(weight.isfinite().all() for weight in held["weights"])
    for name in ("weights", "reference"):
        for of_others in gather_object([to_host(held[name])]):
            assert same_bits(of_others, to_host(held[name])), f"the processes have different {name}"


def alone() -> bool:
    """Leave the other processes: what follows is a run of one process. Whether it is the first one."""
    first = PartialState().is_main_process
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    AcceleratorState._reset_state(reset_partial_state=True)
    return first


def assert_same_as_on_the_host(
    model: str,
    folder: Path,
    script: Callable[[], Script] = Script,
    *,
    tolerance: float = EXACT,
    tolerance_of_log: float = 10 * EXACT,
    **options: Any,
) -> None:
    """
    A scripted run on the devices is that of one process on the host: every gradient, the weights and the log. The
    tolerances are relative errors, of gradients and weights and of a logged value.
    """
    rows = options.pop("per_device_train_batch_size", 4)
    options["trainer_class"] = WithDtypes
    trainer = on_device(model, folder / "device", script=script(), per_device_train_batch_size=rows, **options)
    rows *= trainer.accelerator.num_processes
    if not alone():
        return
    host = make_trainer(
        model, folder / "host", script=script(), use_cpu=True, per_device_train_batch_size=rows, **options
    )
    host.train()
    assert (host.accelerator.device.type, host.accelerator.num_processes) == ("cpu", 1)
    precision = ("bf16", {torch.bfloat16}) if options.get("bf16") else ("no", {torch.float32})
    for each in (trainer, host):
        assert (each.accelerator.mixed_precision, each.dtypes) == precision
    for number, (one, other) in enumerate(zip(trainer.steps, host.steps, strict=True)):
        assert_close(one.gradient, other.gradient, tolerance, f"gradient of step {number}")
    moved = distance(host.initial, snapshot(host.model))
    assert distance(snapshot(trainer.model), snapshot(host.model)) <= tolerance * moved
    for one, other in zip(logged(trainer), logged(host), strict=True):
        one, other = (
            {name: math.nan if value is None else value for name, value in without_times(entry).items()}
            for entry in (one, other)
        )
        near = {"rel": tolerance_of_log, "abs": tolerance_of_log / 5, "nan_ok": True}
        close = {name: pytest.approx(value, **near) for name, value in other.items()}
        assert one == close, {name: (one.get(name), other.get(name)) for name in close if one.get(name) != close[name]}


def assert_close(gradient: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, name: str) -> None:
    error, size = distance(gradient, expected), norm(expected)
    assert size > 1e-3, f"{name} is zero: the comparison would prove nothing"
    assert error <= tolerance * size, f"{name}: {error / size:.1e}"


def assert_follows_the_definition(trainer: Recording) -> None:
    """Every gradient of a run on generated completions, over all processes, in float64 on the host."""
    script = Script()
    for rollout in trainer.rollouts:
        rewards = [[None if r != r else r for r in row] for row in rollout.rewards_per_func.tolist()]
        script.calls.append(gather_object(Script.observed(rollout, rewards)))
    for step in trainer.steps:
        members = [(int(k), int(i)) for b in step.batches for k, i in zip(b["rollout"], b["row"], strict=True)]
        rollouts, rows = zip(*gather_object(members), strict=True)
        step.batches = [{"rollout": rollouts, "row": rows}]
    reference = Reference(trainer, script)
    for number, step in enumerate(trainer.steps):
        assert_close(step.gradient, reference.step(number).gradient, EXACT, f"gradient of step {number}")


def assert_same_gradients_on_the_host(trainer: Recording, host: Recording) -> None:
    """A run's gradients are those of its micro-batches on the host, as many as the host accumulates."""
    host.current_gradient_accumulation_steps = host.args.gradient_accumulation_steps
    for number, step in enumerate(trainer.steps):
        host.model.load_state_dict(step.policy)
        host._skipped.moved_at = number  # every step before this one has had a gradient
        host.model.train()
        host.model.zero_grad()
        for batch in step.batches:
            host.compute_loss(host.model, batch).backward()
        expected = {name: weight.grad for name, weight in host.model.named_parameters() if weight.grad is not None}
        assert_close(step.gradient, expected, EXACT, f"gradient of step {number}")


def assert_resumes_bitwise(model: str, folder: Path, *, at: int, arguments: dict[str, Any], **options: Any) -> None:
    """A run from the checkpoint of step `at` ends as the uninterrupted one does, to the bit; `arguments` as new."""
    options = {"optim": "adamw_torch", "lr_scheduler_type": "linear", "learning_rate": 1e-3, **options}
    options |= {"save_strategy": "steps", "save_steps": at}
    ends = []
    for resume in (None, str(folder / f"checkpoint-{at}")):
        trainer = on_device(model, folder, resume=resume, **arguments, **options)
        assert len(trainer.steps) == trainer.args.max_steps - (at if resume else 0)
        held = {"weights": snapshot(trainer.model), "optimizer": trainer.optimizer.state_dict()}
        held["reference"] = snapshot(trainer.ref_model) if trainer.ref_model else None
        held |= {"replay": trainer._replay.state_dict(), "rest of the rollout": trainer._cut_pass}
        for rows in [*held["replay"]["rollouts"], *(trainer._cut_pass or ())]:
            for part in rows if isinstance(rows, list) else [rows]:
                part.pop("rollout")  # which `Recording` counts from the beginning of a call
        held |= {"random state": torch.get_rng_state(), "that of the device": torch.cuda.get_rng_state()}
        log = [without_times(entry) for entry in logged(trainer)]
        held["log"] = torch.tensor(list(json.dumps(log, sort_keys=True).encode()))
        ends.append(to_host(held))
    different = [name for name, value in ends[0].items() if not same_bits(value, ends[1][name])]
    assert not different, different


# The command

SHORT = {"max_steps": 4, "save_steps": 2, "validation_steps": 2, "validation_size": 12, "report_size": 12}


def shortened(folder: Path, recipe: str, **changes: Any) -> list[str]:
    """Arguments of a short run of an embedded recipe on a device."""
    fields = {**SHORT, "use_cpu": "false", "output_dir": folder, **changes}
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    return ["--config", str(RECIPES / "arithmetic" / f"{recipe}.yaml"), *words]


def assert_complete(run: Path, *, steps: int, devices: int) -> None:
    """A run's folder holds its log, both accuracies, the report and the model."""
    log, summary = read_lines(run / "log.jsonl"), read_json(run / "summary.json")
    assert read_json(run / "environment.json")["devices"] == ["NVIDIA Fake"] * devices
    assert [line["step"] for line in log if "grad_norm" in line] == list(range(1, steps + 1))
    assert [line["step"] for line in log if "validation/accuracy" in line] == list(range(0, steps + 1, 2))
    cells = [cell for time in ("before", "after") for level in summary[time].values() for cell in level.values()]
    assert [cell["scored"] for cell in cells] == [12] * 8
    assert f"Finished: {steps} optimizer steps" in (run / "report.html").read_text()
    assert AutoModelForCausalLM.from_pretrained(run).device.type == "cpu"
