"""Runs on devices, and what is checked of them."""

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from device_fields import RECIPES
from float64_reference import EXACT, Reference
from named_tensors import distance, norm, snapshot
from recording_trainers import Recording, RecordingOPO, logged, make_trainer, without_times
from scripted_rollouts import PROMPTS, Script, even_tokens
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
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for element in value:
            yield from tensors(element)


def to_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: to_host(element) for name, element in value.items()}
    if isinstance(value, list):
        return [to_host(element) for element in value]
    if isinstance(value, Tensor):
        return value.cpu()
    return value


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
            rewards = []
            for prompt, i in zip(prompts, row, strict=True):
                is_dead = prompt in PROMPTS[::2]
                rewards.append(1.0 if is_dead else float(i % 2))
            return rewards

        return [reward]


class WithHostEntry(RecordingOPO):
    """Leaves an entry of the rollout on the host."""

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        completions = len(rollout["advantages"])
        return {**rollout, "difficulty": torch.arange(completions)}


class WithDtypes(RecordingOPO):
    """Records the dtypes of the linear layers' outputs in training, in `dtypes`."""

    def training_step(self, model, *arguments, **named):
        if not hasattr(self, "dtypes"):
            self.dtypes = set()
            for layer in self.model.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.register_forward_hook(lambda layer, inputs, output: self.dtypes.add(output.dtype))
        return super().training_step(model, *arguments, **named)


def generates(*, reward: Callable = even_tokens, **more: Any) -> dict[str, Any]:
    """Arguments of a trainer whose completions the model writes, on its device."""
    return {"trainer_arguments": {"rollout_func": None, "reward_funcs": reward, **more}}


def on_device(*arguments: Any, resume: str | None = None, **options: Any) -> Recording:
    """[`recording_trainers.make_trainer`] on this process's device, trained and checked."""
    trainer = make_trainer(*arguments, use_cpu=False, **options)
    trainer.train(resume_from_checkpoint=resume)
    check(trainer)
    return trainer


def check(trainer: Trainer) -> None:
    """What holds after any run: everything is on this process's device, and all processes have the same weights."""
    args = trainer.args
    assert args.device == torch.device("cuda", trainer.accelerator.local_process_index)
    weights = list(trainer.model.parameters())
    reference = getattr(trainer, "ref_model", None)
    reference_weights = list(reference.parameters()) if reference else []
    optimizer_state = tensors(list(trainer.optimizer.state.values()))
    parts: dict[str, Any] = {
        "weights": weights,
        "moments": [tensor for tensor in optimizer_state if tensor.ndim],  # a count of steps may be on the host
        "reference": reference_weights,
    }
    if isinstance(trainer, OPOTrainer):
        parts["replay"] = list(trainer._replay.rollouts)
        parts["parts of the rollout"] = trainer._cut_pass
    for name, value in parts.items():
        elsewhere = {str(tensor.device) for tensor in tensors(value)} - {str(args.device)}
        assert not elsewhere, f"{name} on {elsewhere}"
    assert trainer.state.global_step == args.max_steps
    for weight in weights:
        assert weight.isfinite().all()
    for name in ("weights", "reference"):
        of_this_process = to_host(parts[name])
        for of_process in gather_object([of_this_process]):
            assert same_bits(of_process, of_this_process), f"the processes have different {name}"


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
    assert host.accelerator.device.type == "cpu"
    assert host.accelerator.num_processes == 1
    precision = ("bf16", {torch.bfloat16}) if options.get("bf16") else ("no", {torch.float32})
    assert precision_of(trainer) == precision_of(host) == precision
    for number, (step, of_host) in enumerate(zip(trainer.steps, host.steps, strict=True)):
        assert_close(step.gradient, of_host.gradient, tolerance, f"gradient of step {number}")
    weights_of_host = snapshot(host.model)
    change_in_training = distance(host.initial, weights_of_host)
    assert distance(snapshot(trainer.model), weights_of_host) <= tolerance * change_in_training
    for entry, of_host in zip(logged(trainer), logged(host), strict=True):
        assert_close_entries(entry, of_host, tolerance_of_log)


def precision_of(trainer: WithDtypes) -> tuple[str, set[torch.dtype]]:
    return trainer.accelerator.mixed_precision, trainer.dtypes


def metrics_of(entry: dict) -> dict[str, float]:
    """A log entry without times, where NaN stands for `None`."""
    return {name: math.nan if value is None else value for name, value in without_times(entry).items()}


def assert_close_entries(entry: dict, expected: dict, tolerance: float) -> None:
    metrics = metrics_of(entry)
    expected_metrics = metrics_of(expected)
    assert metrics.keys() == expected_metrics.keys()
    different = {}
    for name, value in expected_metrics.items():
        if metrics[name] != pytest.approx(value, rel=tolerance, abs=tolerance / 5, nan_ok=True):
            different[name] = (metrics[name], value)
    assert not different


def assert_close(gradient: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, name: str) -> None:
    error = distance(gradient, expected)
    size = norm(expected)
    assert size > 1e-3, f"{name} is zero: the comparison would prove nothing"
    assert error <= tolerance * size, f"{name}: {error / size:.1e}"


def rewards_of(rollout: SimpleNamespace) -> list[list[float | None]]:
    """By row and function; `None` where a function could not score."""
    rewards = []
    for of_row in rollout.rewards_per_func.tolist():
        rewards.append([None if math.isnan(reward) else reward for reward in of_row])
    return rewards


def assert_follows_the_definition(trainer: Recording) -> None:
    """Every gradient of a run on generated completions, over all processes, in float64 on the host."""
    script = Script()
    for rollout in trainer.rollouts:
        observed = Script.observed(rollout, rewards_of(rollout))
        script.calls.append(gather_object(observed))
    for step in trainer.steps:
        rollouts = []
        rows = []
        for batch in step.batches:
            rollouts += batch["rollout"].tolist()
            rows += batch["row"].tolist()
        step.batches = [{"rollout": gather_object(rollouts), "row": gather_object(rows)}]
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
    whole = on_device(model, folder, **arguments, **options)
    assert len(whole.steps) == whole.args.max_steps
    expected = end_of_run(whole)
    checkpoint = str(folder / f"checkpoint-{at}")
    resumed = on_device(model, folder, resume=checkpoint, **arguments, **options)
    assert len(resumed.steps) == resumed.args.max_steps - at
    end = end_of_run(resumed)
    different = [name for name, value in expected.items() if not same_bits(value, end[name])]
    assert not different, different


def end_of_run(trainer: Recording) -> dict[str, Any]:
    """All that a resumed run must have as the uninterrupted one, on the host; the log as bytes."""
    replay = trainer._replay.state_dict()
    for rows in (*replay["rollouts"], *(trainer._cut_pass or ())):
        for part in rows if isinstance(rows, list) else [rows]:
            part.pop("rollout")  # which `Recording` counts from the beginning of a call
    log = [without_times(entry) for entry in logged(trainer)]
    text = json.dumps(log, sort_keys=True)
    end = {
        "weights": snapshot(trainer.model),
        "optimizer": trainer.optimizer.state_dict(),
        "reference": snapshot(trainer.ref_model) if trainer.ref_model else None,
        "replay": replay,
        "rest of the rollout": trainer._cut_pass,
        "random state": torch.get_rng_state(),
        "that of the device": torch.cuda.get_rng_state(),
        "log": torch.tensor(list(text.encode())),
    }
    return to_host(end)


# The command

SHORT = {"max_steps": 4, "save_steps": 2, "validation_steps": 2, "validation_size": 12, "report_size": 12}


def shortened(folder: Path, recipe: str, **changes: Any) -> list[str]:
    """Arguments of a short run of an embedded recipe on a device."""
    fields = {**SHORT, "use_cpu": "false", "output_dir": folder, **changes}
    arguments = ["--config", str(RECIPES / "arithmetic" / f"{recipe}.yaml")]
    for name, value in fields.items():
        arguments += [f"--{name}", str(value)]
    return arguments


def assert_complete(run: Path, *, steps: int, devices: int) -> None:
    """A run's folder holds its log, both accuracies, the report and the model."""
    environment = read_json(run / "environment.json")
    assert environment["devices"] == ["NVIDIA Fake"] * devices
    log = read_lines(run / "log.jsonl")
    assert steps_with(log, "grad_norm") == list(range(1, steps + 1))
    assert steps_with(log, "validation/accuracy") == list(range(0, steps + 1, 2))
    summary = read_json(run / "summary.json")
    scored = []
    for time in ("before", "after"):
        for level in summary[time].values():
            scored += [accuracy["scored"] for accuracy in level.values()]
    assert scored == [12] * 8
    report = (run / "report.html").read_text()
    assert f"Finished: {steps} optimizer steps" in report
    model = AutoModelForCausalLM.from_pretrained(run)
    assert model.device.type == "cpu"


def steps_with(log: list[dict], metric: str) -> list[int]:
    return [entry["step"] for entry in log if metric in entry]
