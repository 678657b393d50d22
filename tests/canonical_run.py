"""
The canonical run: three rollouts of three groups, each used by six optimizer steps, in float32.

Completions differ in length, one is truncated, one group has zero variance, and with two and four processes, groups
span several. All terms act: temperature, anchor correction, KL, clipped gradients. Every optimizer step has eight
completions, however it is cut into processes and micro-batches.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from device_fields import BACKEND, SMALL, USE_CPU
from peft import LoraConfig
from safetensors.torch import load_file
from scripted_rollouts import PROMPTS, Script, even_tokens
from torch import Tensor

from opo_trl import OPOConfig, OPOTrainer


COMPLETIONS_PER_STEP = 8
STEPS_PER_PASS = 3
STEPS = 18
REWARDS = [0.3, 1.7, 2.2, 0.1, 1.0, 0.6, 0.2, 0.7, *[1.0] * 8, 0.5, 0.9, 0.4, 1.3, 0.0, 2.0, 1.1, 0.8]

# A tiny model's parameters are below ZeRO-3's threshold, and would not be sharded.
_OF_TINY_MODELS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "reduce_bucket_size": 2**16,  # instead of 2 GB
}


@dataclass(frozen=True)
class Form:
    """
    A form of the canonical run.

    Args:
        name: its name in tables.
        rows: completions per micro-batch and process.
        processes: number of processes.
        config: accelerate configuration in `recipes/accelerate`; `None` for a single process.
        lora: whether to train an adapter.
        sampled: whether the policy samples the completions; otherwise they are scripted.
        poisoned: whether a target of the second rollout is infinite, so that two optimizer steps are skipped.
        options: further fields of `OPOConfig`.
    """

    name: str
    rows: int = COMPLETIONS_PER_STEP
    processes: int = 1
    config: str | None = None
    lora: bool = False
    sampled: bool = False
    poisoned: bool = False
    options: dict = field(default_factory=dict)

    @property
    def accumulation(self) -> int:
        return COMPLETIONS_PER_STEP // (self.rows * self.processes)


class Poisoned(OPOTrainer):
    """Sets the target of the last sample of the second rollout to infinity."""

    def _finish_rollout(self, rollout):
        rollout = super()._finish_rollout(rollout)
        last_process = self.accelerator.process_index == self.accelerator.num_processes - 1
        if last_process and self._step == self.args.micro_steps_per_rollout:
            rollout["opo_target"][-1] = torch.inf
        return rollout


def make_trainer(form: Form, model: str, folder: Path, trainer_class: type = OPOTrainer) -> OPOTrainer:
    """A trainer of the canonical run."""
    trainer_class = Poisoned if form.poisoned else trainer_class
    if form.config == "fsdp2" and not torch.cuda.is_available():
        fsdp_on_cpu()
    script = Script(REWARDS, truncated=(3,))
    completions = {"reward_funcs": script.reward_functions(), "rollout_func": script.rollout}
    if form.sampled:
        completions = {"reward_funcs": even_tokens}
    data = Dataset.from_dict({"prompt": PROMPTS})
    if "rollouts" in form.options:  # recorded ones
        completions = {}
        data = None
    options = {
        **SMALL,
        "output_dir": str(folder),
        "per_device_train_batch_size": form.rows,
        "gradient_accumulation_steps": form.accumulation,
        "steps_per_generation": STEPS_PER_PASS * form.accumulation,
        "num_generations": 8,
        "num_iterations": 2,
        "max_completion_length": 12,
        "max_steps": STEPS,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        "beta": 0.02,
        "chi2_radius": 0.5,
        "adaptive_temperature": True,
        "anchor_correction": "length_normalized",
        "mask_truncated_completions": not form.sampled,  # a random model hardly ever ends its completion
        "use_cpu": USE_CPU and form.config in (None, "multi_gpu"),
        "ddp_backend": BACKEND if form.processes > 1 else None,
        **form.options,
    }
    args = OPOConfig(**options)
    if args.deepspeed_plugin:
        args.deepspeed_plugin.hf_ds_config.config["zero_optimization"].update(_OF_TINY_MODELS)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM") if form.lora else None
    return trainer_class(model=model, args=args, train_dataset=data, peft_config=lora, **completions)


def run(form: Form, model: str, folder: str) -> None:
    """Train the canonical run in this form; the main process writes `result.json`, and the model is saved."""
    place = Path(folder)
    trainer = make_trainer(form, model, place)
    if form.config in (None, "multi_gpu"):  # elsewhere only a trained model can be saved
        trainer.save_model(str(place / "start"))
    trainer.train()
    trainer.save_model(str(place))
    if trainer.accelerator.is_main_process:
        result = {"log": trainer.state.log_history, **describe(trainer)}
        (place / "result.json").write_text(json.dumps(result))


def describe(trainer: OPOTrainer) -> dict:
    """How the run was executed: a form that silently fell back to another one would prove nothing."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    are_sharded = [is_sharded(parameter) for parameter in trainer.model.parameters()]
    return {
        "processes": trainer.accelerator.num_processes,
        "distributed": str(trainer.accelerator.distributed_type).rpartition(".")[2],
        "zero_stage": plugin.zero_stage if plugin else None,
        "checkpointing": trainer.accelerator.unwrap_model(trainer.model).is_gradient_checkpointing,
        "sharded": sum(are_sharded) / len(are_sharded),
    }


def is_sharded(parameter: Tensor) -> bool:
    """Whether DeepSpeed or FSDP holds a part of it on each process."""
    is_of_deepspeed = hasattr(parameter, "ds_tensor") and parameter.numel() == 0
    return is_of_deepspeed or hasattr(parameter, "placements")


def weights(folder: Path) -> dict[str, Tensor]:
    """The saved model, or the saved adapter."""
    adapter = folder / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else folder / "model.safetensors")


def fsdp_on_cpu():
    """Have accelerate build FSDP over gloo: without a GPU it uses DDP, whatever is requested."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def backend(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = backend
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
