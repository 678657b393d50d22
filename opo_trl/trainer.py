"""
`OPOTrainer`: TRL's `GRPOTrainer` with the objective of Orthogonalized Policy Optimization.

TRL owns generation, rewards, sharding, the optimizer and checkpoints. What is added, in the order of a training step:

1. `_generate_and_score_completions`: once per rollout, over all processes and while its groups are still whole, the
   advantages become the target fluctuation v* of each completion (`objective`, steps 1–5), which from there on
   travels with its row through TRL's shuffling and slicing.
2. `compute_loss`: the log-ratio of each row is regressed on its target. A plain mean over rows, so that how the rows
   are split into micro-batches and processes changes nothing.
3. `_log_step`: what happened, under `opo/`.

Rollouts and checkpoints are those of [`RolloutTrainer`], which stands between the two.
"""

import math
import textwrap
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl.extras.profiling import profiling_decorator
from trl.models.utils import disable_gradient_checkpointing

from . import objective, packing
from .config import OPOConfig
from .planning import best_number, parts_of_rows, row_lengths, shares, spread
from .rollout import completion_tokens, gather_rows, micro_batches, take_rows
from .rollout_trainer import RolloutTrainer, takes_what_grpo_takes


logger = get_logger(__name__)

# Entries of a rollout that the model's forward pass takes beside the tokens: images and the like.
_MULTIMODAL_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)

# With an effective sample size below this for so many rollouts, one completion of each group has all the weight.
_LOW_ESS = 2.0
_LOW_ESS_ROLLOUTS = 10

# A whole completion's log-ratio is reported beside a mean one: the bound keeps its exponential finite in float32.
_WHOLE_CLAMP = 20.0


class OPOTrainer(RolloutTrainer):
    r"""
    Trainer for Orthogonalized Policy Optimization, a drop-in replacement of [`~trl.GRPOTrainer`].

    Example:

    ```python
    from datasets import load_dataset
    from opo_trl import OPOConfig, OPOTrainer
    from opo_trl.rewards import accuracy_reward

    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

    trainer = OPOTrainer(
        model="Qwen/Qwen3-1.7B",
        reward_funcs=accuracy_reward,
        args=OPOConfig(output_dir="qwen3-opo"),
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
        if self.args.padding_free:
            packing.check(self.accelerator.unwrap_model(self.model))

    # 1. The drive joins the rollout

    def _micro_batches(self, steps: list[dict[str, Any]]) -> list:
        """
        One entry a micro-step: the parts that it passes through the model one by one.

        The anchor's log-probabilities are computed here, before the policy moves, and only of rows that are needed
        after it has moved: in the optimizer step at hand the anchor is the policy itself.
        """
        args = self.args
        n_batches = args.steps_per_generation // len(steps)
        until_update = args.gradient_accumulation_steps - self._step % args.gradient_accumulation_steps
        planned = []
        for number, rows in enumerate(steps):
            on_policy = (number + 1) * n_batches <= until_update
            if on_policy:
                rows.pop("old_per_token_logps", None)
            parts = self._parts(rows, on_policy) if args.plan_micro_batches else micro_batches(rows, n_batches)
            if not on_policy and "old_per_token_logps" not in rows:
                for part in parts:
                    part["old_per_token_logps"], _ = self._anchor_pass(part)
            planned += spread(parts, n_batches)
        return planned

    def _parts(self, rows: dict[str, Any], on_policy: bool) -> list[dict[str, Any]]:
        """The rows of an optimizer step in parts: equally many on every process, as each is a collective call."""
        args, accelerator = self.args, self.accelerator
        if accelerator.num_processes > 1 and not rows.keys() & set(_MULTIMODAL_KEYS):
            rows = gather_rows(rows, accelerator)
            dealt = shares(row_lengths(rows), self._inert(rows, on_policy), accelerator.num_processes)
            rows = take_rows(rows, dealt[accelerator.process_index])
        inert = self._inert(rows, on_policy)
        limits = {"max_rows": args.per_device_train_batch_size, "max_tokens": args.max_tokens_per_micro_batch}
        wanted = best_number(row_lengths(rows)[~inert], **limits)
        n_parts = int(accelerator.gather(torch.tensor([wanted], device=accelerator.device)).max())
        # A process with fewer rows than parts fills up with rows that have no effect.
        kept, skipped = np.split(np.argsort(inert, kind="stable"), [max((~inert).sum(), n_parts)])
        multiple: Any = self.pad_to_multiple_of
        parts = parts_of_rows(take_rows(rows, kept), n_parts, multiple=multiple, **limits)
        parts[-1]["opo_skipped"] = rows["opo_valid"][skipped]
        return parts

    def _inert(self, rows: Mapping[str, Any], on_policy: bool) -> np.ndarray:
        """Which rows, `[B]`, have nothing to do in this optimizer step, and are not needed in another."""
        without_drive = (rows["opo_target"] == 0).cpu().numpy()  # and with a log-ratio of 0, on-policy
        idle = self.beta == 0.0 and not self._entropy_bonus_enabled and not self.aux_loss_enabled
        return without_drive & (self.args.skip_inert_rows and on_policy and idle and self.num_iterations == 1)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rollout = super()._generate_and_score_completions(inputs)
        anchor_missing = "old_per_token_logps" not in rollout and (
            self.args.anchor_correction != "absorbed" or self.args.adaptive_temperature
        )
        if anchor_missing or self.top_entropy_quantile < 1.0:
            anchor_logps, entropies = self._anchor_pass(rollout)
        if anchor_missing:
            rollout["old_per_token_logps"] = anchor_logps
        rollout.update(self._drive(rollout))
        if self.top_entropy_quantile < 1.0:
            # TRL's threshold is that of a micro-batch; the rollout's does not depend on how it is cut.
            mask = completion_tokens(rollout) & rollout["opo_valid"].unsqueeze(1)
            rollout["opo_steering"] = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        return rollout

    def _generate_once(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        sampler_weights = self.use_vllm and self.vllm_importance_sampling_correction  # of every row
        self._anchor_deferred = self._mode == "train" and not self.args.is_on_policy and not sampler_weights
        try:
            return super()._generate_once(inputs)
        finally:
            self._anchor_deferred = False

    def _get_per_token_logps_and_entropies(self, model, *inputs, **options):
        if self._anchor_deferred:  # TRL's first pass over a rollout, which `_micro_batches` makes where it is needed
            self._anchor_deferred = False
            return None, None, None
        model = packing.Packed(model) if self.args.padding_free else model
        return super()._get_per_token_logps_and_entropies(model, *inputs, **options)

    @torch.no_grad()
    def _anchor_pass(self, rollout: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies `[B, T]` of the completions' tokens under the policy that wrote them."""
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with disable_gradient_checkpointing(self.model, checkpointing):
            batch_size = self.args.per_device_train_batch_size
            logps, entropies, _ = self._token_logps(self.model, rollout, batch_size=batch_size, compute_entropy=True)
        return logps, entropies

    def _drive(self, rollout: Mapping[str, Any]) -> dict[str, Tensor]:
        """Steps 1–5 of the objective on the whole rollout; returns this process's rows of the result."""
        args, mode = self.args, self._mode
        num_generations = self.num_generations if mode == "train" else self.num_generations_eval
        advantages, has_tokens, anchor_sum, anchor_mean = self._gather_rows(rollout)
        rewards = self._rewards_per_func.cpu().double()
        valid = has_tokens.bool() & ~rewards.isnan().all(dim=1)
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
        return self._local_rows(
            rollout,
            opo_target=target,
            opo_valid=valid,
            opo_mu=mu.expand_as(target),
            opo_step=torch.full_like(target, self.state.global_step),  # when the row's anchor was the policy
        )

    def _gather_rows(self, rollout: Mapping[str, Any]) -> Tensor:
        """
        `[4, N]`, in groups: advantage, whether any token counts, and the anchor's log-probability of the completion,
        summed and per token (0 where no correction or temperature needs it).

        On the host and in float64: N numbers cost nothing there, and the drive is the same on every device.
        """
        mask = completion_tokens(rollout)
        anchor = rollout.get("old_per_token_logps")
        anchor = torch.zeros_like(mask, dtype=torch.float32) if anchor is None else anchor
        rows = [
            rollout["advantages"],
            mask.any(dim=1),
            torch.where(mask, anchor, 0.0).sum(dim=1),
            objective.token_mean(anchor, mask),
        ]
        table = torch.stack([row.float() for row in rows], dim=1)
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

    # 2. The loss

    def _token_logps(self, model, inputs: Mapping[str, Any], **options):
        """Per-token log-probabilities, entropies and auxiliary loss, through TRL's fused language-model head."""
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            **options,
            **{key: inputs[key] for key in _MULTIMODAL_KEYS if key in inputs},
        )

    @profiling_decorator
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Mean OPO loss of the rows at hand, over the number of micro-batches of the optimizer step."""
        if return_outputs:
            raise ValueError("OPOTrainer does not support returning outputs")
        if isinstance(inputs, Mapping):  # of an evaluation
            return self._part_loss(model, inputs, last=True)
        if not inputs:  # all rows of the optimizer step fit into its other micro-steps
            # A result and not a leaf: DeepSpeed takes no other loss.
            return torch.zeros((), device=self.accelerator.device, requires_grad=True).clone()
        *parts, last = inputs
        done = [self._add_gradient(model, part) for part in parts]
        return self._part_loss(model, last, last=True) + sum(done)

    def _add_gradient(self, model, part: dict[str, Any]) -> Tensor:
        """Pass a part through the model and back, without the exchange of gradients that comes with the last one."""
        accelerator = self.accelerator
        exchanges = accelerator.sync_gradients
        options = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}  # as in Transformers' training step
        with accelerator.no_sync(model) if exchanges else nullcontext():
            accelerator.gradient_state._set_sync_gradients(False)
            with self.compute_loss_context_manager():
                loss = self._part_loss(model, part, last=False)
            accelerator.backward(loss, **options)
            accelerator.gradient_state._set_sync_gradients(exchanges)
        return loss.detach()

    def _part_loss(self, model, inputs: Any, *, last: bool) -> Tensor:
        """Loss of some rows of an optimizer step; `last` ones of a micro-step report what the step did."""
        args = self.args
        # Without a token that counts, a completion that takes no part has no ratio, no KL term and no entropy bonus.
        mask = completion_tokens(inputs) & inputs["opo_valid"].unsqueeze(1)
        logps, entropies, aux_loss = self._token_logps(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        # Without stored anchor values the rollout serves this optimizer step only, and its policy is the current one.
        anchor = inputs.get("old_per_token_logps")
        anchor = logps.detach() if anchor is None else anchor
        if self.num_iterations > 1:
            inputs["old_per_token_logps"] = anchor
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
        if last and self.accelerator.sync_gradients:
            self._report_rows()
        return loss / (args.per_device_train_batch_size * self.current_gradient_accumulation_steps)

    def _compute_loss(self, model, inputs):
        # TRL's own loss must never be trained by accident, whoever calls this.
        return self.compute_loss(model, inputs)

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

    # 3. What happened

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
        if rows["computed"].all() or args.is_on_policy:
            # A mean without the rows that were left out, whose groups are the surest, would go up and down by step.
            self._metrics[mode]["entropy"].append((rows["entropy"].sum() / tokens).item())
        if self.beta != 0.0:
            self._metrics[mode]["kl"].append((rows["kl"].sum() / tokens).item())
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
