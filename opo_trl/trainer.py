"""
`OPOTrainer`: TRL's `GRPOTrainer` with the objective of Orthogonalized Policy Optimization.

TRL owns generation, rewards, sharding, the optimizer and checkpoints. What is added, in the order of a training step:

1. `_finish_rollout`: once per rollout, over all processes and while its groups are still complete, the advantages
   become the target fluctuation v* of each completion (`objective`, steps 1–5), which from there on travels with its
   row. It sees what the outermost override of `_generate_and_score_completions` returned.
2. `training_step`: the rows of a micro-step pass through the model in the parts that cost the least.
3. `_compute_loss`: the log-ratio of each row of a part is regressed on its target. A plain sum over rows, so that how
   the rows are split into parts, micro-batches and processes changes nothing.
4. `_log_step`: what happened, under `opo/`.

Rollouts and checkpoints are those of [`RolloutTrainer`], which stands between the two.
"""

import math
import textwrap
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers.distributed.fsdp import is_fsdp_managed_module
from trl import GRPOTrainer
from trl.extras.profiling import profiling_decorator
from trl.models.utils import disable_gradient_checkpointing

from . import objective
from .config import OPOConfig
from .rollout import packing
from .rollout.planning import FEWEST_PASSES, PASS_TOKENS, best_number, partition, parts_of_rows, row_lengths, spread
from .rollout.rows import MULTIMODAL_KEYS, completion_tokens, gather_rows, micro_batches, take_rows
from .rollout.trainer import RolloutTrainer, takes_what_grpo_takes


logger = get_logger(__name__)

# With an effective sample size below this for so many rollouts, one completion of each group has all the weight.
_LOW_ESS = 2.0
_LOW_ESS_ROLLOUTS = 10

# A whole completion's log-ratio is reported beside a mean one: the bound keeps its exponential finite in float32.
_WHOLE_CLAMP = 20.0


class OPOTrainer(RolloutTrainer):
    r"""
    Trainer for Orthogonalized Policy Optimization, a drop-in replacement of [`~trl.GRPOTrainer`].

    OPO differs from REINFORCE where a rollout serves several optimizer steps. By TRL's default it serves one, so set
    `steps_per_generation` to a multiple of `gradient_accumulation_steps`, or `num_iterations` to 2 or more.

    Example:

    ```python
    from datasets import load_dataset
    from opo_trl import OPOConfig, OPOTrainer
    from opo_trl.rewards import accuracy_reward

    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

    trainer = OPOTrainer(
        model="Qwen/Qwen3-1.7B",
        reward_funcs=accuracy_reward,
        args=OPOConfig(output_dir="qwen3-opo", steps_per_generation=16, gradient_accumulation_steps=8),
        train_dataset=dataset,
    )
    trainer.train()
    ```

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, ...:
            As in [`~trl.GRPOTrainer`].
        args ([`OPOConfig`], *optional*):
            Configuration of the trainer. `None` takes the defaults, with an output folder named after the model.

    Raises:
        `TypeError`: `args` is a configuration of another trainer.
        `ValueError`: a quantized base model is to be generated from by vLLM, or `padding_free` is set for a model
            whose rows cannot be packed.
    """

    _tag_names = ["trl", "opo"]  # noqa: RUF012 (TRL declares these as class attributes)
    _name = "OPO"
    _paper = {  # noqa: RUF012
        "title": "Orthogonalized Policy Optimization",
        "id": "2601.12415",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{wang2026orthogonalized,
                title        = {{Orthogonalized Policy Optimization}},
                author       = {Zixian Wang},
                year         = 2026,
                eprint       = {arXiv:2601.12415},
            }"""),
    }

    config_class = OPOConfig
    args: OPOConfig
    _saved_numbers = (*RolloutTrainer._saved_numbers, "_drive_metrics", "_low_ess_rollouts")

    @takes_what_grpo_takes(OPOConfig)
    def __init__(self, model, reward_funcs=None, args: OPOConfig | None = None, *further, **named):
        super().__init__(model, reward_funcs, args, *further, **named)
        self._drive_metrics: dict[str, dict[str, float]] = {"train": {}, "eval": {}}
        self._step_rows: list[Tensor] = []  # what the micro-batches of the current optimizer step have to report
        self._low_ess_rollouts = 0
        self._anchor_deferred = False
        self._pending: deque[dict[str, Any]] = deque()  # parts of the micro-step that have not been trained on
        self._part: dict[str, Any] = {}  # the one that is trained on
        self._early_logps: Tensor | None = None  # of TRL's pass over the rollout
        if self.args.padding_free:
            packing.check(self.accelerator.unwrap_model(self.model))

    def train(self, *args, **kwargs):
        """As [`RolloutTrainer.train`], with a warning where OPO has no other effect than its escort weights."""
        if self.args.is_on_policy:
            logger.warning(
                "Every rollout serves a single optimizer step, so the log-ratio is always 0 and the χ² term (`mu`, "
                "`chi2_radius`) has no effect: this is REINFORCE with escort weights. OPO differs from GRPO where a "
                "rollout is reused: set `num_iterations` to 2 or more, or `steps_per_generation` to a multiple of "
                f"gradient_accumulation_steps={self.args.gradient_accumulation_steps}."
            )
        return super().train(*args, **kwargs)

    # 1. The drive joins the rollout

    def _generate_once(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        sampler_weights = self.use_vllm and self.vllm_importance_sampling_correction  # of every row
        self._anchor_deferred = not self.args.is_on_policy and not sampler_weights
        try:
            return super()._generate_once(inputs)
        finally:
            self._anchor_deferred = False

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rollout = super()._generate_and_score_completions(inputs)
        self._early_logps = rollout.get("old_per_token_logps")
        return rollout

    def _finish_rollout(self, rollout: dict[str, Any]) -> dict[str, Any]:
        rollout = super()._finish_rollout(rollout)
        logps, entropies = rollout.get("old_per_token_logps"), None
        if logps is self._early_logps:
            # From a pass over the rollout: good enough for the escort weights, but no anchor. In bfloat16 a row
            # differs from itself in a micro-batch of another shape. Others were set by an override, and stay.
            rollout.pop("old_per_token_logps", None)
        self._early_logps = None
        corrected = self.args.anchor_correction != "absorbed" or self.args.adaptive_temperature
        if (corrected and logps is None) or self.top_entropy_quantile < 1.0:
            logps, entropies = self._anchor_pass(rollout, batch_size=self.args.per_device_train_batch_size)
        rollout.update(self._drive(rollout, logps))
        if entropies is not None and self.top_entropy_quantile < 1.0:
            # TRL's threshold is that of a micro-batch; the rollout's does not depend on how it is cut.
            mask = completion_tokens(rollout) & rollout["opo_valid"].unsqueeze(1)
            rollout["opo_steering"] = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        return rollout

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """
        Tokens whose entropy is at least the `threshold` quantile over all processes, as TRL's method of this name;
        but `torch.quantile` takes no more than 2^24 tokens.

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

    def _drive(self, rollout: Mapping[str, Any], logps: Tensor | None) -> dict[str, Tensor]:
        """Steps 1–5 of the objective on the complete rollout; returns this process's rows of the result."""
        args, mode = self.args, self._mode
        num_generations = self.num_generations if mode == "train" else self.num_generations_eval
        advantages, length, anchor_sum, anchor_mean, *per_func = self._gather_rows(rollout, logps)
        rewards = torch.stack(per_func, dim=1)
        valid = (length > 0) & ~rewards.isnan().all(dim=1) & advantages.isfinite()
        temperature = self._temperature(anchor_mean, rewards, valid)
        omega = objective.escort_weights(
            advantages,
            alpha=args.alpha,
            num_generations=num_generations,
            temperature=temperature,
            anchor_logps={"absorbed": None, "length_normalized": anchor_mean, "sequence": anchor_sum}[
                args.anchor_correction
            ],
            valid=valid,
        )
        drive, chemical_potential = objective.project(
            omega, num_generations=num_generations, scaling=args.drive_scaling, valid=valid
        )
        target, mu = objective.admissible_target(
            drive,
            mu=args.mu or objective.stiffness_for_radius(drive, args.chi2_radius, valid=valid),
            num_generations=num_generations,
            positivity=args.positivity,
            epsilon=args.positivity_epsilon,
            valid=valid,
        )
        metrics = objective.drive_diagnostics(
            omega,
            drive,
            target,
            chemical_potential=chemical_potential,
            mu=mu,
            temperature=temperature,
            num_generations=num_generations,
            valid=valid,
        )
        self._drive_metrics[mode] = {name: value.item() for name, value in metrics.items()}
        self._watch_escort(num_generations)
        # The log-ratio of a completion is a sum over its tokens, and so is its gradient: a constant of the rollout
        # makes the norm comparable with that of GRPO, whose loss is a mean over tokens.
        scale = 1 / length[valid].mean() if args.log_ratio_reduction == "sum" and valid.any() else torch.tensor(1.0)
        return self._local_rows(
            rollout,
            opo_target=target,
            opo_valid=valid,
            opo_mu=mu.expand_as(target),
            opo_scale=scale.expand_as(target),
            opo_step=torch.full_like(target, self.state.global_step),  # when the row's anchor was the policy
        )

    def _gather_rows(self, rollout: Mapping[str, Any], logps: Tensor | None) -> Tensor:
        """
        `[4 + number of reward functions, N]`, in groups: advantage, number of tokens that count, the anchor's
        log-probability of the completion, summed and per token (0 where no correction or temperature needs it), and
        the rewards.

        On the host and in float64: N numbers cost nothing there, and the drive is the same on every device.
        """
        advantages = rollout["advantages"]
        if advantages.ndim != 1:
            raise ValueError(
                f"The rollout has advantages of shape {tuple(advantages.shape)}, but OPO's target is one number per "
                "completion. Return them with shape [B] from `_generate_and_score_completions`."
            )
        mask = completion_tokens(rollout)
        logps = torch.zeros_like(mask, dtype=torch.float32) if logps is None else logps
        rows = [
            advantages,
            mask.sum(dim=1),
            torch.where(mask, logps, 0.0).sum(dim=1),
            objective.token_mean(logps, mask),
        ]
        # An override may have made the rollout from nothing: then its advantages say all there is to say.
        rewards = rollout.get("rewards_per_func", torch.zeros_like(advantages).unsqueeze(1))
        table = torch.cat([torch.stack([row.float() for row in rows], dim=1), rewards.float()], dim=1)
        return self.accelerator.gather(table).cpu().double().T

    def _local_rows(self, rollout: Mapping[str, Any], **columns: Tensor) -> dict[str, Tensor]:
        n_local = len(rollout["advantages"])
        start = self.accelerator.process_index * n_local
        like = rollout["advantages"]
        return {
            name: column[start : start + n_local].to(
                device=like.device, dtype=torch.bool if column.dtype == torch.bool else torch.float32
            )
            for name, column in columns.items()
        }

    def _temperature(self, anchor_mean: Tensor, rewards_per_func: Tensor, valid: Tensor) -> float | Tensor:
        args = self.args
        if not args.adaptive_temperature:
            return args.escort_temperature
        rewards = (rewards_per_func * self.reward_weights.cpu().double()).nansum(dim=1)
        vocab_size = self.model.config.get_text_config().vocab_size
        low, high = args.temperature_range
        return objective.adaptive_temperature(
            args.escort_temperature,
            anchor_entropy=objective.entropy_proxy(anchor_mean, vocab_size=vocab_size, valid=valid),
            success=objective.scaled_success(rewards, valid=valid),
            low=low,
            high=high,
        )

    def _watch_escort(self, num_generations: int):
        if self._mode != "train" or num_generations <= _LOW_ESS:
            return
        low = self._drive_metrics["train"]["escort/ess"] < _LOW_ESS
        self._low_ess_rollouts = self._low_ess_rollouts + 1 if low else 0
        if self._low_ess_rollouts == _LOW_ESS_ROLLOUTS:
            logger.warning(
                f"The effective sample size of the escort weights has been below {_LOW_ESS:g} of {num_generations} "
                f"for {_LOW_ESS_ROLLOUTS} rollouts: one completion per group takes nearly all the weight. Raise "
                f"`alpha` ({self.args.alpha}) or `escort_temperature` ({self.args.escort_temperature}), or use "
                f"`anchor_correction='absorbed'` (now '{self.args.anchor_correction}')."
            )

    # 2. The rows of an optimizer step pass through the model

    def _micro_batches(self, steps: list[dict[str, Any]], until_update: int) -> Any:
        """
        One entry a micro-step: the parts that it passes through the model one by one.

        The anchor's log-probabilities are computed here, before the policy moves, and only of rows that are needed
        after it has moved: until then the anchor is the policy itself. They are computed part by part, since in
        bfloat16 a row has the same log-probabilities only in the same micro-batch.
        """
        args = self.args
        n_batches = args.steps_per_generation // len(steps)
        planned = []
        for number, rows in enumerate(steps):
            on_policy = (number + 1) * n_batches <= until_update
            parts = self._parts(rows, on_policy) if args.plan_micro_batches else micro_batches(rows, n_batches)
            for part in parts if not (on_policy or "old_per_token_logps" in rows) else []:
                part["old_per_token_logps"], _ = self._anchor_pass(part)
            planned += spread(parts, n_batches)
        return planned

    def _can_exchange(self, rows: Mapping[str, Any]) -> bool:
        """
        Whether processes can exchange rows: all of them decide the same, as each entry is then gathered.

        TRL leaves the entries of images out where a process has no image, and lists cannot be gathered.
        """
        if self.accelerator.num_processes == 1:
            return False
        tensors_only = all(isinstance(value, Tensor) for value in rows.values())
        mine = [zlib.crc32(" ".join(sorted(rows)).encode()), tensors_only and not rows.keys() & set(MULTIMODAL_KEYS)]
        entries, exchangeable = self._of_all_processes(mine).T
        return bool((entries == entries[0]).all() and exchangeable.all())

    def _of_all_processes(self, numbers: list[int]) -> Tensor:
        """What each process has for some numbers, `[processes, numbers]`."""
        return self.accelerator.gather(torch.tensor([numbers], device=self.accelerator.device))

    def _parts(self, rows: dict[str, Any], on_policy: bool) -> list[dict[str, Any]]:
        """The rows of an optimizer step in parts: equally many on every process, as each is a collective call."""
        if self._can_exchange(rows):
            rows = gather_rows(rows, self.accelerator)
            dealt = partition(row_lengths(rows), self._inert(rows, on_policy), self.accelerator.num_processes)
            rows = take_rows(rows, dealt[self.accelerator.process_index])
        inert = self._inert(rows, on_policy)
        limits = self._limits_of_parts(self.args.per_device_train_batch_size)
        n_parts = self._agreed_parts(row_lengths(rows)[~inert], limits)
        # A process with fewer rows than parts fills up with rows that have no effect.
        kept, skipped = np.split(np.argsort(inert, kind="stable"), [max((~inert).sum(), n_parts)])
        parts = parts_of_rows(take_rows(rows, kept), n_parts, multiple=self._columns_multiple, **limits)
        parts[-1]["opo_skipped"] = rows["opo_valid"][skipped]
        return parts

    def _agreed_parts(self, lengths: np.ndarray, limits: Mapping[str, Any]) -> int:
        """The largest number of parts that a process needs for its rows, of these lengths `[B, 2]`."""
        return int(self._of_all_processes([best_number(lengths, **limits)]).max())

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

    @property
    def _columns_multiple(self) -> int | None:
        multiple: Any = self.pad_to_multiple_of
        return multiple

    def _inert(self, rows: Mapping[str, Any], on_policy: bool) -> np.ndarray:
        """Samples, `[B]`, with zero gradient in this optimizer step that no later step needs."""
        without_drive = (rows["opo_target"] == 0).cpu().numpy()  # and with a log-ratio of 0, on-policy
        idle = self.beta == 0.0 and not self._entropy_bonus_enabled and not self.aux_loss_enabled
        # The loss of a subclass may give a gradient to any row, and its anchors may be others than the policy.
        kind = type(self)
        own = kind.compute_loss is OPOTrainer.compute_loss and kind._compute_loss is OPOTrainer._compute_loss
        at_anchor = on_policy and "old_per_token_logps" not in rows and self.num_iterations == 1
        return without_drive & (self.args.skip_inert_rows and idle and own and at_anchor)

    @torch.no_grad()
    def _anchor_pass(self, rows: Mapping[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies `[B, T]` of the completions' tokens under the policy that wrote them."""
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
        if self._anchor_deferred:  # TRL's first pass over a rollout, which `_micro_batches` makes where it is needed
            self._anchor_deferred = False
            return None, None, None
        model = packing.Packed(model) if self.args.padding_free else model
        whole = batch_size is None or not self.args.plan_micro_batches
        images = any(options.get(name) is not None for name in MULTIMODAL_KEYS)
        # All processes go the same way: in parts, they agree on a number, and each part may be a collective call.
        if whole or self._of_all_processes([images]).any():
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **options
            )
        # A pass over a rollout, in parts as in training: the rollout is wider, and would need more memory.
        rows = {"row": torch.arange(len(input_ids))}
        for name, columns in (("ids", input_ids), ("mask", attention_mask)):
            rows[f"prompt_{name}"] = columns[:, :-logits_to_keep]
            rows[f"completion_{name}"] = columns[:, -logits_to_keep:]
        limits = self._limits_of_parts(batch_size)
        n_parts = self._agreed_parts(row_lengths(rows), limits)
        results = [input_ids.new_zeros(len(input_ids), logits_to_keep, dtype=torch.float32) for _ in range(2)]
        for part in parts_of_rows(rows, n_parts, multiple=self._columns_multiple, **limits):
            width = part["completion_ids"].size(1)
            ids, mask = (
                torch.cat([part[f"prompt_{name}"], part[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
            )
            of_part = super()._get_per_token_logps_and_entropies(model, ids, mask, width, **options)
            for result, values in zip(results, of_part[:2], strict=True):
                if values is not None:
                    result[part["row"].to(result.device), :width] = values.float()
        return results[0], results[1] if options.get("compute_entropy") else None, None

    # 3. The loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        """
        Train on a micro-step, part by part: each call of `compute_loss` sees one mapping of tensors, as in any trainer
        of Transformers, and its gradient is added to those before.

        Returns:
            `torch.Tensor`: the loss of the micro-step, a scalar: the sum of its parts'.
        """
        began = time.perf_counter()
        model.train()  # says that `_buffered` generates for training
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # of schedule-free optimizers: generate with the weights that are trained
        self._pending.clear()
        self._pending.extend(self._buffered(inputs))
        if not self._pending:  # all rows of the optimizer step fit into its other micro-steps
            self._step += 1
            self._current_train_step_time += time.perf_counter() - began
            return torch.zeros((), device=self.accelerator.device)
        loss = torch.zeros((), device=self.accelerator.device)
        with self._without_exchange(model):
            while len(self._pending) > 1:
                loss += super(GRPOTrainer, self).training_step(model, inputs, num_items_in_batch)
        self._current_train_step_time += time.perf_counter() - began
        loss += super().training_step(model, inputs, num_items_in_batch)
        self._part = {}
        if self.accelerator.sync_gradients and self._step_rows:  # none, where a subclass has a loss of its own
            self._report_rows()
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
        if not self._pending:  # called by itself, outside `training_step`
            self._pending.extend(self._buffered(generation_batch))
        self._part = self._pending.popleft()
        return self._part

    @profiling_decorator
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Sum of the OPO losses of some rows of an optimizer step, over the number of the step's rows."""
        if return_outputs:
            raise ValueError("OPOTrainer does not support returning outputs")
        return self._compute_loss(model, inputs)  # never the parent's: that would train another loss

    def _compute_loss(self, model, inputs: Any) -> Tensor:
        args = self.args
        # Without a token that counts, a completion that takes no part has no ratio, no KL term and no entropy bonus.
        mask = completion_tokens(inputs) & inputs["opo_valid"].unsqueeze(1)
        logps, entropies, aux_loss = self._token_logps(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        # Without stored anchor values the policy is the anchor. They are stored for a later iteration in the buffered
        # part, of which a subclass may have passed on a copy.
        anchor = inputs.get("old_per_token_logps")
        anchor = logps.detach() if anchor is None else anchor
        if self.num_iterations > 1 and self._part:
            self._part["old_per_token_logps"] = anchor
        steered, bonus_mask = logps, mask
        if "opo_steering" in inputs:
            bonus_mask = inputs["opo_steering"]
            steered = torch.where(bonus_mask, logps, anchor)  # the other tokens stay in the length, without a ratio
        log_ratio, clamped = objective.sequence_log_ratio(
            steered, anchor, mask, reduction=args.log_ratio_reduction, clamp=args.log_ratio_clamp
        )
        weights = self._row_weights(inputs, logps, anchor, mask)
        rows = objective.opo_loss(
            log_ratio, inputs["opo_target"], mu=inputs["opo_mu"], ratio_form=args.ratio_form, weights=weights
        )
        kl = torch.zeros_like(rows)
        if self.beta != 0.0:
            kl = self._reference_kl(inputs, logps, anchor, mask)
            rows = rows + self.beta * kl
        rows = policy = inputs["opo_scale"] * rows
        if self._entropy_bonus_enabled:
            rows = rows - self._entropy_bonus_coef() * objective.token_mean(entropies, bonus_mask)
        loss = rows.sum()
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss * len(rows)
            self._metrics[self._mode]["aux_loss"].append(self.accelerator.gather(aux_loss.detach()).mean().item())
        whole, _ = objective.sequence_log_ratio(logps.detach(), anchor, mask, reduction="sum", clamp=_WHOLE_CLAMP)
        self._step_rows.append(
            _table(
                log_ratio=log_ratio,
                target=inputs["opo_target"],
                mu=inputs["opo_mu"],
                weights=weights,
                clamped=clamped,
                age=self.state.global_step - inputs["opo_step"],
                whole_log_ratio=whole,
                kl=kl if args.log_ratio_reduction == "sum" else kl * mask.sum(dim=1),
                policy_loss=policy,
                entropy=torch.where(mask, entropies, 0.0).sum(dim=1),
                tokens=mask.sum(dim=1),
                bonus_entropy=torch.where(bonus_mask, entropies, 0.0).sum(dim=1),
                bonus_tokens=bonus_mask.sum(dim=1),
                computed=torch.ones_like(rows),
            )
        )
        if "opo_skipped" in inputs:
            self._step_rows.append(_table(mu=inputs["opo_mu"].max(), weights=inputs["opo_skipped"]))
        if self._mode == "eval":
            self._report_rows()
            return loss / len(rows)
        return loss / (args.per_device_train_batch_size * self.current_gradient_accumulation_steps)

    def _row_weights(self, inputs: Mapping[str, Any], logps: Tensor, anchor: Tensor, mask: Tensor) -> Tensor:
        """Importance weight of each row, `[B]`: 0 for rows that take no part."""
        weights = torch.ones_like(inputs["opo_target"])
        if "importance_sampling_ratio" in inputs:
            weights = objective.sequence_weights(inputs["importance_sampling_ratio"], mask)
        if self.off_policy_mask_threshold is not None:
            keep = self.get_off_policy_mask(
                advantages=inputs["advantages"].unsqueeze(1),
                per_token_logps=logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", anchor),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
            weights = weights * keep.squeeze(1)
        return torch.where(inputs["opo_valid"], weights, 0.0)

    def _reference_kl(self, inputs: Mapping[str, Any], logps: Tensor, anchor: Tensor, mask: Tensor) -> Tensor:
        return objective.reference_kl(
            logps,
            inputs["ref_per_token_logps"],
            mask,
            reduction=self.args.log_ratio_reduction,
            anchor_logps=anchor if self.args.use_bias_correction_kl else None,
        )

    def _entropy_bonus_coef(self) -> float:
        """TRL's coefficient; under adaptive control it acts only while the last step's entropy is low enough."""
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return self.entropy_coef

    # 4. What happened

    @torch.no_grad()
    def _report_rows(self):
        """Gather what the rows of an optimizer step have to report, once, and log it."""
        table = self.accelerator.gather(torch.cat(self._step_rows))
        self._step_rows = []
        self._log_step(dict(zip(_COLUMNS, table.T, strict=True)))

    def _log_step(self, rows: dict[str, Tensor]):
        mode, args = self._mode, self.args
        step = objective.diagnostics(
            rows["log_ratio"],
            rows["target"],
            mu=rows["mu"],
            ratio_form=args.ratio_form,
            weights=rows["weights"],
            clamped=rows["clamped"].bool(),
        )
        if args.log_ratio_reduction == "mean":
            # Only the log-ratio of the whole completion gives the χ² divergence of the policy.
            whole = objective.diagnostics(
                rows["whole_log_ratio"], rows["target"], mu=rows["mu"], weights=rows["weights"]
            )
            step["sequence_chi2"] = whole["chi2"]
        step["off_policy_steps"] = rows["age"].max()
        step["frac_skipped"] = 1 - rows["computed"].mean()
        values = {**self._drive_metrics[mode], **{name: value.item() for name, value in step.items()}}
        for name, value in values.items():
            self._metrics[mode][f"opo/{name}"].append(value)
        tokens = rows["tokens"].sum().clamp(min=1)
        self._metrics[mode]["entropy"].append((rows["entropy"].sum() / tokens).item())
        if self.beta != 0.0:
            self._metrics[mode]["kl"].append((rows["kl"].sum() / tokens).item())
        if self._entropy_bonus_enabled:
            self._metrics[mode]["policy_loss"].append(rows["policy_loss"].mean().item())
        if mode == "train" and self._entropy_bonus_enabled:
            if self.use_adaptive_entropy:
                entropy = rows["bonus_entropy"].sum() / rows["bonus_tokens"].sum().clamp(min=1)
                self._adapt_entropy_coef(entropy.item())
            self._metrics[mode]["entropy_coef"].append(self.entropy_coef)

    def _adapt_entropy_coef(self, entropy: float):
        """TRL's controller: one step up while entropy is at or below its target, one step down above it."""
        if not math.isfinite(entropy):  # of a step that will be skipped
            return
        args = self.args
        step = args.entropy_coef_delta if entropy <= args.entropy_target else -args.entropy_coef_delta
        self.entropy_coef = min(max(self.entropy_coef + step, args.entropy_coef_min), args.entropy_coef_max)
        self._last_world_entropy = entropy


# What a row reports of an optimizer step, in this order; a row that was left out has zeros but for its mu and weight.
_COLUMNS = (
    "log_ratio",
    "target",
    "mu",
    "weights",
    "clamped",
    "age",
    "whole_log_ratio",
    "kl",
    "policy_loss",
    "entropy",
    "tokens",
    "bonus_entropy",
    "bonus_tokens",
    "computed",
)


@torch.no_grad()
def _table(**columns: Tensor) -> Tensor:
    """`[B, columns]`: a row for each completion."""
    like = columns["weights"].float()
    rows = [columns.get(name, torch.zeros_like(like)).float().expand_as(like) for name in _COLUMNS]
    return torch.stack(rows, dim=1)
