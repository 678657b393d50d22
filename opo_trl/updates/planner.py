"""
`Planner`: divides the samples of an optimizer step into the micro-batches that cost the least.

`planning` decides how to cut; this object ensures that all processes cut alike. None of this changes a gradient,
provided that the loss is a sum over samples, divided by their number in the optimizer step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad
from transformers.distributed.fsdp import is_fsdp_managed_module

from ..batch import can_exchange, exchange_rows, resize, take_rows, to_device
from ..config import OPOConfig, updates_in_backward
from ..trl import MULTIMODAL_KEYS
from . import shared_prompts
from .cutting import (
    FEWEST_PASSES,
    PASS_TOKENS,
    Limits,
    Prompts,
    Rows,
    best_cut,
    columns,
    cut_rows,
    partition,
    row_lengths,
)


_TEXTS = ("prompt", "completion")


@dataclass(frozen=True)
class Planner:
    """Cuts the samples of optimizer steps, and rollouts that are scored, into micro-batches. It has no state."""

    args: OPOConfig
    accelerator: Accelerator
    communicates: bool  # whether processes communicate in every pass, as under ZeRO-2, ZeRO-3 and FSDP
    balance: float | None = None  # of the policy, if it can compute a prompt once for its completions (`Prompts`)
    plans: bool = True  # whether micro-batches may have other widths than the rollout

    def micro_batches(self, steps: Sequence[Rows], skippable: Iterable[Tensor]) -> Iterator[list[Rows]]:
        """
        The micro-batches of each optimizer step of a pass over a rollout; the same number on every process.

        If it plans, samples that need not be computed (`skippable`, bool `[B]` of each step) are left out, unless a
        micro-batch would be empty: `opo_filler` says which samples fill it. `opo_counts` says which samples count in
        the log, and `opo_skipped` of the last micro-batch the same of those that were left out.
        """
        if not self.plans:
            samples = np.arange(len(steps[0]["completion_ids"]))  # as many in each step
            parts = np.split(samples, len(samples) // self.args.per_device_train_batch_size)
            return ([take_rows(rows, part) for part in parts] for rows in steps)
        read = self._read_samples(steps, skippable)
        return (self._cut(rows, read[:, number]) for number, rows in enumerate(steps))

    def score(self, logps: Callable, model, input_ids, attention_mask, logits_to_keep, batch_size, **options):
        """
        Score a rollout by `logps`, TRL's pass over samples, in micro-batches as in training: all at once, it would be
        wider and need more memory.
        """
        rows = {}
        for name, table in (("ids", input_ids), ("mask", attention_mask)):
            rows[f"prompt_{name}"] = table[:, :-logits_to_keep]
            rows[f"completion_{name}"] = table[:, -logits_to_keep:]
        images = any(options.get(name) is not None for name in MULTIMODAL_KEYS)
        lengths = pad(row_lengths(rows), (0, 1), value=float(images))
        read = self._of_all_processes(torch.cat([lengths, shared_prompts.hashes(rows)[:, None]], dim=1))
        # If any process has images, none cuts: under ZeRO-3 or FSDP each pass is a collective call.
        if read[..., 2].any():
            return logps(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **options)
        tokens, limits = rows["completion_ids"], self._limits(batch_size)
        # It may be another model than the policy. Where a quantile of entropies decides, those of equal contexts must
        # be equal to the bit, as in rows.
        balance = self.balance if self.args.top_entropy_quantile == 1.0 else None
        balance = balance and shared_prompts.balance(self.accelerator.unwrap_model(model))
        n_batches, _ = _needed(read, balance, limits)
        results = [torch.zeros_like(tokens, dtype=torch.float32) for _ in range(2)]
        rows["row"] = torch.arange(len(tokens), device=tokens.device)
        own, order = read[self.accelerator.process_index], np.arange(len(tokens))
        for part in cut_rows(rows, own[:, :2], order, n_batches, limits, _prompts(own, balance)):
            width = part["completion_ids"].size(1)
            ids, mask = (torch.cat([part[f"{text}_{name}"] for text in _TEXTS], dim=1) for name in ("ids", "mask"))
            called = shared_prompts.model_for(model, part)
            for result, values in zip(results, logps(called, ids, mask, width, **options)[:2], strict=True):
                if values is not None:
                    result[part["row"], :width] = values.float()
        return results[0], results[1] if options.get("compute_entropy") else None, None

    def _read_samples(self, steps: Sequence[Rows], skippable: Iterable[Tensor]) -> np.ndarray:
        """
        Numbers of the samples of all processes, `[processes, steps, samples, 7]`, by one gather and one copy to the
        host: lengths of prompt and completion, whether it can be skipped; of its process the columns of prompts and of
        completions, and whether it can exchange samples; which prompt it has.
        """
        device = self.accelerator.device
        of_process = [[*(rows[f"{name}_mask"].size(1) for name in _TEXTS), can_exchange(rows)] for rows in steps]
        tables = []
        for rows, skips, own in zip(steps, skippable, to_device(torch.tensor(of_process), device), strict=True):
            lengths = row_lengths(rows)
            columns = [lengths, skips.to(device)[:, None], own.expand(len(lengths), -1)]
            tables.append(torch.cat([*columns, shared_prompts.hashes(rows).to(device)[:, None]], dim=1))
        return self._of_all_processes(torch.stack(tables))

    def _cut(self, rows: Rows, read: np.ndarray) -> list[Rows]:
        """The samples of an optimizer step, less the skippable ones; `read` is this step's of `_read_samples`."""
        process = self.accelerator.process_index
        of_tokens = bool(read[:, 0, 5].all())  # no images or lists, whose memory lengths do not tell
        limits = self._limits(self.args.per_device_train_batch_size, fill=of_tokens)
        balance = self.balance if of_tokens else None
        # Every process makes as many as the one that needs the most: ZeRO and FSDP communicate in every pass, and a
        # process with fewer passes than the others would leave them waiting forever.
        n_batches, cost = _needed(read, balance, limits)
        if len(read) > 1 and of_tokens:
            # Completions differ in length, and the process with the longest ones would keep the others waiting. Every
            # process computes the same partition, and takes its own part.
            samples = read.reshape(-1, read.shape[-1])
            assigned = partition(samples[:, :2], samples[:, 2].astype(bool), len(read))
            n_batches_then, cost_then = _needed(samples[assigned], balance, limits)
            # It may divide the completions of a prompt, which are then computed with a prompt each.
            if balance is None or cost_then < cost:
                widths = columns(samples[:, :2], samples[:, 3:5].max(axis=0))
                rows = exchange_rows(resize(rows, **widths), assigned[process], self.accelerator)
                read, n_batches = samples[assigned], n_batches_then
        own = read[process]
        lengths, skippable = own[:, :2], own[:, 2].astype(bool)
        # None may be empty: a process with too few samples computes some that it could have skipped.
        kept, skipped = np.split(np.argsort(skippable, kind="stable"), [max((~skippable).sum(), n_batches)])
        if "opo_counts" not in rows:  # a checkpoint's samples that were divided have it
            counts = rows["opo_valid"]
            if "importance_sampling_ratio" in rows:
                counts = counts & rows["importance_sampling_ratio"].any(dim=1)  # that vLLM's importance sampling keeps
            rows = {**rows, "opo_counts": counts}
        rows = {**rows, "opo_filler": to_device(torch.from_numpy(skippable), rows["opo_counts"].device)}
        found = cut_rows(rows, lengths, kept, n_batches, limits, _prompts(own, balance))
        found[-1]["opo_skipped"] = take_rows({"counts": rows["opo_counts"]}, skipped)["counts"]
        return found

    def _of_all_processes(self, numbers: Tensor) -> np.ndarray:
        """Integers of each process, read by one gather and one copy to the host: `[processes, …]`."""
        return self.accelerator.gather(numbers.to(self.accelerator.device)[None]).cpu().numpy()

    def _limits(self, max_rows: int, *, fill: bool = True) -> Limits:
        fewest = self.communicates or updates_in_backward(self.args)
        on_gpu = self.accelerator.device.type != "cpu"
        return Limits(
            max_rows,
            self.args.max_tokens_per_micro_batch,
            # Not on a CPU, where a pass costs little. Not for the fewest passes, which would be filled with any amount
            # of padding. Not for models without `balance`, which may need more memory than their tokens say.
            fill=fill and on_gpu and not fewest and self.balance is not None,
            pass_tokens=FEWEST_PASSES if fewest else PASS_TOKENS["gpu" if on_gpu else "cpu"],
        )


def _prompts(read: np.ndarray, balance: float | None) -> Prompts | None:
    return None if balance is None else Prompts(read[:, -1], balance)


def _needed(read: np.ndarray, balance: float | None, limits: Limits) -> tuple[int, float]:
    """Most micro-batches, and highest cost, that a process needs for its samples: `[processes, samples, columns]`."""
    needed = [own[own[:, 2] == 0] for own in read]
    cuts = [best_cut(own[:, :2], limits, _prompts(own, balance)) for own in needed]
    return max(len(bounds) + 1 for _, bounds, _, _ in cuts), max(cost for _, _, _, cost in cuts)


@contextmanager
def without_exchange(trainer: Any, model: Any) -> Iterator[None]:
    """Add to the gradients of this process, without the exchange that comes with the last micro-batch."""
    accelerator = trainer.accelerator
    exchanges = accelerator.sync_gradients
    without: AbstractContextManager
    # As Transformers does it between the calls of an accumulation.
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
