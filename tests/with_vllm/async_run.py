"""
Train with a vLLM server that generates meanwhile; `test_async_with_vllm.py` runs this in separate processes.

    python async_run.py train|fault FOLDER '{"model": …, "port": …, "adapter": false, …}'
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import requests
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from opo_trl import AsyncOPOConfig, AsyncOPOTrainer
from opo_trl.data.arithmetic import arithmetic_reward, make_problems
from opo_trl.rollout import vllm_server


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
ANSWER = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
ROWS = make_problems("train", ["Level 3"])
OPTIONS = {
    "per_device_train_batch_size": 48,
    "num_generations": 6,
    "max_completion_length": 40,
    "max_staleness": 4,
    "max_inflight_tasks": 96,
    "queue_maxsize": 96,  # two steps ahead, so that it runs full and dry
    "token_budget": 0,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "vllm_server_timeout": 15,
    "heartbeat_stale_after_s": 15,
}


def make(model: str, folder: Path, options: dict, **config: Any) -> AsyncOPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, ANSWER
    device = {} if torch.cuda.is_available() else {"use_cpu": True}
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = AsyncOPOTrainer(
        model,
        reward_funcs=arithmetic_reward,
        args=AsyncOPOConfig(
            str(folder),
            vllm_server_base_url=f"http://127.0.0.1:{options['port']}",
            **{**OPTIONS, **device, **options.get("config", {}), **config},
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": r["problem"]}], "solution": r["solution"]} for r in ROWS]
        ),
        processing_class=tokenizer,
        **({"peft_config": adapter} if options["adapter"] else {}),
    )
    trainer.remove_callback(PrinterCallback)
    if trainer._lora_sync and trainer.accelerator.is_main_process:
        for version in range(1, 10):  # of earlier runs with this server
            trainer.vllm_client.unload_lora_adapter(f"trl-policy-v{version}")
    return trainer


def served(trainer: AsyncOPOTrainer, model: str) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """Prompts, completions and their log-probabilities from the server, in its current state."""
    found = []
    name = f"trl-policy-v{trainer.model_version}" if trainer._lora_sync else model
    for row in ROWS[:16]:
        prompt = trainer.processing_class(row["problem"])["input_ids"]
        plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        request = {"model": name, "prompt": prompt, "max_tokens": 40, "return_token_ids": True, "logprobs": 0, **plain}
        answer = requests.post(f"{trainer.args.vllm_server_base_url}/v1/completions", json=request, timeout=60)
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        found.append((prompt, choice["token_ids"], torch.tensor(choice["logprobs"]["token_logprobs"])))
    return found


@torch.no_grad()
def gap(model: torch.nn.Module, completions: list[tuple[list[int], list[int], torch.Tensor]]) -> float:
    """Mean absolute difference between a model's log-probabilities and those of the server."""
    gaps = []
    for prompt, completion, logps in completions:
        tokens = torch.tensor([prompt + completion], device=next(model.parameters()).device)
        own = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        gaps.append((own.gather(1, tokens[0, len(prompt) :, None]).squeeze(1).cpu() - logps).abs())
    return torch.cat(gaps).mean().item()


def train(model: str, folder: Path, options: dict) -> dict | None:
    """Train; what the log says, and how far the trained and the initial policy are from the server's."""
    trainer = make(model, folder, options)
    trainer.train()
    if not trainer.accelerator.is_main_process:
        return None
    completions = served(trainer, model)
    trainer.save_model(str(folder))  # the trained one has an attention that needs packed rows
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    before = gap(base, completions)
    trained = (
        PeftModel.from_pretrained(base, folder) if options["adapter"] else AutoModelForCausalLM.from_pretrained(folder)
    )
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "processes": trainer.accelerator.num_processes,
        "adapter": trainer._lora_sync,
        "gap": gap(trained.eval(), completions),
        "gap_of_base": before,
        "log": [{k: v for k, v in entry.items() if isinstance(v, int | float)} for entry in log],
    }


class Killer(TrainerCallback):
    """Kills the server after the third step, and writes down when."""

    def __init__(self, folder: Path, server: int):
        self.folder, self.server = folder, server

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.killpg(self.server, signal.SIGKILL)
            (self.folder / "at").write_text(str(time.time()))


def lose(model: str, folder: Path, options: dict) -> None:
    """Train, and lose the server."""
    vllm_server.PATIENCE = 10.0
    trainer = make(model, folder, options)
    trainer.add_callback(Killer(folder, options["pid"]))
    trainer.train()


def fault(model: str, folder: Path, options: dict) -> dict:
    """How a process ends that loses its server: its status, what it said, and after how many seconds."""
    command = [sys.executable, __file__, "lose", str(folder), json.dumps(options)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    seconds = time.time() - float((folder / "at").read_text())
    return {"status": ended.returncode, "output": ended.stderr[-20000:], "seconds": seconds}


if __name__ == "__main__":
    if not torch.cuda.is_available():
        import cpu_shim

        cpu_shim.patch_async_trainer()
    command, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    result = {"train": train, "fault": fault, "lose": lose}[command](options["model"], folder, options)
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
