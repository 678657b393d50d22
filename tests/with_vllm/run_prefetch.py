"""
Train with `prefetch_rollouts` and a vLLM server; `test_prefetch_with_vllm.py` runs this in separate processes.

    python run_prefetch.py train FOLDER '{"port": 8000, …}'

`result.json` says how far the server's log-probabilities of each rollout are from those of the policy that trains on
it, and of the policy one rollout earlier.
"""

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from named_tensors import snapshot
from run import main, make, own_logps, vllm_options
from transformers import AutoModelForCausalLM, TrainerCallback

from opo_trl import OPOTrainer


# Two optimizer steps a rollout. Completions are so long that the server still writes when the policy has trained.
FIELDS = {
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "max_completion_length": 96,
    "learning_rate": 2e-2,
    "save_strategy": "steps",
    "save_steps": 1,
}


@dataclass
class Rollout:
    """What the server has answered, and the policy that trains on it, before it does."""

    policy: dict[str, torch.Tensor]  # its weights
    prompts: list[list[int]]
    completions: list[list[int]]
    logps: list[list[list[float]]]

    def gap(self, model: torch.nn.Module, policy: dict[str, torch.Tensor]) -> float:
        """Largest difference, over all tokens, between the server's log-probability and that of a policy."""
        model.load_state_dict(policy)
        gaps = []
        for prompt, completion, logps in zip(self.prompts, self.completions, self.logps, strict=True):
            sampled = torch.tensor([of_token[0] for of_token in logps])
            gaps.append((own_logps(model, prompt, completion) - sampled).abs().max().item())
        return max(gaps)


def observe(trainer: OPOTrainer) -> list[Rollout]:
    """The list to which the trainer will add its rollouts."""
    rollouts = []
    generate = trainer.vllm_generation.generate

    def generate_and_keep(*arguments, **named):
        policy = snapshot(trainer.accelerator.unwrap_model(trainer.model))
        answer = generate(*arguments, **named)
        prompts, completions, logps, _ = answer
        rollouts.append(Rollout(policy, prompts, completions, logps))
        return answer

    trainer.vllm_generation.generate = generate_and_keep
    return rollouts


class Kill(TrainerCallback):
    """Kills this process, or a server's, after some optimizer steps, and prints what was in flight."""

    def __init__(self, step: int, server_group: int | None):
        self.step = step
        self.server_group = server_group

    def on_step_begin(self, args, state, control, **named):
        if state.global_step != self.step:
            return
        print(f"in flight: {prefetching()}", flush=True)
        if self.server_group is None:
            os.kill(os.getpid(), signal.SIGKILL)
        os.killpg(self.server_group, signal.SIGKILL)


def prefetching() -> list[str]:
    """Threads of this process that ask the server for completions."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def train(model: str, folder: Path, options: dict) -> dict:
    """Train, perhaps with one of the parts switched off, or until a process is killed."""
    switched_off = options.get("without")
    fields = {**FIELDS, "max_steps": options.get("max_steps", 8), **vllm_options(options)}
    trainer = make(model, folder, prefetch_rollouts=int(switched_off != "prefetch"), **fields)
    if switched_off == "sync":
        trainer.vllm_generation.sync_weights = lambda: None
    if "killed_after" in options:
        trainer.add_callback(Kill(options["killed_after"], options.get("server_group")))
    rollouts = observe(trainer)
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    compared = AutoModelForCausalLM.from_pretrained(model).to(trainer.accelerator.device)
    to_policy, to_policy_before = [], []
    policy_before = rollouts[0].policy
    for rollout in rollouts:
        to_policy.append(rollout.gap(compared, rollout.policy))
        to_policy_before.append(rollout.gap(compared, policy_before))
        policy_before = rollout.policy
    return {
        "to_policy": to_policy,
        "to_policy_before": to_policy_before,
        "lengths": [sum(map(len, rollout.completions)) for rollout in rollouts],
        "ages": [entry["opo/age"] for entry in trainer.state.log_history if "opo/age" in entry],
        "prefetching": prefetching(),
        "history": trainer.state.log_history,
    }


if __name__ == "__main__":
    main({"train": train})
