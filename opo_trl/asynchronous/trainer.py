"""
`AsyncOPOTrainer`: TRL's experimental `AsyncGRPOTrainer` with the objective of Orthogonalized Policy Optimization.

A server generates while the trainer trains, so completions come from a policy that is some versions old. TRL owns the
server, the rollout worker, the synchronization of weights, packing and checkpoints. This module adds:

1. `OPORolloutLoop` (`worker`) scores each group in the worker's process, and gives its samples their targets.
2. `_collate` adds to a micro-batch what the loss needs of each sample.
3. `compute_loss` sums the objective's losses. The loss is a plain sum over samples, divided by a number of the
   optimizer step: it does not depend on how they are split into micro-batches and processes.
4. `_log_step_metrics` gathers the step's samples from all processes, once, and logs them under `opo/`.
"""

import functools
import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from ..checks.processes import check_processes
from ..checks.weights import base_of, check_models, check_trainable
from ..metrics.step import SampleReport, metrics_of_samples
from ..objective import OPO, Objective, Samples
from ..objectives import objective_named
from ..rollout import checkpoint
from ..rollout.frozen_base import FrozenBase
from ..rollout.signals import saving_on_interrupt
from ..rollout.skipped_steps import SkippedSteps
from ..trainer import OPOTrainer
from ..trl import check_replaced, temporarily
from . import attention
from .config import AsyncOPOConfig
from .worker import MEANS, OWN, OPORolloutWorker, check_logprobs


TRAINED = "rollout_state_prompts.json"  # of a checkpoint: groups of which a completion was trained


@dataclass(frozen=True, kw_only=True)
class PackedSamples(Samples):
    """Samples whose trained tokens follow one another, `[M]` in place of `[B, T]`; `row` is the sample of each."""

    row: Tensor

    @functools.cached_property
    def length(self) -> Tensor:
        return torch.bincount(self.row, minlength=len(self.target)).to(self.target.dtype)

    def sum(self, x: Tensor) -> Tensor:
        return torch.zeros_like(self.target, dtype=x.dtype).index_add(0, self.row, x)

    def spread(self, x: Tensor) -> Tensor:
        return x[self.row]


class AsyncOPOTrainer(AsyncGRPOTrainer):
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

    On a CPU, and with `model_init_kwargs={"attn_implementation": "sdpa"}` on any device, attention is PyTorch's. A
    `rollout_worker` makes targets, as [`~asynchronous.worker.OPORolloutWorker`] does.

    Raises:
        `ValueError`: TRL cannot pack samples for the model's attention; or the server reports other log-probabilities
            than those of the policy that it samples from.
    """

    _tag_names = ["trl", "async-opo"]  # noqa: RUF012 (TRL declares these as class attributes)
    _name = "AsyncOPO"
    _paper = OPOTrainer._paper
    objective_class: type[Objective] | None = None  # of a subclass, in place of `objective`
    policy_objective: Objective
    args: AsyncOPOConfig
    model: Any

    def __init__(
        self, model: str, reward_funcs=None, args: AsyncOPOConfig | None = None, train_dataset=None, **options
    ):
        check_replaced()
        args = AsyncOPOConfig(f"{model.split('/')[-1]}-AsyncOPO") if args is None else args
        if not isinstance(args, AsyncOPOConfig):
            raise TypeError(f"`args` is a `{type(args).__name__}`: change the class to `AsyncOPOConfig`.")
        check_processes(args.world_size)
        # TRL's worker, and ours, apply a chat template to every prompt.
        worker = options.get("rollout_worker")
        text = worker is not None and not hasattr(worker, "_loop_kwargs")
        if not text and isinstance(train_dataset, Dataset) and isinstance(train_dataset[0].get("prompt"), str):
            said = "train_dataset has prompts that are text, but asynchronous training applies a chat template"
            raise ValueError(f'{said}. Set each to a list of messages, `[{{"role": "user", "content": …}}]`.')
        if base_of("model", model, cast(dict, args.model_init_kwargs or {})):
            fix = "Merge it into its base (`merge_and_unload`) and name that folder, or train with `OPOTrainer`"
            raise ValueError(f"model={model!r} is an adapter, from which asynchronous training cannot start. {fix}.")
        check_models(model, (), args)
        given: Any = args.model_init_kwargs or {}  # a dict, once parsed
        plain = given.get("attn_implementation") == "sdpa" or args.device.type == "cpu"
        # TRL sets the attention itself, and says so if another one is asked for.
        ours = ("attn_implementation", None), ("attn_implementation", "sdpa")
        args.model_init_kwargs = {name: value for name, value in given.items() if (name, value) not in ours}
        with (
            attention.in_pytorch(args.device) if plain else nullcontext(),
            temporarily(async_grpo_trainer, AsyncRolloutWorker=OPORolloutWorker),
        ):
            super().__init__(model, reward_funcs, args, train_dataset, **options)
            if isinstance(self.rollout_worker, AsyncRolloutWorker):
                check_logprobs(self.vllm_client, args.temperature)
        inner = next(module for module in self.model.modules() if isinstance(module, PreTrainedModel))
        if not inner.is_backend_compatible():  # Transformers cannot choose its attention
            said = f"{type(inner).__name__} has an attention of its own, which would mix the samples of a micro-batch"
            raise ValueError(f"{said}. Train it with `trainer: opo` (`OPOTrainer`), or another model.")
        # An adapter that is sent as it is (`_lora_sync`) is not merged.
        self._frozen_base = nullcontext() if self._lora_sync else FrozenBase(self.model)
        self._dtypes = {name: parameter.dtype for name, parameter in _iter_vllm_named_params(self.model)}
        kind = self.objective_class or objective_named(args.objective)
        self.policy_objective = kind(args)
        if not (self.objective_class or issubclass(kind, OPO)):
            self._name, self._paper = f"Async{kind.__name__}", {}  # of the model card
        self._skipped = SkippedSteps(args, self.accelerator, self.optimizer)
        self._collated: deque[set[int]] = deque()  # groups of each micro-batch that waits; where batches are collated
        # Of the current optimizer step: micro-batches, their groups and reports, and passes over them that are left
        self._batches_of_step: list[Any] = []
        self._groups_of_step: set[int] = set()
        self._reports: list[Tensor] = []
        self._passes_left = 0
        if self._epoch_stop_groups is not None:
            # TRL's bound on the steps of an epoch, which must never be reached, counts each sample once, in full rows.
            args.max_steps *= args.num_iterations * 32
        self._syncs, self._synced_at = 0, 0  # synchronizations of weights so far, and optimizer step of the last
        self._sent: dict = getattr(self.rollout_worker, "_loop_kwargs", {})  # to the worker's process
        self._sent |= {"opo": kind(args), "vocab_size": self.model.config.get_text_config().vocab_size}
        self._sent.setdefault("eos_token_ids", self.eos_token_ids)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """
        As in TRL, but a run is resumed with the prompts of which no completion has been trained. Completions that were
        on the way are generated anew. `resume_from_checkpoint`: see [`OPOTrainer.train`].
        """
        check_trainable(self.model, self.optimizer)
        folder = checkpoint.resolve(resume_from_checkpoint, self.args.output_dir)
        self._skip(())
        with saving_on_interrupt(self):
            return super().train(folder, *args, **kwargs)

    def _skip(self, trained: Collection[int]) -> None:
        """
        Begin with the prompts that are not among those of the given groups.

        A group's id is the place of its prompt in the stream of the dataset's epochs. TRL resumes at the first place
        that was not collated: it would skip prompts that were fetched ahead, and repeat all that came after a gap.
        """
        self._trained_groups, self._last_groups_trained, self._groups_before_resume = set(trained), len(trained), 0
        self._sent["trained"] = frozenset(trained)
        if "dataset_start_index" in self._sent:  # of TRL's worker, which generates out of order
            self._sent |= {"dataset_start_index": 0, "epochs": self._epoch_stop_groups or 0}

    def _streaming_iter(self):
        """The weights, as the server has been told of them: DeepSpeed and FSDP2 cast them after that."""
        for name, weight in super()._streaming_iter():
            if weight.is_cuda:  # vLLM reads them in streams of its own, which wait for nothing
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            yield name, weight.to(self._dtypes.get(name, weight.dtype))

    def _sync_weight(self):
        with self._frozen_base:
            super()._sync_weight()
        self._syncs += 1  # on all processes; only the main one knows `model_version`
        self._synced_at = self.state.global_step

    # From the worker to the loss

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        inner = loader.base_dataloader
        inner.collate_fn.groups_trained = set()  # TRL would take for trained what has been collated
        inner.collate_fn = functools.partial(self._collate, inner.collate_fn)
        return loader

    def _collate(self, collate: Callable[[list], dict[str, Any]], examples: list) -> dict[str, Any]:
        """
        Add to TRL's micro-batch a table of its samples, `[processes, samples, 3 + metrics]`, padded with NaN: number
        of synchronizations when it was generated, target, `MEANS`; and what its losses are divided by.
        """
        (rows,) = examples  # one for each process; on the main process, which collates for all
        samples = [sample for row in rows for sample in row.samples]
        # A `KeyError` if the rollout worker computes no targets.
        own = [(sample["advantage"], *sample["metrics"].pop(OWN)) for sample in samples]
        version = self.model_version - self._syncs
        tables = [[generated_by - version, target, *values] for target, generated_by, *values in own]
        table, counts = torch.tensor(tables, dtype=torch.float64), [len(row.samples) for row in rows]
        padded = [pad(part, (0, 0, 0, max(counts) - len(part)), value=math.nan) for part in table.split(counts)]
        tokens = sum(int(sample["completion_mask"].sum()) for sample in samples)
        total = float(tokens if self.policy_objective.reduction == "sum" else len(samples))
        self._collated.append({sample["group_id"] for sample in samples})
        # Each process gets its slice of what has an entry per process.
        return {**collate(examples), "opo_rows": torch.stack(padded), "opo_total": torch.full((len(rows),), total)}

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if not self._passes_left:
            self._batches_of_step, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
            # Weights are sent after the last pass; a run may be resumed after another one.
            self._passes_left = self.args.num_iterations - self.state.global_step % self.args.num_iterations
            if self._collated:
                self._groups_of_step = set().union(*(self._collated.popleft() for _ in self._batches_of_step))
        self._passes_left -= 1
        # Of the whole optimizer step and all processes. TRL divides each micro-batch by its own number of tokens.
        return self._batches_of_step, sum(batch["opo_total"][0] for batch in self._batches_of_step)

    # The loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """
        Sum of the losses of some samples of an optimizer step, divided by the number of the step's trained tokens.

        The log-ratio of a completion is a sum over its tokens, and so is its gradient: this is the scale of GRPO's
        mean over tokens. For objectives whose `reduction` is no sum, the divisor is the number of samples.
        """
        outputs: Any = None

        def forward(**named):
            nonlocal outputs
            outputs = model(**named)
            return outputs

        found: dict[str, list] = defaultdict(list)
        with temporarily(self, _metrics={"train": found}):
            super().compute_loss(forward, inputs)  # for its metrics; its loss is dropped
        for name in (name for name in found if not name.startswith("clip_ratio/")):  # of that loss
            self._metrics["train"][name] += found[name]
        trained = inputs["token_index"] >= 0
        logps = outputs.log_probs.flatten()[inputs["token_index"][trained]]
        behaviour, row = inputs["old_log_probs"][trained], inputs["segment_id"][trained]
        losses = self._losses(logps, behaviour, row, inputs["opo_rows"][0])
        # TRL's trainer does not divide by the number of micro-batches; DDP and FSDP take the mean over processes.
        loss = losses.sum() * (self.accelerator.num_processes / num_items_in_batch)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / self.current_gradient_accumulation_steps
        return loss

    def _losses(self, logps: Tensor, behaviour: Tensor, row: Tensor, table: Tensor) -> Tensor:
        """Loss of each sample, `[B]`, of log-probabilities of trained tokens, their sample, and `_collate`'s table."""
        table = table[~table[:, 0].isnan()].to(torch.promote_types(logps.dtype, torch.float32))  # without padding
        generated_at, target, *means = table.T
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
        )
        loss = self.policy_objective.loss(samples)
        # As in `OPOTrainer`: until a step with a gradient, their log-ratio may be rounding only.
        one = torch.ones_like(target, dtype=torch.bool).unsqueeze(1)
        idle = self.policy_objective.zero_gradient(target, samples.mu, one)
        rests = idle & (samples.age <= self.state.global_step - self._skipped.moved_at)
        losses = loss.total(rests)
        report = SampleReport.of(samples, loss, policy_loss=losses, tokens=samples.length)  # TRL logs the entropy
        self._reports.append(torch.cat([torch.stack([*vars(report).values()], dim=1), table[:, 2:].float()], dim=1))
        return losses

    # A step

    def _log_step_metrics(self):
        """After an optimizer step: count its prompts, gather its samples from all processes, once, and log them."""
        if not self._passes_left:
            self._trained_groups |= self._groups_of_step
            end, waiting = self._epoch_stop_groups or 0, set().union(*self._collated)
            # A micro-batch is made ahead. If its prompts are of another epoch, those missing of this have no score.
            if end and min(waiting, default=-1) >= end:
                unscored = {*range(end)} - self._trained_groups
                self._trained_groups |= unscored
                self._groups_before_resume, self._last_groups_trained = 0, self._last_groups_trained + len(unscored)
        super()._log_step_metrics()
        # Processes have different numbers of samples.
        table = self.accelerator.pad_across_processes(torch.cat(self._reports), pad_index=torch.nan)
        table, self._reports = self.accelerator.gather(table).cpu(), []
        table = table[~table.isnan().all(dim=1)]
        samples, means = SampleReport(*table[:, : -len(MEANS)].T), table[:, -len(MEANS) :].mean(dim=0)
        metrics = metrics_of_samples(samples, self.policy_objective, kl=False, bonus=False)
        metrics |= {f"opo/{name}": mean for name, mean in zip(MEANS, means.tolist(), strict=True)}
        if self.args.num_iterations > 1:
            metrics["opo/pass"] = self.args.num_iterations - self._passes_left
        for name in metrics.keys() - {"entropy", "opo/frac_skipped"}:
            if not math.isnan(metrics[name]):  # it has no value, or the objective no such metric
                self._metrics["train"][name].append(metrics[name])

    def _run_epoch(self, **named):
        # Resumed from the last step's checkpoint, Transformers would train one step more.
        epochs_are_over = len(self._trained_groups) >= (self._epoch_stop_groups or math.inf)  # on the main process
        over = torch.tensor(int(epochs_are_over), device=self.accelerator.device)
        if self.state.global_step >= self.state.max_steps or self.accelerator.reduce(over, reduction="sum").item():
            self.control.should_training_stop = True
            return
        self._groups_before_resume = -1  # added to that set's size, by which TRL ends a run: not before all are in it
        super()._run_epoch(**named)

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm)
        return self._skipped.check(model, self.optimizer, norm, step=self.state.global_step + 1)

    def _maybe_log_save_evaluate(self, *inputs, **named):
        with self._skipped.end_of_step(self):
            super()._maybe_log_save_evaluate(*inputs, **named)

    def log(self, logs, start_time=None):
        if "grad_norm" in logs:
            self._metrics["train"]["opo/skipped_steps"].append(self._skipped.total)
        super().log(logs, start_time)

    # Saving and loading, in the order of Transformers

    def _save_checkpoint(self, model, trial):
        with checkpoint.saving(self, trial):
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str):
        super()._save_rng_state(output_dir)
        if self.accelerator.is_main_process:
            (Path(output_dir) / TRAINED).write_text(json.dumps(sorted(self._trained_groups)))
        self.accelerator.wait_for_everyone()  # what is written after this says that the checkpoint is complete

    def _load_optimizer_and_scheduler(self, folder: str | None):
        super()._load_optimizer_and_scheduler(folder)  # before the worker is started
        if folder is not None and self.accelerator.is_main_process:
            self._skip(json.loads((Path(folder) / TRAINED).read_text()))
