"""
Train with vLLM and write the result to `result.json`; `test_with_vllm.py` runs this in separate processes.

    python run.py sync|lora FOLDER '{"mode": "colocate", …}'
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from helpers import even_tokens
from peft import LoraConfig, PeftModel
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
    device = {} if torch.cuda.is_available() or "ddp_backend" in options else {"use_cpu": True}
    return OPOTrainer(
        model=model,
        args=OPOConfig(str(folder), **{**OPTIONS, **device, **options}),
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
    _, completions, logps, _ = trainer.vllm_generation.generate([prompt] * n, None, n)
    return prompt, completions, [[each[0] for each in row] for row in logps]


def greedy(trainer) -> list[int]:
    """vLLM's greedy completion."""
    temperature, trainer.vllm_generation.temperature = trainer.vllm_generation.temperature, 0.0
    _, completions, _ = generated(trainer, 1)
    trainer.vllm_generation.temperature = temperature
    return completions[0]


@torch.no_grad()
def own_logps(trainer, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """The trainer's log-probabilities of a completion, from the full logits."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    parameters = list(model.parameters())
    gathered: Any = contextlib.nullcontext()
    if any(hasattr(p, "ds_id") for p in parameters):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(parameters)
    with gathered:
        tokens = torch.tensor([prompt + completion], device=trainer.accelerator.device)
        logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None]).squeeze(1).cpu()


def sync(model: str, folder: Path, options: dict) -> dict:
    """Train with a learning rate that reveals old weights in vLLM."""
    deepspeed = {"ddp_backend": "gloo"} if options.get("zero3") else {}
    trainer = make(model, folder, max_steps=5, learning_rate=2e-2, **vllm_options(options), **deepspeed)
    before = greedy(trainer)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    prompt, completions, logps = generated(trainer, trainer.num_generations)
    gaps = [own_logps(trainer, prompt, ids) - torch.tensor(row) for ids, row in zip(completions, logps, strict=True)]
    return {
        "processes": trainer.accelerator.num_processes,
        "distributed": str(trainer.accelerator.distributed_type).rpartition(".")[2],
        "gap": torch.cat(gaps).abs().mean().item(),
        "sampling_gap": [
            entry["sampling/sampling_logp_difference/mean"]
            for entry in trainer.state.log_history
            if "grad_norm" in entry
        ],
        "changed": greedy(trainer) != before,
    }


def lora(model: str, folder: Path, options: dict) -> dict:
    """Train an adapter with vLLM, which TRL merges into the base and takes out again at every synchronization."""
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    dtype = torch.bfloat16
    training = {"max_steps": 5, "learning_rate": 0.1, "model_init_kwargs": {"dtype": dtype}}
    trainer = make(model, folder, adapter, **training, **vllm_options(options))
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    moved = [n for n, p in trainer.model.named_parameters() if n in base and not torch.equal(p, base[n])]
    trainer.save_model(str(folder))
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=dtype), folder)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        here, there = (m.eval()(input_ids=tokens.to(m.device)).logits.cpu() for m in (trainer.model, loaded))
    trainer._generate([PROMPTS[0]] * trainer.num_generations)  # synchronizes
    prompt, completions, logps = generated(trainer, trainer.num_generations)
    gaps = [own_logps(trainer, prompt, ids) - torch.tensor(row) for ids, row in zip(completions, logps, strict=True)]
    return {
        "base": len(base),
        "moved": len(moved),
        "logits": (here - there).abs().max().item(),
        "gap": torch.cat(gaps).abs().mean().item(),
    }


if __name__ == "__main__":
    if not torch.cuda.is_available():
        import cpu_shim

        cpu_shim.patch_client()
    command, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    result = {"sync": sync, "lora": lora}[command](options["model"], folder, options)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
