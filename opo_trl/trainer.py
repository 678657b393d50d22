"""
`OPOTrainer`: TRL's `GRPOTrainer` with the objective of Orthogonalized Policy Optimization.

[`RolloutTrainer`] makes rollouts and checkpoints. This module adds, in the order of a step:

1. `_generate_once`: TRL's pass over the rollout, for the behaviour policy's log-probabilities, is left out: only some
   samples need them, and in the shape of their micro-batch.
2. `_finish_rollout`: once per rollout, over all processes and after overrides of `_generate_and_score_completions`,
   the objective makes a target of each sample's advantage. The target then travels with its sample.
3. `_micro_batches`: a [`Planner`] cuts the samples of each optimizer step into parts; those of off-policy steps get
   the behaviour policy's log-probabilities. `training_step` passes parts through `compute_loss`, one after the other.
4. `_sample_losses`: the objective's loss of each sample, and what TRL's options add. The loss is a plain sum over
   samples, so that it does not depend on how they are split into parts, micro-batches and processes.
5. `_log_step`: the samples' reports are gathered and logged under `opo/` (`metrics.step`).
"""

import math
import textwrap
import time
from collections import deque
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import GRPOTrainer
from trl.extras.profiling import profiling_decorator
from trl.models.utils import disable_gradient_checkpointing

from .config import OPOConfig
from .metrics.opo import rollout_metrics
from .metrics.step import SampleReport, metrics_of_samples
from .objective import OPO, Groups, Objective, Samples, objective_named, token_mean
from .rollout import shared_prompts
from .rollout.planner import Planner, without_exchange
from .rollout.planning import spread
from .rollout.rows import completion_tokens, gather_samples, high_values, own_samples
from .rollout.trainer import RolloutTrainer
from .trl import MULTIMODAL_KEYS, temporarily


logger = get_logger(__name__)


class OPOTrainer(RolloutTrainer):
    r"""
    Trainer for Orthogonalized Policy Optimization, a drop-in replacement of [`~trl.GRPOTrainer`].

    OPO differs from REINFORCE only if a rollout serves several optimizer steps. TRL's default is one, so set
    `steps_per_generation` to a multiple of `gradient_accumulation_steps`, or `num_iterations` to 2 or more.

    Example:

    ```python
    from datasets import load_dataset
    from opo_trl import OPOConfig, OPOTrainer
    from opo_trl.rewards import accuracy_reward

    trainer = OPOTrainer(
        model="Qwen/Qwen3-1.7B",
        reward_funcs=accuracy_reward,
        args=OPOConfig(output_dir="qwen3-opo", steps_per_generation=16, gradient_accumulation_steps=8),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
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
        `ValueError`: vLLM is to generate from a quantized base model.
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
    objective_class: type[Objective] | None = None  # of a subclass, in place of `objective`
    policy_objective: Objective
    args: OPOConfig
    pad_to_multiple_of: int | None
    _saved_numbers = (*RolloutTrainer._saved_numbers, "_drive_metrics")

    def _set_up(self) -> None:
        kind = self.objective_class or objective_named(self.args.objective)
        self.policy_objective = kind(self.args)
        if not (self.objective_class or issubclass(kind, OPO)):
            self._name, self._paper = kind.__name__, {}  # of the model card

    def _begin(self) -> None:
        super()._begin()
        self._drive_metrics: dict[str, dict[str, float]] = {"train": {}, "eval": {}}  # of the current rollout
        self._reports: list[SampleReport] = []  # of the current optimizer step, one per part
        self._pending: deque[dict[str, Any]] = deque()  # parts of the current micro-step that are left
        self._anchor_is_own = False  # whether the rollout's behaviour policy is the policy that its samples come from
        self._anchor_deferred = False  # whether to leave out TRL's next pass over the rollout
        self._early_logps: Tensor | None = None  # from TRL's pass over the rollout

    def train(self, *args, **kwargs):
        """As [`RolloutTrainer.train`]; warns if every optimizer step is on-policy."""
        config = self.args
        if config.is_on_policy and self.policy_objective.is_regression:
            logger.warning(
                f"Every rollout serves a single optimizer step (steps_per_generation={config.steps_per_generation}, "
                f"gradient_accumulation_steps={config.gradient_accumulation_steps}), so the χ² term has no effect: "
                f"this is REINFORCE with escort weights. For off-policy steps, set {config.off_policy_fields}."
            )
        return super().train(*args, **kwargs)

    # 1. The behaviour policy's log-probabilities

    def _generate_once(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        generate = self._generate

        def generate_only(prompts: list) -> Any:
            generated = generate(prompts)  # a tool or a `rollout_func` may score by the policy
            # vLLM's importance weights compare the log-probabilities of every sample, so there TRL's pass is needed.
            sampler_weights = self.use_vllm and self.vllm_importance_sampling_correction
            # An override that changes log-probabilities expects some from each pass.
            overridden = not self._keeps("_get_per_token_logps_and_entropies")
            needed = sampler_weights or self.args.save_rollouts or overridden
            self._anchor_deferred = not self.args.is_aligned and not needed
            return generated

        try:
            with temporarily(self, _generate=generate_only):
                return super()._generate_once(inputs)
        finally:
            self._anchor_deferred = False

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rollout = super()._generate_and_score_completions(inputs)
        # Kept before a subclass's override sees the rollout, to notice one that replaces them.
        self._early_logps = rollout.get("old_per_token_logps")
        return rollout

    def _logps_of_rollout(self, rollout: dict[str, Any]) -> Tensor | None:
        """
        Take the log-probabilities `[B, T]` of TRL's pass out of a rollout: they are good enough for escort weights,
        but in bfloat16 not for a log-ratio in micro-batches of another shape. Those that an override has set stay.
        """
        logps = rollout.get("old_per_token_logps")
        self._anchor_is_own = logps is self._early_logps and not self._replays_recorded
        if self._anchor_is_own:
            rollout.pop("old_per_token_logps", None)
        self._early_logps = None
        return logps

    @torch.no_grad()
    def _anchor_pass(self, rows: Mapping[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies `[B, T]` of the completions' tokens under the current policy."""
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with disable_gradient_checkpointing(self.model, checkpointing):
            logps, entropies, _ = self._token_logps(self.model, rows, compute_entropy=True, **options)
        return logps, entropies

    def _token_logps(self, model, inputs: Mapping[str, Any], **options):
        """Per-token log-probabilities, entropies and auxiliary loss, through TRL's fused language-model head."""
        if self._planner.balance:  # those of a checkpoint may be placed for another attention
            model = shared_prompts.model_for(model, inputs)
        ids, mask = _whole(inputs)
        return self._get_per_token_logps_and_entropies(
            model,
            ids,
            mask,
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
        self._check_padding(input_ids, attention_mask, logits_to_keep)
        logps = super()._get_per_token_logps_and_entropies
        if batch_size is not None and self._planner.plans:
            logps = partial(self._planner.score, logps)
        return logps(model, input_ids, attention_mask, logits_to_keep, batch_size, **options)

    # 2. The target joins the rollout

    def _finish_rollout(self, rollout: dict[str, Any]) -> dict[str, Any]:
        # Not the parent's: `_targets` gathers the advantages, and takes their range from them.
        logps, entropies = self._logps_of_rollout(rollout), None
        anchor_pass = partial(self._anchor_pass, rollout, batch_size=self.args.per_device_train_batch_size)
        if (self.policy_objective.reads_logps and logps is None) or self.top_entropy_quantile < 1.0:
            current, entropies = anchor_pass()
            logps = current if logps is None or self._anchor_is_own else logps
        moves = self._mode == "train" and self.num_iterations > 1 and not self.args.is_on_policy
        if moves and "old_per_token_logps" not in rollout:
            # Each pass has other micro-batches, so there is no shape in which a log-ratio would be free of rounding.
            rollout["old_per_token_logps"] = anchor_pass()[0] if logps is None else logps
        rollout.update(self._targets(rollout, logps))
        if entropies is not None and self.top_entropy_quantile < 1.0:
            # TRL computes the threshold per micro-batch; the rollout's does not depend on how it is cut.
            mask = completion_tokens(rollout) & rollout["opo_valid"].unsqueeze(1)
            rollout["opo_steering"] = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        return rollout

    def _targets(self, rollout: Mapping[str, Any], logps: Tensor | None) -> dict[str, Tensor]:
        """Compute the target of the complete rollout; returns what this process's samples need for the loss."""
        args, mode = self.args, self._mode
        advantages, length, logp_sum, logp_mean, rewards = gather_samples(rollout, logps, self.accelerator)
        valid = (length > 0) & ~rewards.isnan().all(dim=1) & advantages.isfinite()
        groups = Groups(
            advantages=advantages,
            rewards=(rewards * self.reward_weights.cpu().double()).nansum(dim=1),
            valid=valid,
            num_generations=self.num_generations if mode == "train" else self.num_generations_eval,
            logps=logp_sum,
            mean_logps=logp_mean,
            vocab_size=self.model.config.get_text_config().vocab_size if self.policy_objective.reads_logps else 0,
            has_rewards="rewards_per_func" in rollout,
        )
        found = self.policy_objective.targets(groups)
        target = found.target
        self._drive_metrics[mode] = {name: value.item() for name, value in rollout_metrics(found, groups).items()}
        if mode == "train":
            self._advantage_range = (advantages.max().float() - advantages.min().float()).item()
        # The log-ratio of a completion is a sum over its tokens, and so is its gradient: a constant of the rollout
        # makes the norm comparable with that of GRPO, whose loss is a mean over tokens.
        scale = 1 / length[valid].mean() if args.log_ratio_reduction == "sum" and valid.any() else torch.tensor(1.0)
        # At which the policy is the behaviour policy; that of recorded completions is older.
        step = target.new_tensor(float(self.state.global_step - self._replays_recorded))
        columns = {"opo_target": target, "opo_valid": valid, "opo_mu": found.mu, "opo_scale": scale, "opo_step": step}
        columns["opo_own"] = torch.tensor(float(self._anchor_is_own))  # whether it has sampled the completion
        own = own_samples(rollout, {n: column.expand_as(target) for n, column in columns.items()}, self.accelerator)
        return {**own, "opo_valid": own["opo_valid"].bool()}

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """As in TRL, which takes the `threshold` quantile by `torch.quantile`: that allows 2^24 tokens."""
        return high_values(entropies, mask.bool(), threshold, self.accelerator)

    # 3. The parts of a micro-step

    def _largest_micro_batch(self, prompt: int, completion: int) -> tuple[int, int]:
        # Not `_planner`: methods may still be replaced before training.
        return self._make_planner().largest_part(prompt, completion)

    def _check_padding(self, *inputs) -> None:
        if self._padding is None:
            super()._check_padding(*inputs)
            vars(self).pop("_planner", None)  # made before, it knew no better

    def _make_planner(self) -> Planner:
        zero_stage = self.accelerator.state.deepspeed_plugin.zero_stage if self.is_deepspeed_enabled else 0
        sharded = zero_stage >= 2 or self.is_fsdp_enabled or self.is_distributed_loading_by_transformers
        # Overrides of these see a model as in `GRPOTrainer`.
        own = self._keeps("_token_logps", "_get_per_token_logps_and_entropies")
        balance = None
        if own and not self.aux_loss_enabled:
            balance = shared_prompts.balance(self.accelerator.unwrap_model(self.model))
        return Planner(
            self.args,
            self.accelerator,
            self.pad_to_multiple_of,
            communicates=sharded,
            balance=balance if self._padding is None or self._padding.shared else None,
            plans=self.args.plan_micro_batches and (self._padding is None or self._padding.harmless),
        )

    _planner = cached_property(_make_planner)

    def _keeps(self, *names: str) -> bool:
        """Whether these methods are the ones of this class, and not a subclass's or this object's."""
        return all(getattr(getattr(self, name), "__func__", None) is getattr(OPOTrainer, name) for name in names)

    def _micro_batches(self, steps: list[dict[str, Any]], until_update: int) -> Any:
        """One entry per micro-step: the parts that pass through the model, one after the other."""
        self._check_padding(*_whole(steps[0]), steps[0]["completion_ids"].size(1))
        n_batches = self.args.steps_per_generation // len(steps)
        on_policy = [(number + 1) * n_batches <= until_update for number in range(len(steps))]
        steps = [{**rows, "opo_idle": self._idle(rows)} for rows in steps]
        if self._anchor_is_own:  # the log-ratio of an on-policy step is exactly 0
            for rows in (rows for rows, policy in zip(steps, on_policy, strict=True) if policy):
                rows.pop("old_per_token_logps", None)
        skippable = (self._zero_gradient(rows, policy) for rows, policy in zip(steps, on_policy, strict=True))
        planned = []
        for rows, policy, parts in zip(steps, on_policy, self._planner.parts(steps, skippable), strict=True):
            if not policy and "old_per_token_logps" not in rows:
                # Now, because the policy is still the behaviour policy; a step before the next update needs no pass.
                # Part by part, because in bfloat16 a sample has the same log-probabilities only in a micro-batch of
                # the same shape: any other would leave a log-ratio that is only rounding.
                for part in parts:
                    part["old_per_token_logps"], _ = self._anchor_pass(part)
            # The last micro-step of an optimizer step gets at least one part: its backward pass is the one in which
            # processes exchange gradients.
            planned += spread(parts, n_batches)
        return planned

    def _idle(self, rows: Mapping[str, Any]) -> Tensor:
        """Samples, bool `[B]`, without a gradient while the policy is the behaviour policy."""
        mask = completion_tokens(rows) & rows["opo_valid"].unsqueeze(1)
        found = self.policy_objective.zero_gradient(rows["opo_target"], rows["opo_mu"], mask)
        return found & rows["opo_own"].bool() & self._keeps("_samples", "_token_logps")

    def _zero_gradient(self, rows: Mapping[str, Any], on_policy: bool) -> Tensor:
        """Samples, bool `[B]`, that can be skipped, as neither TRL's options nor a subclass give them a gradient."""
        alone = self.beta == 0.0 and not self._entropy_bonus_enabled and not self.aux_loss_enabled
        alone = alone and self._keeps("compute_loss", "_compute_loss", "_sample_losses")
        if not self.policy_objective.pulls_back:
            own = alone and self._keeps("_samples", "_token_logps")
            return (rows["opo_target"] == 0) & (own and self.args.skip_inert_rows)
        # Log-probabilities of an override may be those of another policy.
        skips = self.args.skip_inert_rows and on_policy and "old_per_token_logps" not in rows
        return rows["opo_idle"] & (alone and skips)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Train on a micro-step, part by part: each is one call of `compute_loss`. Returns the sum of their losses."""
        began = time.perf_counter()
        model.train()  # so that `_buffered` generates for training
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers: generate with the weights that are trained
        self._pending = deque(self._buffered(inputs))
        loss = torch.zeros((), device=self.accelerator.device)
        with without_exchange(self, model):
            while len(self._pending) > 1:
                # Transformers' step: TRL's also counts a micro-step, which only the last part completes.
                loss += super(GRPOTrainer, self).training_step(model, inputs, num_items_in_batch)
        self._current_train_step_time += time.perf_counter() - began
        if self._pending:
            loss += super().training_step(model, inputs, num_items_in_batch)
        else:  # all samples of the optimizer step fit into its other micro-steps
            self._step += 1
        if self.accelerator.sync_gradients and self._reports:  # none if a subclass has its own loss
            self._log_step(self._reports)
            self._reports = []
        return loss

    @profiling_decorator
    def _prepare_inputs(self, generation_batch):
        if self._mode == "eval":
            return super()._prepare_inputs(generation_batch)
        if not self._pending:  # called directly, outside `training_step`
            self._pending.extend(self._buffered(generation_batch))
        return self._pending.popleft()

    # 4. The loss

    @profiling_decorator
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Sum of the OPO losses of some samples of an optimizer step, divided by the number of the step's samples."""
        if return_outputs:
            raise ValueError("OPOTrainer does not support returning outputs")
        return self._compute_loss(model, inputs)  # never the parent's: that would train another loss

    def _compute_loss(self, model, inputs: Any) -> Tensor:
        logps, entropies, aux_loss = self._token_logps(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        losses, report = self._sample_losses(inputs, logps, entropies)
        reports = [report]
        if "opo_skipped" in inputs:
            unmoved = self.policy_objective.pulls_back or "old_per_token_logps" not in inputs
            reports.append(SampleReport.of_skipped(inputs["opo_skipped"], inputs["opo_mu"].max(), on_policy=unmoved))
        loss = losses.sum()
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss * len(losses)
            self._metrics[self._mode]["aux_loss"].append(self.accelerator.gather(aux_loss.detach()).mean().item())
        if self._mode == "eval":
            self._log_step(reports)  # an optimizer step that a callback interrupts keeps its own
            return loss / len(losses)
        self._reports += reports
        return loss / (self.args.per_device_train_batch_size * self.current_gradient_accumulation_steps)

    def _sample_losses(self, inputs: Any, logps: Tensor, entropies: Tensor) -> tuple[Tensor, SampleReport]:
        """Loss of each sample, `[B]`, from the log-probabilities and entropies of its tokens, `[B, T]`."""
        samples = self._samples(inputs, logps)
        mask, steering = samples.mask, inputs.get("opo_steering", samples.mask)
        loss = self.policy_objective.loss(samples)
        kl = torch.zeros_like(samples.target)
        if self.beta != 0.0:
            corrected = self.args.use_bias_correction_kl
            kl = self.policy_objective.reduce(samples.kl(inputs["ref_per_token_logps"], corrected=corrected), samples)
        # Until a step with a gradient, the log-ratio of an idle sample may be rounding only; Adam would step by it.
        idle = inputs.get("opo_idle", torch.zeros_like(inputs["opo_valid"]))  # an evaluation has no gradient
        still = idle & (inputs["opo_step"] >= self._skipped.moved_at)
        losses = policy_losses = inputs["opo_scale"] * (loss.total(still) + self.beta * kl)
        if self._entropy_bonus_enabled:
            # As in TRL: under adaptive control it acts only while the last step's entropy is low enough.
            rests = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
            losses = policy_losses - (0.0 if rests else self.entropy_coef) * token_mean(entropies, steering)
        return losses, SampleReport.of(
            samples,
            loss,
            kl=kl if self.args.log_ratio_reduction == "sum" else kl * mask.sum(dim=1),
            policy_loss=policy_losses,
            tokens=mask.sum(dim=1),
            entropy=torch.where(mask, entropies, 0.0).sum(dim=1),
            bonus_tokens=steering.sum(dim=1),
            bonus_entropy=torch.where(steering, entropies, 0.0).sum(dim=1),
        )

    def _samples(self, inputs: Mapping[str, Any], logps: Tensor) -> Samples:
        """The samples of a micro-batch as the objective sees them; `logps` are those of their tokens, `[B, T]`."""
        # Without a token that counts, an invalid sample has no log-ratio, no KL term and no entropy bonus.
        mask = completion_tokens(inputs) & inputs["opo_valid"].unsqueeze(1)
        # Where the behaviour policy's are not stored, it is the policy itself.
        anchor = inputs.get("old_per_token_logps", logps.detach())
        weights = torch.ones_like(inputs["opo_target"])
        if "importance_sampling_ratio" in inputs:
            ratio = inputs["importance_sampling_ratio"]  # `[B, 1]` in TRL's modes of sequences, `[B, T]` of tokens
            weights = ratio.squeeze(1) if ratio.shape[1] == 1 else token_mean(ratio, mask)
        if self.off_policy_mask_threshold is not None:
            keep = self.get_off_policy_mask(
                advantages=inputs["advantages"].unsqueeze(1),
                per_token_logps=logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", anchor),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
            weights = weights * keep.squeeze(1)
        return Samples(
            logps=logps,
            anchor_logps=anchor,
            mask=mask,
            target=inputs["opo_target"],
            mu=inputs["opo_mu"],
            weights=torch.where(inputs["opo_valid"], weights, 0.0),
            age=self.state.global_step - inputs["opo_step"],
            reused=self.num_iterations > 1 or self.args.rollouts is not None,
            # Under `top_entropy_quantile`, the other tokens stay in the length but have no ratio.
            steering=inputs.get("opo_steering"),
        )

    # 5. What is logged

    def _log_step(self, reports: list[SampleReport]):
        """Gather the reports of an optimizer step, or evaluated batch, from all processes, once, and log them."""
        mode = self._mode
        samples = SampleReport.gather(reports, self.accelerator)
        metrics = {f"opo/{name}": value for name, value in self._drive_metrics[mode].items()}
        metrics |= metrics_of_samples(
            samples, self.policy_objective, kl=self.beta != 0.0, bonus=self._entropy_bonus_enabled
        )
        if mode == "train" and self._entropy_bonus_enabled:
            if self.use_adaptive_entropy:
                entropy = samples.bonus_entropy.sum() / samples.bonus_tokens.sum().clamp(min=1)
                self._adapt_entropy_coef(entropy.item())
            metrics["entropy_coef"] = self.entropy_coef
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def _adapt_entropy_coef(self, entropy: float):
        """TRL's controller: one step up while entropy is at or below its target, one step down above it."""
        if not math.isfinite(entropy):  # this step will be skipped
            return
        args = self.args
        step = args.entropy_coef_delta if entropy <= args.entropy_target else -args.entropy_coef_delta
        self.entropy_coef = min(max(self.entropy_coef + step, args.entropy_coef_min), args.entropy_coef_max)
        self._last_world_entropy = entropy


def _whole(rows: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Tokens and mask of prompts with their completions, `[B, P + T]` each."""
    ids, mask = ([rows[f"prompt_{name}"], rows[f"completion_{name}"]] for name in ("ids", "mask"))
    return torch.cat(ids, dim=1), torch.cat(mask, dim=1)
