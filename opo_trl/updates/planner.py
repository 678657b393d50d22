"""
`Planner`: divides the completions of an optimizer step into the micro-batches that cost the least.

`cutting` decides how to cut; this object ensures that all processes cut alike. None of this changes a gradient,
provided that the loss is a sum over completions, divided by their number in the optimizer step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers.distributed.fsdp import is_fsdp_managed_module

from ..batch import Batch, as_batch, completion_tokens, exchange, model_inputs, resize, take, to_device
from ..config import OPOConfig, updates_in_backward
from ..contract import MULTIMODAL_KEYS
from . import shared_prompts
from .cutting import FEWEST_PASSES, PASS_TOKENS, Limits, Prompts, best_cut, columns, cut, partition
from .sample_info import SampleInfo


@dataclass(frozen=True)
class Planner:
    """Cuts the completions of optimizer steps, and rollouts that are scored, into micro-batches. It has no state."""

    args: OPOConfig
    accelerator: Accelerator
    communicates: bool  # whether processes communicate in every pass, as under ZeRO-2, ZeRO-3 and FSDP
    # Width of a row from which attention costs more than the rest of the policy ([`shared_prompts.break_even_width`]);
    # `None`: its prompts are not computed once for their completions
    break_even_width: float | None = None
    plans: bool = True  # whether micro-batches may have other widths than the rollout

    @property
    def shares_prompts(self) -> bool:
        """Whether prompts are computed once for their completions, where that costs less."""
        return self.break_even_width is not None

    def micro_batches(self, steps: Sequence[Batch], left_out: Iterable[Tensor]) -> Iterator[list[Batch]]:
        """
        The micro-batches of each optimizer step of a pass over a rollout; the same number on every process.

        If it plans, completions that need not be computed (`left_out`, bool `[B]` of each step) are left out, unless a
        micro-batch would be empty: `opo_filler` says which of them fill it. `opo_counts` says which completions
        count in the log, and `opo_skipped` of the last micro-batch the same of those that are not computed.
        """
        if not self.plans:
            n_completions = len(steps[0]["completion_ids"])  # as many in each step
            n_micro_batches = n_completions // self.args.per_device_train_batch_size
            parts = np.split(np.arange(n_completions), n_micro_batches)
            return ([take(batch, part) for part in parts] for batch in steps)
        info = SampleInfo.gather(steps, left_out, self.accelerator)
        return (self._cut_step(batch, info[:, number]) for number, batch in enumerate(steps))

    def score(
        self,
        logps: Callable,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """
        Score a rollout by `logps`, TRL's pass over completions, in micro-batches as in training: all at once, it would
        be wider and need more memory. Arguments and results are those of TRL.
        """
        n_completions = len(input_ids)
        images = {name: options[name] for name in MULTIMODAL_KEYS if options.get(name) is not None}
        prompt_ids, completion_ids = input_ids.tensor_split([-logits_to_keep], dim=1)
        prompt_mask, completion_mask = attention_mask.tensor_split([-logits_to_keep], dim=1)
        batch: Batch = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
        }
        none_left_out = torch.zeros(n_completions, dtype=torch.bool, device=input_ids.device)
        info = SampleInfo.gather([as_batch({**batch, **images})], [none_left_out], self.accelerator)[:, 0]
        # If any process has images, none cuts: under ZeRO-3 or FSDP each pass is a collective call.
        if not info.exchangeable.all():
            return logps(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **options)
        break_even_width = None  # each completion is computed with a prompt of its own
        # Where a quantile of entropies decides, entropies of equal contexts must be equal to the bit, as they are in
        # rows of their own.
        if self.shares_prompts and self.args.top_entropy_quantile == 1.0:
            # The model may be another one than the policy, and may not be able to share prompts: `None`, too.
            break_even_width = shared_prompts.break_even_width(self.accelerator.unwrap_model(model))
        limits = self._limits(batch_size)
        n_micro_batches, _ = _most_needed(info, break_even_width, limits)
        local = info[self.accelerator.process_index]
        prompts = _prompts_to_share(local, break_even_width)
        all_completions = np.arange(n_completions)
        logps_of_tokens = torch.zeros_like(completion_ids, dtype=torch.float32)
        entropies = torch.zeros_like(logps_of_tokens)
        for part, micro_batch in cut(batch, local.lengths, all_completions, n_micro_batches, limits, prompts):
            ids, mask, width = model_inputs(micro_batch)
            pass_model = shared_prompts.model_for(model, micro_batch)
            part_logps, part_entropies = logps(pass_model, ids, mask, width, **options)[:2]
            places = to_device(part, input_ids.device)
            logps_of_tokens[places, :width] = part_logps.float()
            if part_entropies is not None:
                entropies[places, :width] = part_entropies.float()
        return logps_of_tokens, entropies if options.get("compute_entropy") else None, None

    def _cut_step(self, batch: Batch, info: SampleInfo) -> list[Batch]:
        """Micro-batches of this process for an optimizer step, of whose completions `info` is: `[processes, B]`."""
        # The lengths of completions do not tell how much memory images and lists need.
        only_tokens = bool(info.exchangeable.all())
        limits = self._limits(self.args.per_device_train_batch_size, fill=only_tokens)
        break_even_width = self.break_even_width if only_tokens else None
        batch, info, n_micro_batches = self._exchanged(batch, info, limits, break_even_width)
        local = info[self.accelerator.process_index]
        # No micro-batch may be empty: a process with too few other completions computes some that could be left out.
        computed_first = np.argsort(local.left_out, kind="stable")
        n_with_gradient = int(np.count_nonzero(~local.left_out))
        computed, not_computed = np.split(computed_first, [max(n_with_gradient, n_micro_batches)])
        counts = _counts_in_log(batch)
        filler = to_device(local.left_out, counts.device)
        batch = {**batch, "opo_counts": counts, "opo_filler": filler}
        prompts = _prompts_to_share(local, break_even_width)
        parts = cut(batch, local.lengths, computed, n_micro_batches, limits, prompts)
        micro_batches = [micro_batch for _, micro_batch in parts]
        micro_batches[-1]["opo_skipped"] = counts[to_device(not_computed, counts.device)]
        return micro_batches

    def _exchanged(
        self, batch: Batch, info: SampleInfo, limits: Limits, break_even_width: float | None
    ) -> tuple[Batch, SampleInfo, int]:
        """
        The completions of a step that this process computes, what all processes know of theirs, and how many
        micro-batches each of them makes. Processes have exchanged completions, unless there is nothing to exchange, or
        prompts are shared and an exchange does not cost less.
        """
        # Every process makes as many as the one that needs the most: ZeRO and FSDP communicate in every pass, and a
        # process with fewer passes than the others would leave them waiting forever.
        n_micro_batches, cost = _most_needed(info, break_even_width, limits)
        n_processes = len(info)
        if n_processes == 1 or not info.exchangeable.all():
            return batch, info, n_micro_batches
        # Completions differ in length, and the process with the longest ones would keep the others waiting. Every
        # process computes the same partition, and takes its own part.
        on_all = info.on_all_processes()
        assigned = partition(on_all.lengths, on_all.left_out, n_processes)
        exchanged = on_all[assigned]
        n_micro_batches_exchanged, cost_exchanged = _most_needed(exchanged, break_even_width, limits)
        # An exchange may part the completions of a prompt, which are then computed with a prompt each.
        if break_even_width is not None and cost_exchanged >= cost:
            return batch, info, n_micro_batches
        widths = columns(on_all.lengths, most=on_all.columns.max(axis=0))
        own = assigned[self.accelerator.process_index]
        return exchange(resize(batch, **widths), own, self.accelerator), exchanged, n_micro_batches_exchanged

    def _limits(self, max_rows: int, *, fill: bool = True) -> Limits:
        """Limits of a micro-batch of at most `max_rows` completions; `fill`: whether short ones may be more."""
        # Whether there have to be as few micro-batches as possible: each costs an exchange, or is an optimizer step.
        fewest = self.communicates or updates_in_backward(self.args)
        on_gpu = self.accelerator.device.type != "cpu"
        return Limits(
            max_rows,
            self.args.max_tokens_per_micro_batch,
            # Micro-batches are not filled on a CPU, where a pass costs little; nor for the fewest passes, which would
            # take any amount of padding; nor for models that cannot share prompts, which may need more memory than
            # their tokens say.
            fill=fill and on_gpu and not fewest and self.shares_prompts,
            pass_tokens=FEWEST_PASSES if fewest else PASS_TOKENS["gpu" if on_gpu else "cpu"],
        )


def _counts_in_log(batch: Batch) -> Tensor:
    """
    Whether each completion of a step counts in the log, bool `[B]`: those that take part, and that vLLM's importance
    sampling does not mask.
    """
    if "opo_counts" in batch:  # from a checkpoint, whose completions have been divided anew
        return batch["opo_counts"]
    counts = batch["opo_valid"]
    if "importance_sampling_ratio" in batch:
        # vLLM's importance sampling masks a completion, or each of its tokens, by a ratio of 0.
        is_kept = batch["importance_sampling_ratio"].bool() & completion_tokens(batch)
        counts = counts & is_kept.any(dim=1)
    return counts


def _prompts_to_share(local: SampleInfo, break_even_width: float | None) -> Prompts | None:
    """
    The prompts of a process's completions, if they are computed once for several; `None` if not, which is what a
    `break_even_width` of `None` says.
    """
    return None if break_even_width is None else Prompts(local.prompt, break_even_width)


def _most_needed(info: SampleInfo, break_even_width: float | None, limits: Limits) -> tuple[int, float]:
    """
    Most micro-batches, and highest cost in tokens, that any process needs for its completions that have a gradient.
    `info` is `[processes, B]`; a `break_even_width` of `None`: prompts are not computed once.
    """
    most, highest_cost = 0, 0.0
    for process in range(len(info)):
        local = info[process]
        with_gradient = local[~local.left_out]
        process_cut = best_cut(with_gradient.lengths, limits, _prompts_to_share(with_gradient, break_even_width))
        most = max(most, process_cut.n_parts)
        highest_cost = max(highest_cost, process_cut.cost)
    return most, highest_cost


def is_sharded(trainer: Any) -> bool:
    """Whether processes communicate in every pass of a trainer: for gradients under ZeRO-2, or also for parameters."""
    if trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage >= 2:
        return True
    return trainer.is_fsdp_enabled or getattr(trainer, "is_distributed_loading_by_transformers", False)


@contextmanager
def without_exchange(trainer: Any, model: Any) -> Iterator[None]:
    """
    Within this context, backward passes add to the gradients of this process alone. The processes exchange gradients
    in the last micro-batch, which is computed after it.
    """
    accelerator = trainer.accelerator
    exchanges = accelerator.sync_gradients  # whether the current call is the last of its optimizer step
    without: AbstractContextManager
    # As Transformers does it between the calls of an optimizer step: in those before the last one nothing is left to
    # do, and with `sync_each_batch` a user wants an exchange in each.
    if not exchanges or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        without = nullcontext()
    elif getattr(trainer, "is_distributed_loading_by_transformers", False) and is_fsdp_managed_module(trainer.model):
        # Before Transformers 5.23, the exchange cannot wait. It is linear, so the sum of its results is the same.
        without = getattr(trainer, "_defer_fsdp_gradient_reduction", nullcontext)()
    else:
        without = accelerator.no_sync(model)
    with without:
        accelerator.gradient_state._set_sync_gradients(False)
        try:
            yield
        finally:
            accelerator.gradient_state._set_sync_gradients(exchanges)
