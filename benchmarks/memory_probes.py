"""
How `benchmarks/memory.py` measures memory on a CPU: operations of a pass at any size, the allocator, a run's ranks.

    python -m benchmarks.memory_probes '{"sharding": …}'    a process of `measure_ranks`, in a launch
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head


ROOT = Path(__file__).resolve().parents[1]
ACCELERATE = ROOT / "recipes" / "accelerate"

Shape = dict[str, Any]  # the arguments of a Transformers configuration


def make_config(shape: Shape, attention: str = "sdpa") -> Any:
    config = AutoConfig.for_model(**shape)
    config._attn_implementation = attention
    return config


def build(
    shape: Shape, *, lora: int = 0, weights: str = "bfloat16", adapters: str = "float32", attention: str = "sdpa"
) -> Any:
    """The model on the meta device: shapes and types without memory."""
    with torch.device("meta"):
        config, dtype = make_config(shape, attention), getattr(torch, weights)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        if lora:
            from peft import get_peft_model

            model = get_peft_model(model, _lora(lora), autocast_adapter_dtype=False)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(getattr(torch, adapters))
    return model


def _lora(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")


# The operations of a pass


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operations make and nobody has let go of; `known` are there already."""

    def __init__(self, known: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive: dict[int, Any] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or key in self.alive:
            return

        def freed(_):
            del self.alive[key]
            self.bytes -= size

        self.alive[key] = weakref.ref(storage, freed)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


def measure_ops(
    shape: Shape,
    *,
    rows: int,
    length: int,
    checkpointing: bool = True,
    lora: int = 0,
    weights: str = "bfloat16",
    adapters: str = "float32",
    autocast: bool = True,
    attention: str = "sdpa",
    grad: bool = True,
) -> int:
    """
    Bytes that the operations of a forward and backward pass allocate at their peak, beside weights and gradients.

    Tensors have shapes and no values. TRL's Triton kernels allocate nothing, and neither do their stand-ins here.
    """
    model = build(shape, lora=lora, weights=weights, adapters=adapters, attention=attention).train()
    base = model.get_base_model() if lora else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    if checkpointing:
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    kernels = {name: getattr(chunked_logprob, name) for name in ("_forward_tile", "_backward_tile", "_addmm_fp32")}
    with FakeTensorMode(allow_non_fake_inputs=True):
        _materialize(model)
        allocations = Allocations(model.parameters())
        ids, mask = torch.zeros(rows, length, dtype=torch.long), torch.ones(rows, length, dtype=torch.long)
        try:
            for name in kernels:
                setattr(chunked_logprob, name, lambda *args, **kwargs: None)
            for _ in range(2):  # the second time, there are gradients to add to
                allocations.peak = 0
                with allocations, torch.set_grad_enabled(grad):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        out = model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
                    if grad:
                        out.log_probs.sum().backward()
                    del out
        finally:
            for name, kernel in kernels.items():
                setattr(chunked_logprob, name, kernel)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return allocations.peak - sum(g.numel() * g.element_size() for g in gradients)


def _materialize(model: torch.nn.Module):
    """Turn tensors of the meta device into tensors of the CPU, which in `FakeTensorMode` have no memory either."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                empty = torch.empty(p.shape, dtype=p.dtype, device="cpu")
                made.setdefault(id(p), torch.nn.Parameter(empty, requires_grad=p.requires_grad))
                module._parameters[name] = made[id(p)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


# The allocator


def make_trainer(model: Any, *, rows: int, lora: int = 0, zero: dict[str, Any] | None = None, **options) -> Any:
    """An `OPOTrainer` with the arithmetic tokenizer on the CPU; `zero` goes into DeepSpeed's configuration."""
    from datasets import Dataset

    from opo_trl import OPOConfig, OPOTrainer
    from opo_trl.data.arithmetic import base_model_path

    def reward(completion_ids, **kwargs):
        return [float(len(set(ids))) for ids in completion_ids]

    args = OPOConfig(
        per_device_train_batch_size=rows,
        num_generations=max(rows, 2),
        max_completion_length=8,
        skip_inert_rows=False,  # random completions have no spread of rewards
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    if zero:
        args.deepspeed_plugin.hf_ds_config.config["zero_optimization"].update(zero)
    return OPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["1+1=", "12+3=", "4+4=", "7-1="] * 8}),
        processing_class=AutoTokenizer.from_pretrained(base_model_path()),
        peft_config=_lora(lora) if lora else None,
    )


def micro_batch(shape: Shape, *, rows: int, prompt: int, completion: int) -> dict[str, torch.Tensor]:
    """Random rows as a rollout leaves them; one prompt is padded, without which attention would need no mask."""
    prompt_mask = torch.ones(rows, prompt, dtype=torch.long)
    prompt_mask[0, : prompt // 2] = 0
    return {
        "prompt_ids": torch.randint(shape["vocab_size"], (rows, prompt)),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(shape["vocab_size"], (rows, completion)),
        "completion_mask": torch.ones(rows, completion, dtype=torch.long),
        "advantages": torch.zeros(rows),
        "opo_target": torch.ones(rows),
        "opo_valid": torch.ones(rows, dtype=torch.bool),
        "opo_mu": torch.ones(rows),
        "opo_scale": torch.ones(rows),
        "opo_step": torch.zeros(rows),
    }


def profiled(step: Callable[[], Any]) -> Any:
    """Events of PyTorch's profiler while `step` is called, with those of its CPU allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    return profiler.profiler.kineto_results.events()


def held_bytes(events: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Each time, in nanoseconds, at which memory was taken or given back, and the bytes held since the beginning."""
    memory = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    held = itertools.accumulate(event.nbytes() for event in memory)
    return zip((event.start_ns() for event in memory), held, strict=True)


def measure_loss(
    shape: Shape,
    *,
    rows: int,
    length: int,
    checkpointing: bool = True,
    weights: str = "float32",
    autocast: bool = False,
) -> dict[str, int]:
    """
    Bytes that PyTorch's CPU allocator hands out for `OPOTrainer.compute_loss` and its backward pass, beside weights
    and gradients: peaks until the LM head's backward is through, and after it.
    """
    model = AutoModelForCausalLM.from_config(make_config(shape), dtype=getattr(torch, weights))
    with tempfile.TemporaryDirectory() as folder:
        options = {"output_dir": folder, "use_cpu": True, "bf16": autocast, "gradient_checkpointing": checkpointing}
        trainer = make_trainer(model, rows=rows, **options)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = micro_batch(shape, rows=rows, prompt=length // 2, completion=length - length // 2)
    trainer.accelerator.backward(trainer.compute_loss(model, inputs))
    events = profiled(lambda: trainer.accelerator.backward(trainer.compute_loss(model, inputs)))
    (head,) = (event for event in events if event.name() == "ChunkedLogProbFunctionBackward")
    peaks = {"LM head": 0, "layers": 0}
    for moment, held in held_bytes(events):
        name = "LM head" if moment < head.start_ns() + head.duration_ns() else "layers"
        peaks[name] = max(peaks[name], held)
    return peaks


# The ranks of a run


COMPONENTS = ("weights", "gradients", "optimizer", "buckets", "gathered weights")


def measure_ranks(shape: Shape, *, sharding: str, weights: str = "bfloat16", **options) -> dict[str, Any]:
    """
    Launch two processes (one for `"none"`) that train for two optimizer steps; what the first planned and held.

    Returns:
        `dict`: `"processes"`, `"distributed_type"`, and for `"update"` and `"step"` by component `[planned, held]`.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(make_config(shape), dtype=getattr(torch, weights))
        model.save_pretrained(f"{folder}/model")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        command: list[str] = []
        if sharding == "ddp":
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        elif sharding != "none":
            precision = "bf16" if weights == "bfloat16" else "no"
            command = ["-m", "accelerate.commands.launch", "--config_file", str(ACCELERATE / f"{sharding}.yaml")]
            command += ["--num_processes", "2", "--mixed_precision", precision]
        case = json.dumps({"sharding": sharding, "weights": weights, "folder": folder, **options})
        command = [sys.executable, *command, "-m", "benchmarks.memory_probes", case]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        result = Path(folder) / "result.json"
        if done.returncode or not result.is_file():
            raise RuntimeError(f"{sharding} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(result.read_text())


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
    from opo_trl.metrics.plan import memory_plan

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


def allow_cpu(sharding: str):
    """Lift what keeps DeepSpeed's bfloat16, and FSDP2, to GPUs, and what makes DeepSpeed compile."""
    import transformers.training_args
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if sharding.startswith("zero"):
        import deepspeed

        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its own all-reduce; gloo has one
    if sharding == "fsdp2":
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
        PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)


def watch(trainer: Any) -> dict[str, dict[str, int]]:
    """Bytes by component while a trainer trains, filled in as it does: at most in a backward pass, and in a step."""
    held: dict[str, dict[str, int]] = {"update": {}, "step": {}}
    trainer.add_callback(_Watch(trainer, held))
    return held


class _Watch(TrainerCallback):
    def __init__(self, trainer: Any, held: dict[str, dict[str, int]]):
        self.trainer, self.held = trainer, held
        self.copied = self.gathered = 0  # of what DeepSpeed reduces, and of whole weights

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
        whole = (
            p.ds_numel * p.element_size()
            for p in self.trainer.model.parameters()
            if not p.ds_persist and p.ds_status.name != "NOT_AVAILABLE"
        )
        self.gathered = max(self.gathered, sum(whole))

    def watch_step(self, zero: Any):
        original = zero.step

        def step(*args, **kwargs):
            gradients = holdings(self.trainer)["gradients"]
            with Allocations(itertools.chain(*tensors_held(self.trainer).values())) as allocations:
                original(*args, **kwargs)
            if self.trainer.state.global_step:  # the first step makes the moments
                self.held["step"]["gradients"] = gradients + allocations.peak

        zero.step = step

    def on_substep_end(self, args, state, control, **kwargs):
        self.note("update")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not self.trainer.is_deepspeed_enabled:  # there, the step is over by now
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
    """Component → tensors, in an order in which shared memory is counted where it belongs."""
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
    # Gradients may lie in a bucket.
    components = {"weights": weights, "buckets": buckets, "gradients": gradients, "optimizer": states}
    return {
        name: [getattr(t, "_local_tensor", t) for t in tensors if isinstance(t, torch.Tensor)]
        for name, tensors in components.items()
    }


if __name__ == "__main__":
    train_rank(**json.loads(sys.argv[1]))
