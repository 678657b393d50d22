"""
Train with vLLM and write the result to `result.json`; `test_with_vllm.py` runs this in separate processes.

    python run.py sync|lora FOLDER '{"mode": "colocate", …}'
"""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from scripted_rollouts import even_tokens
from transformers import AutoModelForCausalLM

from opo_trl import OPOConfig, OPOTrainer


PROMPTS = [f"What is {i} + {i + 1}?" for i in range(16)]
OPTIONS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 16,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "use_vllm": True,
    "vllm_gpu_memory_utilization": 0.05,
    "vllm_max_model_length": 128,
}


def make(model: str, folder: Path, peft_config: LoraConfig | None = None, **options: Any) -> OPOTrainer:
    fields = {**OPTIONS, **options}
    if not torch.cuda.is_available() and "ddp_backend" not in options:
        fields["use_cpu"] = True
    return OPOTrainer(
        model=model,
        args=OPOConfig(str(folder), **fields),
        reward_funcs=even_tokens,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        peft_config=peft_config,
    )


def vllm_options(options: dict) -> dict:
    if options["mode"] == "colocate":
        return {"vllm_mode": "colocate"}
    base_url = f"http://127.0.0.1:{options['port']}"
    return {"vllm_mode": "server", "vllm_server_base_url": base_url, "vllm_group_port": options["group_port"]}


def generated(trainer, n: int) -> tuple[list[int], list[list[int]], list[list[float]]]:
    """Prompt, completions and their log-probabilities from vLLM in its current state."""
    prompt = trainer.processing_class(PROMPTS[0])["input_ids"]
    _, completions, candidates, _ = trainer.vllm_generation.generate([prompt] * n, None, n)
    logps = []
    for candidates_of_tokens in candidates:  # of a completion; the first one of a token is that which was sampled
        logps.append([of_token[0] for of_token in candidates_of_tokens])
    return prompt, completions, logps


def greedy(trainer) -> list[int]:
    """vLLM's greedy completion."""
    generation = trainer.vllm_generation
    temperature = generation.temperature
    generation.temperature = 0.0
    _, (completion,), _ = generated(trainer, 1)
    generation.temperature = temperature
    return completion


@torch.no_grad()
def own_logps(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """A model's log-probabilities of a completion, from the full logits."""
    with whole_weights(model):
        tokens = torch.tensor([prompt + completion], device=model.device)
        logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
    logps = logits.float().log_softmax(-1)
    completion_ids = tokens[0, len(prompt) :].unsqueeze(1)
    return logps.gather(1, completion_ids).squeeze(1).cpu()


def whole_weights(model: torch.nn.Module) -> contextlib.AbstractContextManager:
    """In this context the weights are whole, also under ZeRO-3."""
    parameters = list(model.parameters())
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def mean_gap(trainer) -> float:
    """Mean difference between vLLM's log-probabilities of completions and the trainer's."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    prompt, completions, vllm_logps = generated(trainer, trainer.num_generations)
    gaps = []
    for completion, logps in zip(completions, vllm_logps, strict=True):
        gaps.append(own_logps(model, prompt, completion) - torch.tensor(logps))
    return torch.cat(gaps).abs().mean().item()


def sync(model: str, folder: Path, options: dict) -> dict:
    """Train with a learning rate that reveals old weights in vLLM."""
    deepspeed = {"ddp_backend": "gloo"} if options.get("zero3") else {}
    trainer = make(model, folder, max_steps=5, learning_rate=2e-2, **vllm_options(options), **deepspeed)
    before = greedy(trainer)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    _, _, distributed_type = str(trainer.accelerator.distributed_type).rpartition(".")
    return {
        "processes": trainer.accelerator.num_processes,
        "distributed": distributed_type,
        "gap": mean_gap(trainer),
        "sampling_gap": [entry["sampling/sampling_logp_difference/mean"] for entry in entries],
        "changed": greedy(trainer) != before,
    }


def lora(model: str, folder: Path, options: dict) -> dict:
    """Train an adapter with vLLM, which TRL merges into the base and takes out again at every synchronization."""
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    dtype = torch.bfloat16
    training = {"max_steps": 5, "learning_rate": 0.1, "model_init_kwargs": {"dtype": dtype}}
    trainer = make(model, folder, adapter, **training, **vllm_options(options))
    base_before = base_weights(trainer.model)
    trainer.train()
    base_after = base_weights(trainer.model)
    changed = [name for name, weight in base_after.items() if not torch.equal(weight, base_before[name])]
    trainer.save_model(str(folder))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    saved = PeftModel.from_pretrained(base, folder)
    difference = logits_of(trainer.model) - logits_of(saved)
    trainer._generate([PROMPTS[0]] * trainer.num_generations)  # synchronizes
    return {
        "base": len(base_before),
        "moved": len(changed),
        "logits": difference.abs().max().item(),
        "gap": mean_gap(trainer),
    }


def base_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the weights that are not trained."""
    frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    return {name: weight.detach().clone() for name, weight in frozen.items()}


@torch.no_grad()
def logits_of(model: PeftModel) -> torch.Tensor:
    """Of some tokens, in evaluation mode, on the host."""
    tokens = torch.arange(3, 40, device=model.device).unsqueeze(0)
    model.eval()
    return model(input_ids=tokens).logits.cpu()


def main(commands: dict[str, Callable[[str, Path, dict], dict]]) -> None:
    """Run the command that the program's arguments name, and write its result."""
    if not torch.cuda.is_available():
        import cpu_shim

        cpu_shim.patch_client()
    _, command, output, options_text = sys.argv
    folder = Path(output)
    options = json.loads(options_text)
    result = commands[command](options["model"], folder, options)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        text = json.dumps(result)
        (folder / "result.json").write_text(text)


if __name__ == "__main__":
    main({"sync": sync, "lora": lora})
