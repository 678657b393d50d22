"""
`AsyncOPOTrainer`: TRL's experimental `AsyncGRPOTrainer` with the objective of Orthogonalized Policy Optimization.

A server generates while the trainer trains, so that completions are some versions of the policy old. TRL owns the
server, the rollout worker, the synchronization of weights, packing and checkpoints. `OPORolloutLoop` (`targets`) gives
samples their targets in the worker's process; `_collate` takes them along to the process that trains; `compute_loss`
sums the objective's losses over rows, divided by a number of the optimizer step, so that the sum does not depend on
how samples are split into rows, micro-batches and processes.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from .. import trl_contract
from ..checks.weights import check_finite, check_models
from ..metrics.step import SampleReport, metrics_of_samples
from ..objective import OPO, Objective, Samples
from ..rollout.frozen_base import FrozenBase
from ..rollout.prompts import check_datasets
from ..rollout.vllm_server import without_password
from ..trainer import OPOTrainer
from . import attention, faults
from .config import AsyncOPOConfig
from .resumable import ResumableAsyncTrainer
from .targets import MEANS, OWN, make_targets


@dataclass(frozen=True, kw_only=True)
class PackedSamples(Samples):
    """
    Rows whose trained tokens follow one another: `[M]` in place of `[B, T]`. `row` is that of each token, `share` that
    of each row in the trained tokens of its conversation, `tokens` their number.
    """

    row: Tensor
    share: Tensor
    tokens: Tensor

    @property
    def length(self) -> Tensor:
        return self.tokens

    def sum(self, x: Tensor) -> Tensor:
        """Of the whole conversation, for which the tokens of a row stand."""
        return torch.zeros_like(self.share, dtype=x.dtype).index_add(0, self.row, x) / self.share

    def spread(self, x: Tensor) -> Tensor:
        return x[self.row]


class AsyncOPOTrainer(ResumableAsyncTrainer):
    r"""
    Trainer for Orthogonalized Policy Optimization while a server generates, a drop-in replacement of
    [`~trl.experimental.async_grpo.AsyncGRPOTrainer`].

    Example:

    ```python
    from datasets import load_dataset
    from opo_trl import AsyncOPOConfig, AsyncOPOTrainer
    from opo_trl.rewards import accuracy_reward

    trainer = AsyncOPOTrainer(
        model="Qwen/Qwen3-1.7B",
        reward_funcs=accuracy_reward,
        args=AsyncOPOConfig(output_dir="qwen3-async-opo", mu=0.3),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```

    `args` is an [`AsyncOPOConfig`], by default with an output folder named after the model; the rest is as in TRL.

    Raises:
        `TypeError`: `args` is a configuration of another trainer.
        `ImportError`: a package is missing that the extra `async` or `vllm` installs.
        `ValueError`: TRL's attention kernel does not run on this process's GPU, the rollout worker does not make OPO's
            targets, parameters are sharded by ZeRO-3 or FSDP 1, or the server reports other log-probabilities than
            those of the policy that it samples from.
    """

    _tag_names = ["trl", "async-opo"]  # noqa: RUF012 (TRL declares these as class attributes)
    _name = "AsyncOPO"
    _paper = OPOTrainer._paper
    objective_class: type[Objective] = OPO
    policy_objective: Objective
    args: AsyncOPOConfig

    def __init__(self, model: str, reward_funcs=None, args: AsyncOPOConfig | None = None, *further, **named):
        trl_contract.check_replaced()
        args = AsyncOPOConfig(f"{model.split('/')[-1]}-AsyncOPO") if args is None else args
        if not isinstance(args, AsyncOPOConfig):
            raise TypeError(f"args is of type {type(args).__name__}. Pass an `AsyncOPOConfig`.")
        check_datasets(AsyncGRPOTrainer, model, reward_funcs, args, *further, **named)
        options: Any = args.model_init_kwargs or {}  # a dict, once parsed
        server = named.get("rollout_worker") is None
        own_attention = attention.check_requirements(args, options, server=server)
        check_models(model, (), args)
        # TRL sets the attention itself.
        args.model_init_kwargs = {name: value for name, value in options.items() if name != "attn_implementation"}
        with (
            attention.in_pytorch(args.device) if own_attention else nullcontext(),
            without_password(args.vllm_server_base_url),
        ):
            super().__init__(model, reward_funcs, args, *further, **named)
        check_finite(self.accelerator, self.model)
        faults.check_sharding(self.accelerator)
        # An adapter that is sent as it is (`_lora_sync`) is not merged.
        self._frozen_base = nullcontext() if self._lora_sync else FrozenBase(self.model)
        self.policy_objective = self.objective_class(args)
        self._reports: list[Tensor] = []  # of the current optimizer step, one per micro-batch
        worker: Any = self.rollout_worker
        if self.rollout_queue is not None:  # on the main process
            taken: Any = faults.Samples(self.rollout_queue, args, lambda: self.model_version)
            self.rollout_queue = taken
        self._syncs, self._synced_at = 0, 0  # synchronizations of weights so far, and optimizer step of the last
        sent = self.objective_class(args.objective_fields)  # to the worker's process
        if isinstance(worker, AsyncRolloutWorker):
            make_targets(worker, sent)
            faults.guard(worker, self.vllm_client, args.heartbeat_stale_after_s)
        elif "opo" in getattr(worker, "_loop_kwargs", {}):  # in this process
            worker._loop_kwargs["opo"] = sent

    def train(self, *args, **kwargs):
        """As in TRL; first checks which log-probabilities the server reports."""
        trl_contract.check_replaced()
        with without_password(self.args.vllm_server_base_url):
            if isinstance(self.rollout_worker, AsyncRolloutWorker):
                faults.check_logprobs(self.vllm_client, self.args.temperature)
            return super().train(*args, **kwargs)

    def _sync_weight(self):
        with faults.synchronizing(self), self._frozen_base:
            super()._sync_weight()
        self._syncs += 1  # on all processes; only the main one knows `model_version`
        self._synced_at = self.state.global_step

    # From the worker to the loss

    def _collate(self, collate: Callable[[list], dict[str, Any]], examples: list) -> dict[str, Any]:
        """
        Add to TRL's micro-batch a table of its samples, `[processes, samples, 4 + metrics]`, padded with 0: number of
        synchronizations when it was generated, target, tokens of its conversation, escort weight and `MEANS`.
        """
        (rows,) = examples  # one for each process; on the main process, which collates for all
        version = self.model_version - self._syncs
        tables, total = [], 0.0
        for row in rows:
            for sample in row.samples:
                if OWN not in sample["metrics"]:
                    raise ValueError(
                        f"The rollout worker {type(self.rollout_worker).__name__} makes no targets for OPO. Let its "
                        "loop derive from `opo_trl.asynchronous.targets.OPORolloutLoop`, or pass each complete group "
                        "through `with_targets` there."
                    )
                generated_by, tokens, *values = sample["metrics"].pop(OWN)
                tables.append([generated_by - version, sample["advantage"], tokens, *values])
                trained = int(sample["completion_mask"].sum())
                total += trained if self.args.log_ratio_reduction == "sum" else trained / tokens
        table, counts = torch.tensor(tables, dtype=torch.float64), [len(row.samples) for row in rows]
        padded = [pad(part, (0, 0, 0, max(counts) - len(part))) for part in table.split(counts)]
        batch = super()._collate(collate, examples)
        # Each process gets its slice of what has an entry per process.
        return {**batch, "opo_rows": torch.stack(padded), "opo_total": torch.full((len(rows),), total)}

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        # Of the whole optimizer step and all processes. TRL divides each micro-batch by its own number of tokens.
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, sum(batch["opo_total"][0] for batch in batches)

    # The loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """
        Sum of the OPO losses of some rows of an optimizer step, divided by the number of the step's trained tokens.

        The log-ratio of a completion is a sum over its tokens, and so is its gradient: this is the scale of GRPO's
        mean over tokens. Under `log_ratio_reduction="mean"` the divisor is the number of completions.
        """
        outputs: Any = None

        def forward(**named):
            nonlocal outputs
            outputs = model(**named)
            return outputs

        super().compute_loss(forward, inputs)  # for its metrics; its loss is dropped
        for name in [name for name in self._metrics["train"] if name.startswith("clip_ratio/")]:
            del self._metrics["train"][name]  # nothing is clipped
        trained = inputs["token_index"] >= 0
        logps = outputs.log_probs.flatten()[inputs["token_index"][trained]]
        behaviour, rows = inputs["old_log_probs"][trained], inputs["segment_id"][trained]
        losses = self._row_losses(logps, behaviour, rows, inputs["opo_rows"][0])
        # TRL's trainer does not divide by the number of micro-batches; DDP and FSDP take the mean over processes.
        loss = losses.sum() * (self.accelerator.num_processes / num_items_in_batch)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / self.current_gradient_accumulation_steps
        return loss

    def _row_losses(self, logps: Tensor, behaviour: Tensor, row: Tensor, table: Tensor) -> Tensor:
        """
        Loss of each row, `[B]`, from the log-probabilities of its trained tokens under the policy and the behaviour
        policy, `[M]` each, their row, `[M]`, and `_collate`'s table.

        A conversation that TRL forks into several rows has the loss `Σ s · loss(Δ_r / s)`, with the share s of its
        trained tokens that is in a row, and the log-ratio Δ_r of the row: at Δ = 0 and at the target this has the
        gradient that one row would have. In between, it is at least as large: it asks for the same log-ratio per token
        everywhere.
        """
        table = table[table[:, 2] > 0].to(torch.promote_types(logps.dtype, torch.float32))  # without padding
        generated_at, target, tokens, _, *means = table.T
        length = torch.bincount(row, minlength=len(table)).to(table.dtype)
        synchronizations = (self._syncs - generated_at) * self.args.weight_sync_steps
        samples = PackedSamples(
            logps=logps,
            anchor_logps=behaviour,
            mask=torch.ones_like(row, dtype=torch.bool),
            target=target,
            mu=means[MEANS.index("mu")],
            weights=torch.ones_like(target),
            age=synchronizations + self.state.global_step - self._synced_at,
            reused=True,
            row=row,
            share=length / tokens,
            tokens=tokens,
        )
        loss = self.policy_objective.loss(samples)
        losses = samples.share * (loss.work + loss.dissipation)
        report = SampleReport.of(samples, loss, policy_loss=losses, tokens=length)  # TRL logs the entropy
        self._reports.append(torch.cat([torch.stack([*vars(report).values()], dim=1), table[:, 3:].float()], dim=1))
        return losses

    # What is logged

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._log_step()
        return loss

    def _log_step(self):
        """Gather the samples of an optimizer step from all processes, once, and log them."""
        # Processes have different numbers of samples.
        table = self.accelerator.pad_across_processes(torch.cat(self._reports), pad_index=torch.nan)
        table, self._reports = self.accelerator.gather(table).cpu(), []
        table = table[~table.isnan().all(dim=1)]
        own = len(MEANS) + 1
        samples, omega, means = SampleReport(*table[:, :-own].T), table[:, -own], table[:, 1 - own :].mean(dim=0)
        metrics = metrics_of_samples(samples, self.policy_objective, kl=False, bonus=False)
        metrics |= {f"opo/{name}": mean for name, mean in zip(MEANS, means.tolist(), strict=True)}
        metrics["opo/escort/min"], metrics["opo/escort/max"] = omega.min().item(), omega.max().item()
        metrics["opo/positivity_margin"] = 1 + samples.target.min().item()
        if self.args.num_iterations > 1:
            metrics["opo/pass"] = self.args.num_iterations - self._passes_left
        for name in metrics.keys() - {"entropy", "opo/frac_skipped"}:
            if not math.isnan(metrics[name]):  # it has no value, or the objective no such metric
                self._metrics["train"][name].append(metrics[name])
