r"""
Asynchronous methods that the benchmark of staleness compares, and one of their runs.

| method | loss of a completion, with Δ = log π/π_behaviour |
|---|---|
| AsyncGRPO | TRL's, as shipped: `−min(ρA, clip(ρ)A)` of each token's ratio ρ |
| GSPO (arXiv 2507.18071) | the same of the geometric mean of ρ over the completion |
| M2PO (2510.01161) | `−ρA` of each token, without those of the largest (log ρ)² |
| OPO | `AsyncOPOTrainer`: `−w·v·Δ + μ/2·w·Δ²`, weight w = min(exp Δ, 2) |
| OPO, weight 1 | the same with w = 1 |
| OPO, weight 1, falling μ | w = 1, and μ divided by the root of 1 + age |
| OPO, latest anchor | `−w·v·Δ'`, where Δ' = log π/π_latest is 0; w = min(exp Δ, bound), μ without effect |
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_callback import PrinterCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

from opo_trl import AsyncOPOConfig, AsyncOPOTrainer
from opo_trl.asynchronous.attention import in_pytorch
from opo_trl.asynchronous.in_process import GeneratesInProcess, InProcessLoop, InProcessWorker, sample
from opo_trl.data.arithmetic import arithmetic_reward, base_model_path, make_problems

from .objectives import neighbours


LEVEL, TEST_PROBLEMS, MAX_TOKENS, BATCH, GROUP = "Level 3", 500, 40, 48, 6


class AdvantageLoop(GeneratesInProcess, _AsyncRolloutLoop):
    """TRL's rollout loop with TRL's advantages."""


# Other losses of policy gradients


class WithTokens(AsyncGRPOTrainer):
    """
    A loss of the log-ratios of all tokens, which `_loss_of_tokens` computes. Sums are over one micro-batch, so an
    optimizer step must be one.
    """

    own: float  # the method's own field

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs: Any = None

        def forward(**named):
            nonlocal outputs
            outputs = model(**named)
            return outputs

        super().compute_loss(forward, inputs)  # for its metrics
        tokens = inputs["token_index"] >= 0
        log_ratio = outputs.log_probs.flatten()[inputs["token_index"][tokens]] - inputs["old_log_probs"][tokens]
        return self._loss_of_tokens(log_ratio, inputs["advantages"][tokens], inputs["segment_id"][tokens])

    def _loss_of_tokens(self, log_ratio: Tensor, advantages: Tensor, completion: Tensor) -> Tensor:
        """Loss from the log-ratio, the advantage and the completion of each token, `[M]` each."""
        raise NotImplementedError


class GSPO(WithTokens):
    """GSPO's clipped ratio of sequences."""

    def _loss_of_tokens(self, log_ratio, advantages, completion):
        length = torch.bincount(completion).to(log_ratio.dtype)
        ratio = (torch.zeros_like(length).index_add(0, completion, log_ratio) / length).exp()
        advantage = torch.zeros_like(length).index_add(0, completion, advantages) / length
        clipped = ratio.clamp(1 - self.own, 1 + self.own)
        return -torch.min(ratio * advantage, clipped * advantage).mean()


class M2PO(WithTokens):
    """M2PO: tokens of the smallest log-ratios, as many as keep their mean square at most `own`."""

    def _loss_of_tokens(self, log_ratio, advantages, completion):
        everything = torch.ones_like(log_ratio, dtype=torch.bool)
        kept = neighbours.small_second_moment(log_ratio.detach(), everything, self.own)
        return -torch.where(kept, log_ratio.exp() * advantages, 0.0).mean()


# Other anchors of OPO


class Unweighted(AsyncOPOTrainer):
    """Anchor: the behaviour policy. Weight 1."""

    objective_class = neighbours.Unweighted


class FallingMu(AsyncOPOTrainer):
    """The same, with the drive as it is and a χ² coefficient that falls with age."""

    objective_class = neighbours.FallingMu


class LatestAnchor(AsyncOPOTrainer):
    """Anchor: the policy that takes the completion up, as in AReaL's decoupled loss. Weight of at most `own`."""

    objective_class = neighbours.Decoupled


@dataclass(frozen=True)
class Method:
    """
    A method of the comparison.

    Args:
        name (`str`): what the page calls it.
        trainer (`type`): its trainer.
        field (`str`): its own field, which is tuned; `"own"` if it is not one of the configuration.
        values (`tuple[float, ...]`): that are tried.
        meaning (`str`): what the page calls that field.
        color (`str`): of its curve.
    """

    name: str
    trainer: Any
    field: str
    values: tuple[float, ...]
    meaning: str
    color: str


METHODS = {
    method.name: method
    for method in (
        Method("OPO", AsyncOPOTrainer, "mu", (0.3, 0.1, 0.03), "μ", "#d55e00"),
        Method("OPO, weight 1", Unweighted, "mu", (0.3, 0.1, 0.03), "μ", "#e69f00"),
        Method("OPO, weight 1, falling μ", FallingMu, "mu", (0.3, 0.1, 0.03), "μ", "#c0a060"),
        Method("OPO, latest anchor", LatestAnchor, "own", (2.0, 4.0, 1.0), "bound", "#8c3b00"),
        Method("AsyncGRPO", AsyncGRPOTrainer, "epsilon", (0.2, 0.4, 0.8), "clip range", "#0072b2"),
        Method("GSPO", GSPO, "own", (0.02, 0.2, 0.005), "clip range", "#b03a86"),
        Method("M2PO", M2PO, "own", (0.04, 0.01, 0.16), "threshold", "#7f7f7f"),
    )
}


@dataclass(frozen=True)
class Run:
    """
    A run of the embedded arithmetic task.

    Args:
        folder (`Path`): where `run.json` is written.
        method (`str`): of [`METHODS`].
        staleness (`int`): versions of the policy that completions are old when the trainer takes them.
        learning_rate (`float`), own (`float`): what is tuned.
        seed (`int`): of the order of prompts and of the completions.
        steps (`int`): optimizer steps, a rollout of 48 completions each.
        passes (`int`): optimizer steps over each rollout.
    """

    folder: Path
    method: str
    staleness: int
    learning_rate: float
    own: float
    seed: int
    steps: int
    passes: int = 1

    @property
    def is_done(self) -> bool:
        """Whether the run has been finished."""
        return (self.folder / "run.json").exists()

    def result(self) -> dict[str, Any]:
        """What a finished run has measured."""
        return json.loads((self.folder / "run.json").read_text())


def repeated(trainer: Any, passes: int) -> Any:
    """A trainer of TRL with several optimizer steps over each rollout, which OPO's has as `num_iterations`."""

    class Repeated(trainer):
        _left, _kept = 0, None

        def get_batch_samples(self, epoch_iterator, num_batches, device):
            if not self._left:
                self._left, self._kept = passes, super().get_batch_samples(epoch_iterator, num_batches, device)
            self._left -= 1
            return self._kept

    return Repeated


def train(run: Run) -> None:
    """Train and measure in this process, which must be a new one; its output goes to a file in the run's folder."""
    run.folder.mkdir(parents=True, exist_ok=True)
    log = (run.folder / "log.txt").open("w")
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    torch.set_num_threads(1)
    method = METHODS[run.method]
    is_opo = issubclass(method.trainer, AsyncOPOTrainer)
    args = (AsyncOPOConfig if is_opo else AsyncGRPOConfig)(
        **common_fields(run.folder, run.learning_rate, run.seed, max_steps=run.steps * run.passes),
        token_budget=0,
        weight_sync_steps=run.passes,
        max_staleness=run.staleness + 4,
        **({} if method.field == "own" else {method.field: run.own}),
        **({"num_iterations": run.passes, "ratio_form": "log"} if is_opo else {}),
    )
    trainer_class = method.trainer if is_opo else repeated(method.trainer, run.passes)
    trainer = make_trainer(trainer_class, args, run.staleness, InProcessLoop if is_opo else AdvantageLoop)
    if method.field == "own":
        getattr(trainer, "policy_objective", trainer).own = run.own
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {
        **accuracies(trainer.model, make_tokenizer()),
        "rewards": [round(entry["reward"], 4) for entry in steps if "reward" in entry],
        "entropy": round(sum(entry["entropy"] for entry in steps[-5:]) / 5, 4),
    }
    (run.folder / "run.json").write_text(json.dumps(found))


def common_fields(folder: str | Path, learning_rate: float, seed: int, *, max_steps: int) -> dict[str, Any]:
    """Fields of every run: 8 prompts × 6 completions per optimizer step, without clipping, on a CPU, silent."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "num_generations": GROUP,
        "max_completion_length": MAX_TOKENS,
        "max_steps": max_steps,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "seed": seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def make_trainer(kind: Any, args: Any, staleness: int, loop_class: Any = InProcessLoop) -> Any:
    """An asynchronous trainer whose completions are written in this process, by a policy some versions old."""
    model, tokenizer, data = base_model_path(), make_tokenizer(), training_problems(args.seed)
    worker = InProcessWorker(
        model, args, data, arithmetic_rewards, tokenizer, staleness=staleness, loop_class=loop_class
    )
    named = {"processing_class": tokenizer, "rollout_worker": worker, "weight_transfer": worker}
    with in_pytorch(torch.device("cpu")):
        return kind(model, args=args, train_dataset=data, **named)


def make_tokenizer() -> Any:
    """The base model's tokenizer, with a chat template that adds nothing."""
    tokenizer = AutoTokenizer.from_pretrained(base_model_path())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
    return tokenizer


def training_problems(seed: int) -> Dataset:
    """The problems as conversations, in the order of a seed."""
    prompts = [
        {"prompt": [{"role": "user", "content": problem["problem"]}], "solution": problem["solution"]}
        for problem in make_problems("train", [LEVEL])
    ]
    return Dataset.from_list(prompts).shuffle(seed=seed)


def arithmetic_rewards(completions: list, solution: list[str], **_: Any) -> list[float]:
    """Whether a conversation's only answer is right."""
    return arithmetic_reward([turns[0]["content"] for turns in completions], solution)


def accuracies(model: Any, tokenizer: Any, *, for_tuning: bool = False, draws: int = 7) -> Mapping[str, float]:
    """Sampled and greedy accuracy on the first half of the test problems, or the other, in float32 as trained."""
    policy = AutoModelForCausalLM.from_pretrained(base_model_path(), dtype=torch.float32).eval()
    policy.load_state_dict(model.state_dict(), strict=False)
    problems = list(make_problems("test", [LEVEL]))
    problems = problems[TEST_PROBLEMS:] if for_tuning else problems[:TEST_PROBLEMS]
    solutions, found = [problem["solution"] for problem in problems], {}
    for name, temperature in (("sampled", 1.0), ("greedy", 1e-4)):
        tokens, _ = sample(
            policy,
            [tokenizer(problem["problem"])["input_ids"] for problem in problems],
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            eos=torch.tensor([tokenizer.eos_token_id]),
            pad=tokenizer.pad_token_id,
            generator=torch.Generator().manual_seed(draws),
        )
        texts = [_text(ids, tokenizer) for ids in tokens.tolist()]
        found[name] = sum(arithmetic_reward(texts, solutions)) / len(texts)
    return found


def _text(ids: list[int], tokenizer: Any) -> str:
    """What was written up to the end of the turn."""
    end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else None
    return tokenizer.decode(ids[:end], skip_special_tokens=True)
