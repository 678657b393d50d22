"""
What the processes of a training run hold, by component, measured on CPUs; for `benchmarks/memory.py`.

    python -m benchmarks.memory_ranks '{"sharding": …}'    a process of `measure_ranks`, in a launch
    python -m benchmarks.memory_ranks '{"words": …}'       the process of `measure_resident`
"""

import ctypes
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from .launched import allow_cpu, launch
from .memory_probes import Allocations, Shape, make_config, make_trainer


COMPONENTS = ("weights", "gradients", "optimizer", "buckets", "gathered weights")


def measure_ranks(shape: Shape, *, sharding: str, weights: str = "bfloat16", **options) -> dict[str, Any]:
    """
    Launch two processes (one for `"none"`) that train for two optimizer steps; what the first one planned and held.

    Returns:
        `dict`: `"processes"`, `"distributed_type"`, and for `"update"` and `"step"` by component `[planned, held]`.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(make_config(shape), dtype=getattr(torch, weights))
        model.save_pretrained(f"{folder}/model")
        task = {"sharding": sharding, "weights": weights, "folder": folder, **options}
        precision = "bf16" if weights == "bfloat16" else "no"
        return launch("benchmarks.memory_ranks", task, folder, sharding=sharding, processes=2, precision=precision)


def train_rank(*, sharding: str, weights: str, folder: str, **options):
    """A process of [`measure_ranks`]."""
    allow_cpu(sharding)
    alone = sharding in ("none", "ddp")
    trainer = make_trainer(
        f"{folder}/model",
        rows=4,
        output_dir=f"{folder}/out",
        bf16=weights == "bfloat16",
        model_init_kwargs={"dtype": weights},
        gradient_accumulation_steps=3,
        steps_per_generation=3,
        max_steps=2,
        **({"use_cpu": True} if alone else {"ddp_backend": "gloo"}),
        **options,
    )
    from opo_trl.forecast.plan import memory_plan

    plan, held = memory_plan(trainer), watch(trainer)
    trainer.train()
    plan["optimizer step"]["gradients"] += plan["optimizer step"].pop("float32 gradients", 0)
    result = {
        "processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "update": {name: [plan["layers"].get(name, 0), held["update"].get(name, 0)] for name in COMPONENTS},
        "step": {"gradients": [plan["optimizer step"]["gradients"], held["step"]["gradients"]]},
    }
    if trainer.accelerator.is_main_process:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def measure_resident(words: list[str]) -> dict[str, float]:
    """
    Start a run with the `words` of a command line; bytes of its second optimizer step.

    Returns:
        `dict[str, float]`: `"planned"`, the highest peak of the plan, and the peak of resident memory without what
        libraries take: `"returned"` if freed memory goes back to the system, `"kept"` by glibc's defaults.
    """
    result: dict[str, float] = {}
    for name in ("returned", "kept"):
        with tempfile.TemporaryDirectory() as folder:
            task = {"words": words, "folder": folder, "returned": name == "returned"}
            measured = launch("benchmarks.memory_ranks", task, folder, sharding="none", processes=1)
        result |= {"planned": measured["planned"], name: measured["resident"]}
    return result


def train_recipe(*, words: list[str], folder: str, returned: bool):
    """The process of [`measure_resident`]."""
    from opo_trl.forecast.plan import memory_plan
    from opo_trl.train import prepare

    if returned:
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    few = {"report_size": 2, "validation_size": 2, "disable_tqdm": "true"}
    options = {"output_dir": f"{folder}/run", "max_steps": 2, "validation_steps": "None", **few}
    ready = prepare([*words, *(word for name, value in options.items() for word in (f"--{name}", str(value)))])
    plan, seen = memory_plan(ready.trainer), _Resident(ready.trainer)
    ready.trainer.add_callback(seen)
    with ready.lock:
        ready.trainer.train()
    planned = max(sum(components.values()) for components in plan.values())
    (Path(folder) / "result.json").write_text(json.dumps({"planned": planned, "resident": seen.peak}))


class _Resident(TrainerCallback):
    """Peak resident memory of the last optimizer step, without what libraries take."""

    def __init__(self, trainer: Any):
        self.trainer, self.libraries, self.peak = trainer, 0, 0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.libraries = _status("VmRSS") - sum(holdings(self.trainer).values())
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten

    def on_step_end(self, args, state, control, **kwargs):
        self.peak = _status("VmHWM") - self.libraries


def _status(name: str) -> int:
    """Bytes of a line of Linux's status of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def watch(trainer: Any) -> dict[str, dict[str, int]]:
    """Peak bytes by component in a backward pass and in an optimizer step, filled in while a trainer trains."""
    held: dict[str, dict[str, int]] = {"update": {}, "step": {}}
    trainer.add_callback(_Watch(trainer, held))
    return held


class _Watch(TrainerCallback):
    def __init__(self, trainer: Any, held: dict[str, dict[str, int]]):
        self.trainer, self.held = trainer, held
        self.copied = self.gathered = 0  # bytes that DeepSpeed reduces, and of gathered weights

    def note(self, moment: str):
        sizes = holdings(self.trainer)
        sizes["buckets"] += self.copied
        sizes["gathered weights"] = self.gathered
        for name, size in sizes.items():
            self.held[moment][name] = max(self.held[moment].get(name, 0), size)

    def on_step_begin(self, args, state, control, **kwargs):
        zero = getattr(self.trainer.model_wrapped, "optimizer", None)
        if state.global_step or zero is None:
            return
        if hasattr(zero, "grad_partitions_flat_buffer"):
            from deepspeed.runtime.zero import stage3
            from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

            _around(stage3, "reduce_scatter_coalesced", before=self.on_reduce)
            _around(PartitionedParameterCoordinator, "fetch_sub_module", after=self.on_fetch)
            _around(zero, "step", before=lambda *_: self.note("update"))
        else:
            _around(zero, "allreduce_bucket", before=self.on_reduce)
            _around(zero, "_release_ipg_buffers", before=lambda *_: self.note("update"))
        self.watch_step(zero)

    def on_reduce(self, tensors: Iterable[torch.Tensor], *_):
        self.copied = max(self.copied, sum(t.numel() * t.element_size() for t in tensors))

    def on_fetch(self, *_):
        gathered = (
            p.ds_numel * p.element_size()
            for p in self.trainer.model.parameters()
            if not p.ds_persist and p.ds_status.name != "NOT_AVAILABLE"
        )
        self.gathered = max(self.gathered, sum(gathered))

    def watch_step(self, zero: Any):
        original = zero.step

        def step(*args, **kwargs):
            gradients = holdings(self.trainer)["gradients"]
            with Allocations(itertools.chain(*tensors_held(self.trainer).values())) as allocations:
                original(*args, **kwargs)
            if self.trainer.state.global_step:  # the first step creates the moments
                self.held["step"]["gradients"] = gradients + allocations.peak

        zero.step = step

    def on_substep_end(self, args, state, control, **kwargs):
        self.note("update")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not self.trainer.is_deepspeed_enabled:  # DeepSpeed's step is over by now
            self.note("update")
            self.note("step")


def _around(target: Any, name: str, before: Callable = lambda *_: None, after: Callable = lambda *_: None):
    original = getattr(target, name)

    def wrapped(*args, **kwargs):
        before(*args)
        result = original(*args, **kwargs)
        after(*args)
        return result

    setattr(target, name, wrapped)


def holdings(trainer: Any) -> dict[str, int]:
    """Bytes of the distinct storages of a training process, by component."""
    result: dict[str, int] = {}
    seen: set[int] = set()
    for name, tensors in tensors_held(trainer).items():
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        result[name] = sum(size for key, size in storages.items() if key not in seen)
        seen |= storages.keys()
    if hasattr(trainer.model_wrapped, "_get_ddp_logging_data"):
        sizes = trainer.model_wrapped._get_ddp_logging_data().get("rebuilt_bucket_sizes", "0")
        result["buckets"] = sum(int(size) for size in str(sizes).split(","))
    return result


def tensors_held(trainer: Any) -> dict[str, list[torch.Tensor]]:
    """Component → tensors, ordered so that shared memory is attributed correctly."""
    parameters = list(trainer.model.parameters())
    zero = getattr(trainer.model_wrapped, "optimizer", None)
    weights: list[Any] = [p.data for p in parameters] + [getattr(p, "ds_tensor", None) for p in parameters]
    gradients: list[Any] = [p.grad for p in parameters]
    states: list[Any] = []
    buckets: list[Any] = []
    inner = trainer.optimizer if zero is None else zero.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    for state in inner.state.values():
        states += state.values()
    if zero is not None:
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            states += getattr(zero, name, [])
        weights += getattr(zero, "bit16_groups_flat", [])
        gradients += [getattr(zero, name, None) for name in ("grads_in_partition", "grad_partitions_flat_buffer")]
        for name in ("averaged_gradients", "all_grad_tensors"):
            gradients += [t for group in (getattr(zero, name, None) or {}).values() for t in group or []]
        for bucket in zero.ipg_buckets.values():
            buckets += bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
    for module in trainer.model.modules() if trainer.is_fsdp_enabled else ():
        fsdp = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        for p in itertools.chain(*(group.fsdp_params for group in getattr(fsdp, "_fsdp_param_groups", []))):
            gradients += [p.unsharded_accumulated_grad, getattr(getattr(p, "_unsharded_param", None), "grad", None)]
    # Gradients may be views of a bucket.
    components = {"weights": weights, "buckets": buckets, "gradients": gradients, "optimizer": states}
    return {
        name: [getattr(t, "_local_tensor", t) for t in tensors if isinstance(t, torch.Tensor)]
        for name, tensors in components.items()
    }


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    (train_recipe if "words" in task else train_rank)(**task)
