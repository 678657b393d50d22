"""How `benchmarks/memory.py` measures memory on a CPU: the operations of a pass at any size, and the allocator."""

import itertools
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head


Shape = dict[str, Any]  # the arguments of a Transformers configuration


def make_config(shape: Shape, attention: str = "sdpa") -> Any:
    config = AutoConfig.for_model(**shape)
    config._attn_implementation = attention
    return config


def build(
    shape: Shape, *, lora: int = 0, weights: str = "bfloat16", adapters: str = "float32", attention: str = "sdpa"
) -> Any:
    """Build a model on the meta device: shapes and types without memory."""
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
    """Bytes of live storages that operations allocate; `known` tensors existed before."""

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


@dataclass(frozen=True)
class Pass:
    """
    A forward and backward pass.

    Args:
        rows, length: samples, and their tokens.
        checkpointing: whether activations are recomputed.
        lora: rank of the adapters, 0 without.
        weights, adapters: types of frozen or trained weights, and of adapters.
        autocast: whether to compute in bfloat16.
        attention: implementation of Transformers.
    """

    rows: int
    length: int
    checkpointing: bool = True
    lora: int = 0
    weights: str = "bfloat16"
    adapters: str = "float32"
    autocast: bool = True
    attention: str = "sdpa"


def measure_ops(shape: Shape, *, grad: bool = True, **case: Any) -> int:
    """
    Peak bytes that the operations of a [`Pass`] allocate, besides weights and gradients.

    Tensors have shapes and no values. TRL's Triton kernels allocate nothing, and neither do their stand-ins here.
    """
    one = Pass(**case)
    model = build(shape, lora=one.lora, weights=one.weights, adapters=one.adapters, attention=one.attention).train()
    base = model.get_base_model() if one.lora else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    if one.checkpointing:
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    kernels = {name: getattr(chunked_logprob, name) for name in ("_forward_tile", "_backward_tile", "_addmm_fp32")}
    with FakeTensorMode(allow_non_fake_inputs=True):
        _materialize(model)
        allocations = Allocations(model.parameters())
        ids, mask = (make(one.rows, one.length, dtype=torch.long) for make in (torch.zeros, torch.ones))
        try:
            for name in kernels:
                setattr(chunked_logprob, name, lambda *args, **kwargs: None)
            for _ in range(2):  # the second time, gradients exist already
                allocations.peak = 0
                with allocations, torch.set_grad_enabled(grad):
                    with torch.autocast("cpu", torch.bfloat16, enabled=one.autocast):
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
    """Move tensors from the meta device to the CPU, where in `FakeTensorMode` they have no memory either."""
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
    """An `OPOTrainer` with the arithmetic tokenizer on the CPU; `zero` updates DeepSpeed's configuration."""
    from datasets import Dataset

    from opo_trl import OPOConfig, OPOTrainer
    from opo_trl.data.arithmetic import base_model_path

    def reward(completion_ids, **kwargs):
        return [float(len(set(ids))) for ids in completion_ids]

    args = OPOConfig(
        per_device_train_batch_size=rows,
        num_generations=max(rows, 2),
        max_completion_length=8,
        skip_inert_rows=False,  # the groups of random completions may have zero variance
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
    """Random samples of a rollout. One prompt is padded, because attention would need no mask otherwise."""
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
        "opo_idle": torch.zeros(rows, dtype=torch.bool),
    }


def profiled(step: Callable[[], Any]) -> Any:
    """Events of PyTorch's profiler during `step`, including those of its CPU allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    return profiler.profiler.kineto_results.events()


def held_bytes(events: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Times of allocations and releases in nanoseconds, each with the bytes held."""
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
    Bytes that PyTorch's CPU allocator hands out for `OPOTrainer.compute_loss` and its backward pass, besides weights
    and gradients: the peaks before the end of the LM head's backward pass, and after it.
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
