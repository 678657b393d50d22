"""
`PartitionedTrainer`: the samples of an optimizer step pass through the model in the parts that cost the least.

`planning` decides how to cut; this class ensures that all processes cut alike, that the behaviour policy's
log-probabilities are computed where a later step needs them, and that each part passes through `compute_loss`. None of
this changes a gradient, provided that the loss is a sum over samples, divided by their number in the optimizer step.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.distributed.fsdp import is_fsdp_managed_module
from trl import GRPOTrainer
from trl.extras.profiling import profiling_decorator
from trl.models.utils import disable_gradient_checkpointing

from ..config import OPOConfig
from ..trl_contract import MULTIMODAL_KEYS
from . import packing
from .planning import FEWEST_PASSES, PASS_TOKENS, best_number, columns, partition, parts_of_rows, row_lengths, spread
from .rows import exchange_rows, layout, micro_batches, resize, take_rows, to_device
from .trainer import RolloutTrainer


_TEXTS = ("prompt", "completion")


class PartitionedTrainer(RolloutTrainer):
    """
    [`RolloutTrainer`] whose micro-steps are cut into parts, and whose rollouts are scored in parts.

    A subclass defines the loss and, by `_zero_gradient`, which samples need not be computed. Its rollouts must contain
    `opo_valid`, bool `[B]`. With `plan_micro_batches`, the last part of an optimizer step holds `opo_valid` of the
    skipped samples as `opo_skipped`.

    Raises:
        `ValueError`: `padding_free` is set for a model whose samples cannot be packed.
    """

    args: OPOConfig
    pad_to_multiple_of: int | None

    def __init__(self, *inputs, **named):
        super().__init__(*inputs, **named)
        self._pending: deque[dict[str, Any]] = deque()  # parts of the current micro-step that are left
        self._anchor_is_own = False  # whether the rollout's behaviour policy is the policy that its samples come from
        self._anchor_deferred = False  # whether to leave out TRL's next pass over the rollout
        self._early_logps: Tensor | None = None  # from TRL's pass over the rollout
        if self.args.padding_free:
            packing.check(self.accelerator.unwrap_model(self.model))

    def _zero_gradient(self, rows: Mapping[str, Any]) -> Tensor:
        """Samples, bool `[B]`, with zero gradient as long as the policy is the behaviour policy; none by default."""
        return torch.zeros(len(rows["completion_ids"]), dtype=torch.bool)

    # 1. The behaviour policy's log-probabilities

    def _generate_once(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # vLLM's importance weights compare the log-probabilities of every sample, so there TRL's pass is needed.
        sampler_weights = self.use_vllm and self.vllm_importance_sampling_correction
        self._anchor_deferred = not self.args.is_on_policy and not sampler_weights
        try:
            return super()._generate_once(inputs)
        finally:
            self._anchor_deferred = False

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rollout = super()._generate_and_score_completions(inputs)
        self._early_logps = rollout.get("old_per_token_logps")
        return rollout

    def _logps_of_rollout(self, rollout: dict[str, Any]) -> Tensor | None:
        """
        Take the log-probabilities `[B, T]` of TRL's pass out of a rollout, or read those that an override has set.

        TRL's are good enough for escort weights, but not for a log-ratio: in bfloat16 they differ from those of the
        same sample in a micro-batch of another shape. An override's are the user's choice, and stay.
        """
        logps = rollout.get("old_per_token_logps")
        self._anchor_is_own = logps is self._early_logps
        if self._anchor_is_own:
            rollout.pop("old_per_token_logps", None)
        self._early_logps = None
        return logps

    def _keep_for_reuse(self, rollout: dict[str, Any], logps: Tensor | None) -> None:
        """
        Store the behaviour policy's log-probabilities `[B, T]` in a rollout over which passes are made once the policy
        has moved.

        Each pass has other micro-batches, so there is no shape in which a log-ratio would be free of rounding.
        """
        moves = self._mode == "train" and self.num_iterations > 1 and not self.args.is_on_policy
        if moves and "old_per_token_logps" not in rollout:
            if logps is None:
                logps, _ = self._anchor_pass(rollout, batch_size=self.args.per_device_train_batch_size)
            rollout["old_per_token_logps"] = logps

    def _anchor_logps(self, inputs: Mapping[str, Any], logps: Tensor) -> Tensor:
        """Log-probabilities `[B, T]` under the behaviour policy: those stored, otherwise the policy's own, `logps`."""
        stored = inputs.get("old_per_token_logps")
        return logps.detach() if stored is None else stored

    @torch.no_grad()
    def _anchor_pass(self, rows: Mapping[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies `[B, T]` of the completions' tokens under the current policy."""
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with disable_gradient_checkpointing(self.model, checkpointing):
            logps, entropies, _ = self._token_logps(self.model, rows, compute_entropy=True, **options)
        return logps, entropies

    def _token_logps(self, model, inputs: Mapping[str, Any], **options):
        """Per-token log-probabilities, entropies and auxiliary loss, through TRL's fused language-model head."""
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            **options,
            **{key: inputs[key] for key in MULTIMODAL_KEYS if key in inputs},
        )

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **options
    ):
        if self._anchor_deferred:  # `_micro_batches` makes this pass, for the samples that need it
            self._anchor_deferred = False
            return None, None, None
        model = packing.Packed(model) if self.args.padding_free else model
        if batch_size is not None and self.args.plan_micro_batches:
            rows = {}
            for name, table in (("ids", input_ids), ("mask", attention_mask)):
                rows[f"prompt_{name}"] = table[:, :-logits_to_keep]
                rows[f"completion_{name}"] = table[:, -logits_to_keep:]
            images = any(options.get(name) is not None for name in MULTIMODAL_KEYS)
            read = self._of_all_processes(pad(row_lengths(rows), (0, 1), value=float(images)))
            # If any process has images, none makes parts: under ZeRO-3 or FSDP the pass of each is a collective call.
            if not read[..., 2].any():
                return self._logps_in_parts(model, rows, read[..., :2], batch_size, **options)
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size, **options
        )

    def _logps_in_parts(self, model, rows: Mapping[str, Any], lengths: np.ndarray, batch_size: int, **options):
        """
        Score a rollout in parts, as in training: all at once, it would be wider and need more memory. `lengths` are
        those of all processes' samples, `[processes, B, 2]`.
        """
        tokens = rows["completion_ids"]
        limits = self._limits_of_parts(batch_size)
        n_parts = max(best_number(each, **limits) for each in lengths)
        results = [torch.zeros_like(tokens, dtype=torch.float32) for _ in range(2)]
        rows = {**rows, "row": torch.arange(len(tokens), device=tokens.device)}
        own, order = lengths[self.accelerator.process_index], np.arange(len(tokens))
        for part in parts_of_rows(rows, own, order, n_parts, multiple=self.pad_to_multiple_of, **limits):
            width = part["completion_ids"].size(1)
            ids, mask = (torch.cat([part[f"{text}_{name}"] for text in _TEXTS], dim=1) for name in ("ids", "mask"))
            of_part = super()._get_per_token_logps_and_entropies(model, ids, mask, width, **options)
            for result, values in zip(results, of_part[:2], strict=True):
                if values is not None:
                    result[part["row"], :width] = values.float()
        return results[0], results[1] if options.get("compute_entropy") else None, None

    # 2. From the samples of an optimizer step to parts

    def _micro_batches(self, steps: list[dict[str, Any]], until_update: int) -> Any:
        """One entry per micro-step: the parts that pass through the model, one after the other."""
        args = self.args
        n_batches = args.steps_per_generation // len(steps)
        on_policy = [(number + 1) * n_batches <= until_update for number in range(len(steps))]
        if self._anchor_is_own:  # the log-ratio of an on-policy step is exactly 0
            steps = [
                {name: rows[name] for name in rows if not (policy and name == "old_per_token_logps")}
                for rows, policy in zip(steps, on_policy, strict=True)
            ]
        read = self._read_samples(steps, on_policy) if args.plan_micro_batches else None
        planned = []
        for number, rows in enumerate(steps):
            parts = micro_batches(rows, n_batches) if read is None else self._parts(rows, read[:, number])
            if not on_policy[number] and "old_per_token_logps" not in rows:
                # Now, because the policy is still the behaviour policy; a step before the next update needs no pass,
                # as the policy's own log-probabilities are the same. Part by part, because in bfloat16 a sample has
                # the same log-probabilities only in a micro-batch of the same shape: any other would leave a
                # log-ratio that is only rounding.
                for part in parts:
                    part["old_per_token_logps"], _ = self._anchor_pass(part)
            # The last micro-step of an optimizer step gets at least one part: its backward pass is the one in which
            # processes exchange gradients.
            planned += spread(parts, n_batches)
        return planned

    def _read_samples(self, steps: Sequence[Mapping[str, Any]], on_policy: Sequence[bool]) -> np.ndarray:
        """
        What planning needs to know of the samples of all processes, `[processes, steps, samples, 6]`, by one gather
        and one copy to the host: lengths of prompt and completion, whether the sample can be skipped; of its process
        the columns of prompts and of completions, and the layout of its entries.
        """
        device = self.accelerator.device
        of_process = [[*(rows[f"{name}_mask"].size(1) for name in _TEXTS), layout(rows)] for rows in steps]
        tables = []
        for rows, policy, own in zip(steps, on_policy, to_device(torch.tensor(of_process), device), strict=True):
            # Log-probabilities of an override may be those of another policy.
            skips = self.args.skip_inert_rows and policy and "old_per_token_logps" not in rows
            lengths, skippable = row_lengths(rows), self._zero_gradient(rows).to(device) & skips
            tables.append(torch.cat([lengths, skippable[:, None], own.expand(len(lengths), -1)], dim=1))
        return self._of_all_processes(torch.stack(tables))

    def _parts(self, rows: dict[str, Any], read: np.ndarray) -> list[dict[str, Any]]:
        """
        The samples of an optimizer step, less the skippable ones, in the same number of parts on every process. `read`
        is what [`~PartitionedTrainer._read_samples`] returns for this step.
        """
        lengths, skippable, layouts = read[..., :2], read[..., 2].astype(bool), read[:, 0, 5]
        limits = self._limits_of_parts(self.args.per_device_train_batch_size)
        process = self.accelerator.process_index
        if len(layouts) > 1 and layouts[0] >= 0 and (layouts == layouts[0]).all():
            # Completions differ in length, and the process with the longest ones would keep the others waiting. Every
            # process computes the same partition, and takes its own part.
            lengths, skippable = lengths.reshape(-1, 2), skippable.reshape(-1)
            assigned = partition(lengths, skippable, len(layouts))
            widths = columns(lengths, read[..., 3:5].max(axis=(0, 1)), self.pad_to_multiple_of)
            rows = exchange_rows(resize(rows, **widths), assigned[process], self.accelerator)
            lengths, skippable = lengths[assigned], skippable[assigned]
        # Every process makes as many parts as the one that needs the most: ZeRO and FSDP communicate in every pass,
        # and a process with fewer passes than the others would leave them waiting forever.
        needed = zip(lengths, skippable, strict=True)
        n_parts = max(best_number(each[~skipped], **limits) for each, skipped in needed)
        lengths, skippable = lengths[process], skippable[process]
        # No part may be empty: a process with fewer samples than parts computes some that it could have skipped.
        kept, skipped = np.split(np.argsort(skippable, kind="stable"), [max((~skippable).sum(), n_parts)])
        parts = parts_of_rows(rows, lengths, kept, n_parts, multiple=self.pad_to_multiple_of, **limits)
        parts[-1]["opo_skipped"] = take_rows({"valid": rows["opo_valid"]}, skipped)["valid"]  # in the step's metrics
        return parts

    def _of_all_processes(self, numbers: Tensor) -> np.ndarray:
        """Integers of each process, read by one gather and one copy to the host: `[processes, …]`."""
        return self.accelerator.gather(numbers.to(self.accelerator.device)[None]).cpu().numpy()

    def _limits_of_parts(self, max_rows: int) -> dict[str, Any]:
        zero_stage = self.accelerator.state.deepspeed_plugin.zero_stage if self.is_deepspeed_enabled else 0
        communicates = zero_stage >= 2 or self.is_fsdp_enabled or self.is_distributed_loading_by_transformers
        # These optimizers take a step in every backward pass.
        steps = any(kind in self.args.optim for kind in ("layerwise", "lomo"))
        return {
            "max_rows": max_rows,
            "max_tokens": self.args.max_tokens_per_micro_batch,
            "pass_tokens": FEWEST_PASSES if communicates or steps else PASS_TOKENS,
        }

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """
        Tokens whose entropy is at least the `threshold` quantile over all processes, as in TRL's method of this name.
        This one takes a rollout, which may have more than the 2^24 tokens that `torch.quantile` allows.

        Args:
            entropies (`torch.Tensor`): of each token in nats, `[B, T]`.
            mask (`torch.Tensor`): non-zero where a token takes part, `[B, T]`.
            threshold (`float`): quantile, in `[0, 1]`.

        Returns:
            `torch.Tensor`: bool mask `[B, T]`.
        """
        keep = mask.bool()
        padding = -torch.inf
        padded = self.accelerator.pad_across_processes(entropies[keep].float(), dim=0, pad_index=padding)
        gathered = self.accelerator.gather(padded)
        ordered = gathered[gathered != padding].sort().values
        if len(ordered) == 0:
            return torch.zeros_like(keep)
        place = threshold * (len(ordered) - 1)
        below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
        return keep & (entropies >= torch.lerp(below, above, place - math.floor(place)))

    # 3. A micro-step

    def training_step(self, model, inputs, num_items_in_batch=None):
        """
        Train on a micro-step, part by part: each call of `compute_loss` sees one mapping of tensors, as in any trainer
        of Transformers, and its gradient is added to those before.

        Returns:
            `torch.Tensor`: the loss of the micro-step, a scalar: the sum over its parts.
        """
        began = time.perf_counter()
        model.train()  # so that `_buffered` generates for training
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers: generate with the weights that are trained
        self._pending.clear()
        self._pending.extend(self._buffered(inputs))
        loss = torch.zeros((), device=self.accelerator.device)
        if not self._pending:  # all samples of the optimizer step fit into its other micro-steps
            self._step += 1
            self._current_train_step_time += time.perf_counter() - began
            return loss
        with self._without_exchange(model):
            while len(self._pending) > 1:
                # Transformers' step: TRL's also counts a micro-step, which only the last part completes.
                loss += super(GRPOTrainer, self).training_step(model, inputs, num_items_in_batch)
        self._current_train_step_time += time.perf_counter() - began
        loss += super().training_step(model, inputs, num_items_in_batch)
        return loss

    @contextmanager
    def _without_exchange(self, model) -> Iterator[None]:
        """Add to the gradients of this process, without the exchange that comes with the last part."""
        exchanges = self.accelerator.sync_gradients
        # As Transformers does it between micro-steps.
        if not exchanges or self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            without: Any = nullcontext()
        elif self.is_distributed_loading_by_transformers and is_fsdp_managed_module(self.model):
            without = self._defer_fsdp_gradient_reduction()
        else:
            without = self.accelerator.no_sync(model)
        with without:
            self.accelerator.gradient_state._set_sync_gradients(False)
            try:
                yield
            finally:
                self.accelerator.gradient_state._set_sync_gradients(exchanges)

    @profiling_decorator
    def _prepare_inputs(self, generation_batch):
        if self._mode == "eval":
            return super()._prepare_inputs(generation_batch)
        if not self._pending:  # called directly, outside `training_step`
            self._pending.extend(self._buffered(generation_batch))
        return self._pending.popleft()
