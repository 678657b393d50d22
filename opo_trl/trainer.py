"""
`OPOTrainer`: TRL's `GRPOTrainer` with rollouts that can be reproduced, and a loss that is an [`Objective`].

[`RolloutTrainer`], of `generation/rollouts.py`, has what happens before a completion gets its target: the order of the
prompts, generation, scoring, and evaluations. Log-probabilities of tokens are those of its base class,
[`LogpsTrainer`], of `updates/logps.py`. The sections of this file, after the set-up, follow the rest of a step:

1. A complete rollout (`_rollout`): `_finish_rollout` gives each completion its target.
2. Micro-batches (`training_step`, `_next_micro_batches`): a [`Planner`] cuts the completions of each optimizer step
   (`_micro_batches`). Those that need the behaviour policy's log-probabilities get them here, in the shape of their
   micro-batch. The rollout, too, is made in `training_step`, and not in `_prepare_inputs` as in TRL.
3. The loss (`_compute_loss`): the objective's of each completion (`_sample_losses`), and what TRL's options add. It is
   a plain sum over completions, so that it does not depend on how they are split into micro-batches and processes.
4. The log (`_log_step`, `log`): the completions' reports are gathered and logged under `opo/` (`metrics.step`).
5. The end of a step (`_get_grad_norm`, `_maybe_log_save_evaluate`): a gradient that is not finite skips the step
   (`resume.skipped_steps`), and a spent budget ends the run.
6. A checkpoint (`_save_checkpoint`, `_restore`) holds all that the rest of the run depends on, including the current
   rollout (`resume.checkpoint`).

Overrides pass on keywords that they do not know (`named`): a later release of TRL may have more.
"""

import math
import textwrap
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import send_to_device
from torch import Tensor
from transformers.trainer_callback import DefaultFlowCallback
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id


from . import compatibility  # isort: skip  # noqa: F401  first, as another release may lack names that are imported below
from .batch import Batch, as_batch, completion_tokens, model_inputs
from .checks.text import printable
from .checks.weights import check_trainable
from .config import OPOConfig
from .fields import require
from .generation.rollouts import RolloutTrainer
from .groups import complete_groups, own_samples
from .metrics import unlogged
from .metrics.opo import gradient_response_efficiency, rollout_metrics
from .metrics.step import SampleReport, metrics_of_samples
from .objective import OPO, Groups, Objective, Samples, Targets, token_mean
from .objectives import objective_named
from .resume import checkpoint as checkpoints
from .resume.interrupts import SaveOnInterrupt
from .resume.skipped_steps import SkippedSteps
from .reuse.replay import ReplayBuffer
from .updates import at_rest
from .updates.cutting import spread
from .updates.planner import without_exchange
from .updates.steps import rows_of_steps


logger = get_logger(__name__)


class OPOTrainer(RolloutTrainer):
    r"""
    Trainer for Orthogonalized Policy Optimization, a drop-in replacement of [`~trl.GRPOTrainer`]; `objective` selects
    other published losses, among them TRL's.

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
        model, reward_funcs, train_dataset, eval_dataset, **options:
            As in [`~trl.GRPOTrainer`], those after `eval_dataset` by name.
        args ([`OPOConfig`], *optional*):
            Configuration of the trainer. `None` takes the defaults, with an output folder named after the model.

    Raises:
        `TypeError`: `args` is a configuration of another trainer, or one of `reward_funcs` is not a reward.
        `ValueError`: vLLM would have to generate from a quantized base model, or the dataset has fewer prompts than a
            rollout needs.
        [`RewardError`]: in training, a reward function raises, or does not return one number, or `None`, for each
            completion; or isolated ones fail to score half of a round's completions.
        `RuntimeError`: in training, too many gradients in a row are not finite (`max_skipped_steps`), or a tool or an
            environment exits.
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

    objective_class: type[Objective] | None = None  # of a subclass, in place of `objective`
    policy_objective: Objective

    # The set-up

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: OPOConfig | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
        **options,
    ):
        # Parameters in TRL's order, of which the base class takes these by name
        options |= {
            "processing_class": processing_class,
            "reward_processing_classes": reward_processing_classes,
            "callbacks": callbacks,
            "optimizers": optimizers,
            "quantization_config": quantization_config,
            "peft_config": peft_config,
            "tools": tools,
            "rollout_func": rollout_func,
            "environment_factory": environment_factory,
        }
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, **options)
        self.policy_objective = self._named_objective()
        self._begin()

    def create_model_card(self, *args, **named):
        """
        TRL's model card, `README.md` in `output_dir`. For a base model or an output that has no name on the Hub, TRL
        writes "None": here each is named by its folder.
        """
        super().create_model_card(*args, **named)
        card = Path(self.args.output_dir, "README.md")
        if self.is_world_process_zero():
            base = Path(get_config_model_id(self.model.config)).name
            text = card.read_text(encoding="utf-8").replace("[None](https://huggingface.co/None)", f"`{base}`")
            output = Path(self.args.output_dir).name
            card.write_text(text.replace('model="None"', f'model="{output}"'), encoding="utf-8")

    def _named_objective(self) -> Objective:
        """
        The objective: a subclass of this trainer sets its class (`objective_class`), otherwise the field `objective`
        names it. If the field names another one than OPO, the model card has that name, and not OPO's paper. A
        `ValueError` if the field names another one than OPO, which the subclass's is not derived from.
        """
        name = self.args.objective
        named = objective_named(name)
        own = self.objective_class
        if own:
            allowed = f"'opo', its default: {type(self).__name__} trains its own `objective_class`, {own.__name__}"
            require(name == "opo" or issubclass(own, named), "objective", name, allowed)
        elif not issubclass(named, OPO):
            self._name = named.__name__
            self._paper = {}
        return (own or named)(self.args)

    def _begin(self, resumed: Mapping[str, Any] | None = None) -> None:
        """
        Be at the start of a run, whatever an earlier call of `train` has left. Of `resumed`, a checkpoint's state, the
        base class reads the place in the data. `_load_state` restores the rest, after what Transformers loads.
        """
        super()._begin(resumed)
        args = self.args
        self._step = 0  # calls of `training_step` so far, also by the run that is resumed
        # Call of `training_step` with which the accumulation window (an optimizer step) began; `None`: none has yet
        self._window_start: int | None = None
        self._loss_before_window = torch.zeros(())  # of the steps since the last log entry, when the window began
        # Micro-batches of each call of `training_step` in the current pass
        self._cut_pass: list[list[Batch]] | None = None
        process = self.accelerator.process_index
        self._replay = ReplayBuffer(args.max_staleness, self.num_generations, seed=args.seed, process=process)
        self._skipped = SkippedSteps(args, self.accelerator, self.optimizer)
        self._current_train_step_time = 0.0  # TRL's: seconds of the current optimizer step so far
        for of_earlier_run in (self._metrics["train"], self._pending_metrics, self._pending_extra_logs):
            of_earlier_run.clear()
        self._advantages: Tensor | None = None  # those of the current rollout, over all processes; NaN where invalid
        self._advantage_range = 0.0  # highest advantage of the current rollout less the lowest
        self._target_metrics: dict[str, dict[str, float]] = {"train": {}, "eval": {}}  # of the current rollout
        self._reports: list[SampleReport] = []  # of the current optimizer step, one per micro-batch
        # Whether the policy, as it was when the current rollout was made, has sampled all its completions
        self._policy_is_behaviour = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """
        Train, from the beginning or from a checkpoint: its folder, `"last"` or `"auto"`; see
        [`resume.checkpoint.resolve`].

        A run ends after `max_steps` or `num_train_epochs`, by a callback, or:

        - with `max_completions`: `OPOTrainer.set_initial_training_values`, and `_end_if_budget_is_spent`;
        - by Ctrl-C: `resume/interrupts.py`, `SaveOnInterrupt.on_save`; another signal of `opo-trl train`:
          `command/signals.py`;
        - after too many skipped steps: `resume/skipped_steps.py`, `SkippedSteps.end_of_step`;
        - by a reward that raises: `rewards/checked.py`, `checked_reward`; or rewards that fail to score half of a
          round: `generation/failures.py`, `RewardFailures.add`;
        - by a tool or an environment that exits: `RolloutTrainer._generated_by_trl`;
        - with a vLLM server that no longer answers: `generation/vllm_server.py`, `watched`;
        - by a check of the first rollout and step, with untested releases: `generation/first_step.py`,
          `FirstStep._report`.

        Raises:
            `ValueError`: the checkpoint is not complete, or of a run with other settings; or no weight would be
                trained.
            `KeyboardInterrupt`: Ctrl-C, when a checkpoint has been saved after the optimizer step.
        """
        check_trainable(self.model, self.optimizer)
        folder = checkpoints.resolve(resume_from_checkpoint, self.args.output_dir)
        state = None if folder is None else checkpoints.check_resumable(self, folder)
        self._begin(state)
        self._settings = self.current_settings  # for checkpoints; before a callback changes them
        if self.accelerator.is_main_process:
            # Not in a callback: DeepSpeed and FSDP allocate before the first one, and may run out of memory.
            print(printable(self.plan), flush=True)
            del self.plan  # it is cached, and another call of `train` may have other arguments
        with SaveOnInterrupt(self):
            return super().train(folder, *args, **kwargs)

    @cached_property
    def _optimizer_class(self) -> type:
        """Class of the optimizer that was given to this trainer, or that it makes."""
        if self.optimizer is not None:  # asked first when training starts, before Accelerate wraps it
            return type(self.optimizer)
        return self.get_optimizer_cls_and_kwargs(self.args, self.model)[0]

    @cached_property
    def plan(self) -> str:
        """The plan, printed when training starts."""
        from .forecast.plan import training_plan  # needed once, and not to import a trainer

        return f"{self._name} training plan\n{training_plan(self)}"

    def set_initial_training_values(self, args, dataloader, **named):
        """
        Transformers' counts for a run, the last of which is its number of optimizer steps: at most so many that
        `max_completions` are generated and trained on.
        """
        *values, max_steps = super().set_initial_training_values(args, dataloader, **named)
        steps_per_rollout = args.optimizer_steps_per_rollout
        # Where an optimizer step may span rollouts, an epoch's last one is shorter, and their number is not known:
        # `_end_if_budget_is_spent` ends such a run.
        if args.max_completions is not None and steps_per_rollout.is_integer():
            n_rollouts = math.ceil(args.max_completions / args.generation_batch_size)
            max_steps = min(max_steps, n_rollouts * int(steps_per_rollout))
        return *values, max_steps

    # 1. A rollout

    def _rollout(self, generation_batch: list[dict[str, Any]]) -> Batch:
        """A complete rollout, on the device also where an override has left something on the host."""
        rollout = self._generate_and_score_completions(generation_batch)
        return send_to_device(self._finish_rollout(rollout), self.accelerator.device)

    def _finish_rollout(self, rollout: Batch) -> Batch:
        """
        Add what is computed from a rollout, once no override of `_generate_and_score_completions` can change it:
        targets (`_targets`), the behaviour policy's log-probabilities if several passes train on the rollout, whether
        the policy itself has sampled each completion (`opo_own`), and after which optimizer step (`opo_step`).
        """
        # TRL's log-probabilities are good enough for escort weights, but in bfloat16 not for a log-ratio in
        # micro-batches of another shape.
        logps_of_trl = rollout.pop("opo_logps", None)
        by_policy = self._sampled_by_policy(rollout)
        self._policy_is_behaviour = "old_per_token_logps" not in rollout
        # By the behaviour policy, `[B, T]`; `None`: neither the objective nor a later pass has needed them so far
        logps = rollout.get("old_per_token_logps", logps_of_trl)
        policy_logps = partial(self._policy_logps, rollout, batch_size=self.args.per_device_train_batch_size)
        entropies = None
        if (self.policy_objective.reads_logps and logps is None) or self.top_entropy_quantile < 1.0:
            current, entropies = policy_logps()
            logps = current if logps is None or self._policy_is_behaviour else logps
        has_later_passes = self._mode == "train" and self.num_iterations > 1 and not self.args.is_on_policy
        if has_later_passes and "old_per_token_logps" not in rollout:
            # With a single pass, each micro-batch gets them in its own shape. Each of several passes has other
            # micro-batches, so there is no shape in which a log-ratio would be free of rounding.
            rollout["old_per_token_logps"] = policy_logps()[0] if logps is None else logps
        rollout.update(self._targets(rollout, logps))
        rollout["opo_own"] = by_policy
        # Recorded completions of another policy are at least one step old.
        rollout["opo_step"] = self._sampled_at() - (~by_policy & self._replays_recorded).float()
        if self.top_entropy_quantile < 1.0:
            # TRL computes the threshold per micro-batch; the rollout's does not depend on how it is cut.
            mask = completion_tokens(rollout) & rollout["opo_valid"].unsqueeze(1)
            rollout["opo_steering"] = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        return rollout

    def _sampled_by_policy(self, rollout: Batch) -> Tensor:
        """
        Completions, bool `[B]`, that the policy as it is now has sampled. `old_per_token_logps` may be of another
        behaviour policy: of a record, of a rollout that was generated in advance, or of an override. Until a step has
        moved the policy, those of the first two are compared with its own, and replaced (`_recognize_policy`).
        """
        sampled_elsewhere = self._replays_recorded or (self.args.prefetch_rollouts and self._mode == "train")
        if sampled_elsewhere and not self._skipped.moved_at:
            return self._recognize_policy(rollout)
        return torch.full_like(rollout["advantages"], "old_per_token_logps" not in rollout, dtype=torch.bool)

    def _targets(self, rollout: Batch, logps: Tensor | None) -> Batch:
        """
        Compute the targets of the complete rollout, over all processes. Returns the entries that the loss of this
        process's completions needs, `[B]` each. `logps`, `[B, T]`, are those of their tokens under the behaviour
        policy; `None` if the objective reads none.
        """
        vocab_size = self.model.config.get_text_config().vocab_size if self.policy_objective.reads_logps else 0
        groups, lengths = complete_groups(
            rollout,
            logps,
            self.accelerator,
            num_generations=self._group_size,
            reward_weights=self.reward_weights,
            vocab_size=vocab_size,
        )
        targets = self.policy_objective.targets(groups)
        self._note_targets(targets, groups)
        columns = {
            "opo_target": targets.target,
            "opo_valid": groups.valid,
            "opo_mu": targets.mu,
            "opo_scale": self.policy_objective.scale(lengths, groups.valid),
        }
        expanded = {name: column.expand_as(targets.target) for name, column in columns.items()}
        local = own_samples(rollout, expanded, self.accelerator)
        return as_batch({**local, "opo_valid": local["opo_valid"].bool()})  # `own_samples` has made float32 of it

    def _note_targets(self, targets: Targets, groups: Groups) -> None:
        """
        Keep what the log says of a rollout's targets; in training also its advantages. Warn if all targets are 0 in
        the first rollout of a run.
        """
        metrics = rollout_metrics(targets, groups)
        self._target_metrics[self._mode] = {name: value.item() for name, value in metrics.items()}
        if self._mode == "eval":
            return
        if self.state.global_step == 0 and not targets.target.any():
            # A question about prompts does not fit recorded rewards, of which a warning on loading says why.
            question = "Do prompts ask for what the reward reads, such as an answer in \\boxed{}? "
            logger.warning_once(
                "The rewards of all groups are equal, so no completion has a learning signal in the first rollout. "
                f"{'' if self._replays_recorded else question}Try easier problems, or larger groups."
            )
        advantages = groups.advantages
        self._advantages = advantages.where(groups.valid, torch.nan)
        self._advantage_range = (advantages.max().float() - advantages.min().float()).item()

    # 2. Micro-batches

    def get_batch_samples(self, epoch_iterator, num_batches, device, **named):
        """
        As in Transformers, which calls it at the beginning of each accumulation window (optimizer step). Its first
        call of `training_step` then notes where it begins: an epoch ends with a short window, so the number of calls
        alone cannot tell windows apart.
        """
        self._window_start = None  # not yet `_step`, which a resumed run restores after its first window is drawn
        return super().get_batch_samples(epoch_iterator, num_batches, device, **named)

    def _next_micro_batches(self, generation_batch: list[dict[str, Any]]) -> list[Batch]:
        """Micro-batches of this call of `training_step`; when the rollout is used up, a new one is generated."""
        args = self.args
        if self._window_start is None:  # the first call of an optimizer step
            self._window_start = self._step
            self._loss_before_window = self._tr_loss.clone()
        # Calls of `training_step`, including this one, until the policy moves
        until_update = self._window_start + self.current_gradient_accumulation_steps - self._step
        # Number of the rollout in the run, and calls of `training_step` that have used it
        index, n_past_calls = divmod(self._step, args.micro_steps_per_rollout)
        if n_past_calls == 0:
            self._note_drawn_prompts()
            rollout = self._rollout(generation_batch)
            # TRL's shuffle, drawn only to advance the random state, so that the same seed samples as in GRPOTrainer.
            torch.randperm(len(rollout["advantages"]))
            self._replay.add(rollout, self._advantages)
        # Passes over the rollout so far, and calls in the current one
        passed, call_of_pass = divmod(n_past_calls, args.steps_per_generation)
        if call_of_pass == 0:
            rows = self._rows_of_pass(index, passed)
            if passed + 1 == args.num_iterations and not args.max_staleness:
                self._replay.clear()  # what no pass draws from should not take memory, least of all images
            steps = rows_of_steps(rows, args, self.accelerator, index=index, passed=passed)
            has_moved = passed > 0 and "old_per_token_logps" in rows  # since these log-probabilities
            # For each call of `training_step` in this pass, its micro-batches
            self._cut_pass = self._micro_batches(steps, 0 if has_moved else until_update)
        return self._cut_pass[call_of_pass]

    def _rows_of_pass(self, index: int, passed: int) -> Batch:
        """
        This process's completions of one more pass over the run's rollout number `index`, which has had `passed`
        passes. An objective may scale its loss by all completions of the pass (`scales_by_pass`): where they come from
        several rollouts, that factor is computed here.
        """
        rows = self._replay.rows_of_pass(index, passed)
        if passed and self.args.max_staleness and self.policy_objective.scales_by_pass:
            lengths = self.accelerator.gather(completion_tokens(rows).sum(dim=1)).double()
            scale = self.policy_objective.scale(lengths, torch.ones_like(lengths, dtype=torch.bool))
            rows = {**rows, "opo_scale": torch.full_like(rows["opo_scale"], scale.item())}
        return rows

    @property
    def _loss_is_a_sum(self) -> bool:
        """Whether the loss is this class's, and none of a subclass, which may be a mean over a micro-batch."""
        losses = type(self).compute_loss, type(self)._compute_loss
        return losses == (GRPOTrainer.compute_loss, OPOTrainer._compute_loss)

    def _micro_batches(self, steps: list[Batch], until_update: int) -> list[list[Batch]]:
        """
        For each call of `training_step` in a pass over a rollout, the micro-batches that it computes, in their order.

        `steps` are this process's completions of each optimizer step of the pass. `until_update` is the number of
        calls of `training_step` before the policy moves, from the first call of the pass on; 0 if it has moved.
        """
        self._check_padding(*model_inputs(steps[0]))
        # `_any_width`: whether log-probabilities are the same on a padded completion.
        self._first_step_checks.check_logps(steps[0], self._logps_of_trl, is_padded=bool(self._any_width))
        n_calls = self.args.steps_per_generation // len(steps)  # calls of `training_step` in an optimizer step
        # An optimizer step is on-policy if the policy does not move before its last call.
        on_policy = [(number + 1) * n_calls <= until_update for number in range(len(steps))]
        at_rest.mark(steps, self.policy_objective)
        for rows, is_on_policy in zip(steps, on_policy, strict=True):
            if is_on_policy and self._policy_is_behaviour:  # the log-ratio of an on-policy step is exactly 0
                rows.pop("old_per_token_logps", None)
        left_out = (self._left_out(*step) for step in zip(steps, on_policy, strict=True))
        cuts = self.planner.micro_batches(steps, left_out)
        batches_of_calls = []
        for rows, is_on_policy, cut in zip(steps, on_policy, cuts, strict=True):
            if not is_on_policy and "old_per_token_logps" not in rows:
                self._fill_in_behaviour_logps(cut)
            if self.beta != 0.0 and not self._skipped.moved_at:  # no step has moved the policy from its reference yet
                self._fill_in_reference_logps(cut)
            # The last call of an optimizer step gets at least one micro-batch: in its backward pass processes exchange
            # gradients.
            batches_of_calls += spread(cut, n_calls)
        return batches_of_calls

    def _fill_in_behaviour_logps(self, micro_batches: list[Batch]) -> None:
        """
        Compute the behaviour policy's log-probabilities, for an optimizer step before which the policy moves.

        It is done while the policy is still the behaviour policy. In bfloat16 a completion has the same
        log-probabilities only in a micro-batch of the same shape: another would leave a log-ratio that is only
        rounding.
        """
        for micro_batch in micro_batches:
            micro_batch["old_per_token_logps"], _ = self._policy_logps(micro_batch)

    def _fill_in_reference_logps(self, micro_batches: list[Batch]) -> None:
        """
        Replace TRL's log-probabilities of the reference, while the policy is still the reference.

        Computed in the shape of a micro-batch, they are equal to the policy's, so that the KL term is exactly 0. TRL
        has computed them in another shape, in which they differ by rounding.
        """
        for micro_batch in micro_batches:
            logps_of_trl = micro_batch["ref_per_token_logps"]
            micro_batch["ref_per_token_logps"] = self._reference_logps(micro_batch)
            self._first_step_checks.check_reference(logps_of_trl, micro_batch)

    def _cut_anew(self, steps: list[Batch]) -> list[list[Batch]]:
        """
        For each call of `training_step` in a pass, its micro-batches, if a run with other processes or micro-batches
        has saved a checkpoint inside the pass. `steps` are this process's completions of the optimizer steps that
        remain. The calls before them, which that run has made, get none.
        """
        self._check_padding(*model_inputs(steps[0]))
        n_calls = len(steps[0]["opo_filler"]) // self.args.per_device_train_batch_size
        batches_of_calls: list[list[Batch]] = []
        for cut in self.planner.micro_batches(steps, (rows["opo_filler"] for rows in steps)):
            batches_of_calls += spread(cut, n_calls)
        n_past = self.args.steps_per_generation - len(batches_of_calls)
        return [[]] * n_past + batches_of_calls

    def _left_out(self, rows: Batch, on_policy: bool) -> Tensor:
        """
        Completions, bool `[B]`, that a step leaves out, as neither the objective nor TRL's options give them a
        gradient: wherever the policy is, or in an `on_policy` step, before which the policy does not move.
        """
        # Terms of the loss that may have a gradient where the objective's is 0
        has_other_terms = self.beta != 0.0 or self.args.entropy_coef or self.aux_loss_enabled
        if has_other_terms or not self.args.skip_inert_rows:
            return torch.zeros_like(rows["opo_at_rest"])
        return at_rest.left_out(rows, self.policy_objective, on_policy=on_policy)

    def training_step(self, model, inputs, num_items_in_batch=None, **named):
        """
        Train on the micro-batches of this call: of each, one call of `compute_loss` and one backward pass. Returns the
        sum of their losses. After the last call of an optimizer step, its metrics are logged.
        """
        began = time.perf_counter()
        model.train()  # so that a rollout is made for training
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers: generate with the weights that are trained
        micro_batches = self._next_micro_batches(inputs)
        loss = torch.zeros((), device=self.accelerator.device)
        with without_exchange(self, model):
            for micro_batch in micro_batches[:-1]:
                # Transformers' step: TRL's also counts its calls, in `_step`, of which all micro-batches are one.
                loss += super(GRPOTrainer, self).training_step(model, micro_batch, num_items_in_batch, **named)
        self._current_train_step_time += time.perf_counter() - began
        if micro_batches:
            loss += super().training_step(model, micro_batches[-1], num_items_in_batch, **named)
        else:  # all completions of the optimizer step are in its other calls
            self._step += 1  # as TRL's step would
        if self.accelerator.sync_gradients and self._reports:  # none if a subclass has its own loss
            self._log_step(self._reports)
            self._reports = []
        if self.accelerator.sync_gradients and self.num_iterations > 1:
            # Of each call in this optimizer step, the pass that it was in, counted from 1
            calls = np.arange(self._window_start, self._step)
            passes = calls % self.args.micro_steps_per_rollout // self.args.steps_per_generation + 1
            self._append("train", "opo/pass", float(passes.mean()))
        return loss

    def _prepare_inputs(self, inputs, **_):
        """What `compute_loss` gets: in training a micro-batch as it is, in an evaluation a rollout of its prompts."""
        return inputs if self._mode == "train" else self._rollout(inputs)

    # 3. The loss

    def _compute_loss(self, model, inputs: Batch, **_) -> Tensor:
        """
        Loss of a micro-batch: the sum of the losses of its completions, divided by the number of all completions of
        this process in the optimizer step. In an evaluation, the mean of the losses.
        """
        logps, entropies, aux_loss = self._token_logps(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        losses, report = self._sample_losses(inputs, logps, entropies)
        reports = report.with_left_out(inputs)  # also of completions that the step does not compute
        loss = losses.sum()
        if self.aux_loss_enabled:
            # A mean over the tokens of the micro-batch, while the loss is a sum over its completions
            loss = loss + self.router_aux_loss_coef * aux_loss * len(losses)
            aux_losses = self.accelerator.gather(aux_loss.detach())
            self._metrics[self._mode]["aux_loss"].append(aux_losses.mean().item())
        if self._mode == "eval":
            self._log_step(reports)  # an optimizer step that a callback interrupts keeps its own
            return loss / len(losses)
        self._reports += reports
        loss = loss / (self.args.per_device_train_batch_size * self.current_gradient_accumulation_steps)
        if self._loss_is_a_sum:
            self._first_step_checks.note_backward(loss)
        return loss

    def _sample_losses(self, inputs: Batch, logps: Tensor, entropies: Tensor) -> tuple[Tensor, SampleReport]:
        """Loss of each completion, `[B]`, from the log-probabilities and entropies of its tokens, `[B, T]`."""
        samples = self._samples(inputs, logps)
        mask = samples.mask
        loss = self.policy_objective.loss(samples)
        kl = torch.zeros_like(samples.target)
        if self.beta != 0.0:
            reference_logps = inputs["ref_per_token_logps"]
            kl = self.policy_objective.kl(reference_logps, samples, corrected=self.args.use_bias_correction_kl)
        # A completion at rest has no gradient. While no step has moved the policy since it was sampled, its log-ratio
        # is only rounding, and Adam would make a full step of that; so `total` leaves it out.
        is_at_rest = inputs.get("opo_at_rest", torch.zeros_like(inputs["opo_valid"]))  # an evaluation has no such key
        # `opo_step` is the optimizer step after which the completion was sampled, `moved_at` the last that may have
        # moved the policy.
        rests_now = is_at_rest & (inputs["opo_step"] >= self._skipped.moved_at)
        kl_losses = self.beta * self.policy_objective.reduce(kl, samples)
        policy_losses = inputs["opo_scale"] * (loss.total(rests_now) + kl_losses)
        losses = policy_losses
        if self.args.entropy_coef:
            mask_of_bonus = inputs.get("opo_steering", mask)  # of high entropy, under `top_entropy_quantile`
            losses = policy_losses - self.args.entropy_coef * token_mean(entropies, mask_of_bonus)
        report = SampleReport.of(
            samples,
            loss,
            kl=kl,
            policy_loss=policy_losses,
            tokens=mask.sum(dim=1),
            entropy=torch.where(mask, entropies, 0.0).sum(dim=1),
        )
        return losses, report

    def _samples(self, inputs: Batch, logps: Tensor) -> Samples:
        """The completions of a micro-batch as the objective sees them; `logps` are those of their tokens, `[B, T]`."""
        # Without a token that counts, an invalid completion has no log-ratio, no KL term and no entropy bonus.
        mask = completion_tokens(inputs) & inputs["opo_valid"].unsqueeze(1)
        # Where the behaviour policy's are not stored, it is the policy itself.
        behaviour_logps = inputs.get("old_per_token_logps", logps.detach())
        weights = self._sampling_weights(inputs, logps, behaviour_logps, mask)
        is_by_another = self.args.rollouts is not None or bool(self.args.prefetch_rollouts)
        reused = self.num_iterations > 1 or is_by_another
        return Samples(
            logps=logps,
            anchor_logps=behaviour_logps,
            mask=mask,
            target=inputs["opo_target"],
            mu=inputs["opo_mu"],
            weights=weights,
            sampler_ratios=inputs.get("importance_sampling_ratio"),
            age=self.state.global_step - inputs["opo_step"],
            reused=reused,
            # Under `top_entropy_quantile`, the other tokens stay in the length but have no ratio.
            steering=inputs.get("opo_steering"),
        )

    def _sampling_weights(self, inputs: Batch, logps: Tensor, behaviour_logps: Tensor, mask: Tensor) -> Tensor:
        """
        Weights of completions by how they were sampled, `[B]`: the policy's probability over vLLM's (of tokens, their
        mean), times TRL's off-policy mask (0 or 1); 0 for an invalid completion. Log-probabilities and mask are those
        of tokens, `[B, T]`.
        """
        weights = torch.ones_like(inputs["opo_target"])
        if "importance_sampling_ratio" in inputs:
            ratio = inputs["importance_sampling_ratio"]  # `[B, 1]` in TRL's modes of sequences, `[B, T]` of tokens
            weights = ratio.squeeze(1) if ratio.shape[1] == 1 else token_mean(ratio, mask)
        if self.off_policy_mask_threshold is not None:
            keep = self.get_off_policy_mask(  # 1 or 0 for each completion, `[B, 1]`
                advantages=inputs["advantages"].unsqueeze(1),
                per_token_logps=logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", behaviour_logps),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
            weights = weights * keep.squeeze(1)
        return torch.where(inputs["opo_valid"], weights, 0.0)

    # 4. The log

    def _log_step(self, reports: list[SampleReport]):
        """Gather the reports of an optimizer step, or evaluated batch, from all processes, once, and log them."""
        mode = self._mode  # `"train"` or `"eval"`
        samples = SampleReport.gather(reports, self.accelerator)
        # Those of the current rollout's targets, and those of its completions in this step
        metrics = {f"opo/{name}": value for name, value in self._target_metrics[mode].items()}
        metrics |= metrics_of_samples(
            samples, self.policy_objective, kl=self.beta != 0.0, bonus=self.args.entropy_coef != 0.0
        )
        if self.args.entropy_coef and mode == "train":
            metrics["entropy_coef"] = self.args.entropy_coef  # constant; TRL logs it
        for name, value in metrics.items():
            self._append(mode, name, value)

    def _append(self, mode: str, name: str, value: float) -> None:
        if not (name.startswith("opo/") and math.isnan(value)):  # TRL would log None
            self._metrics[mode][name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None, **named) -> None:
        """As in TRL; an entry of training steps (`grad_norm`) also gets times, and counts of failures and skips."""
        if "grad_norm" in logs:
            metrics = self._metrics["train"]
            for phase, seconds in self._clock.seconds_per_step().items():
                metrics[f"opo/time/{phase}"].append(seconds)
            # The range is the highest advantage of the current rollout less the lowest.
            efficiency = gradient_response_efficiency(logs["grad_norm"], self._advantage_range)
            self._append("train", "opo/gradient_response_efficiency", efficiency)
            for kind, count in self._reward_failures.take().items():
                metrics[kind].append(count)
            metrics["opo/skipped_steps"].append(self._skipped.total)
        super().log(logs, start_time, **named)

    # 5. The end of a step

    @property
    def rollout_is_used_up(self) -> bool:
        """Whether the next optimizer step needs a new rollout."""
        return checkpoints.needs_rollout(self.args, self._step)

    def _get_grad_norm(self, model, grad_norm=None, **named):
        """
        Norm of the gradient of an optimizer step, for the log; a gradient that is not finite is dropped, and its norm
        is NaN. Before, with untested releases, the backward passes of the run's first step are checked.
        """
        if self._window_start is not None:  # `_step` counts calls of `training_step`
            self._check_first_step(self._step - self._window_start)
        norm = super()._get_grad_norm(model, grad_norm, **named)
        return self._skipped.check(model, self.optimizer, norm, step=self.state.global_step + 1)

    def _maybe_log_save_evaluate(self, *args, **named):
        if not self.accelerator.sync_gradients:  # the end of an epoch, inside an optimizer step
            self._drop_unfinished_step()
        self._end_if_budget_is_spent()
        with self._skipped.end_of_step(self):
            super()._maybe_log_save_evaluate(*args, **named)

    def _drop_unfinished_step(self) -> None:
        """
        Drop the gradient and the loss of an optimizer step inside which an epoch ends, by a stream of data or by a
        callback: it is not taken, and Transformers would add them to those of the next step. DeepSpeed keeps the
        gradient in buffers of its own, of which a warning says that it is not dropped.
        """
        if self.is_deepspeed_enabled:
            logger.warning(
                "The data ends inside an optimizer step, whose gradient DeepSpeed adds to that of the next step. "
                f"Provide a multiple of gradient_accumulation_steps={self.args.gradient_accumulation_steps}, or "
                "train with DDP or FSDP."
            )
        self.model.zero_grad()
        self._tr_loss.copy_(self._loss_before_window)  # in place: what is logged next is this tensor
        self._reports = []
        self.accelerator.gradient_state._set_sync_gradients(True)  # nothing is pending

    def _end_if_budget_is_spent(self) -> None:
        """After an optimizer step, end the run if it has generated `max_completions` and trained on all of them."""
        limit = self.args.max_completions
        is_spent = limit is not None and self.rollout_is_used_up and self.completions_generated >= limit
        if not is_spent:
            return
        self.control.should_log = True
        # `max_steps` has ended the run, unless dynamic sampling generates more. Transformers calls this again at the
        # epoch's end: by then the stop is set and the checkpoint written.
        if self.control.should_training_stop:
            return
        # End the run here. Transformers' own callback notes in `control` what to save and evaluate after a last step,
        # so it is shown a state in which this step is the last.
        last = replace(self.state, max_steps=self.state.global_step)
        DefaultFlowCallback().on_step_end(self.args, last, self.control)

    # 6. A checkpoint: saving and loading, in the order of Transformers

    def _save_checkpoint(self, model, trial, **named):
        with checkpoints.saving(self, Path(self._get_output_dir(trial))):
            super()._save_checkpoint(model, trial, **named)

    def _save_rng_state(self, output_dir: str, **named):
        """Write the random states, the last that each process writes, and this process's own state beside them."""
        super()._save_rng_state(output_dir, **named)
        folder = Path(output_dir)
        checkpoints.save_state(folder, self.accelerator.process_index, self._state())
        if self.args.sync_ref_model:
            checkpoints.MovingReference(self).save(folder)
        self.accelerator.wait_for_everyone()  # what is written after this says that the checkpoint is complete

    def _load_rng_state(self, checkpoint: str | None, **named):
        super()._load_rng_state(checkpoint, **named)  # the last thing that Transformers loads
        if checkpoint is not None:
            self._restore(Path(checkpoint))  # everything else is restored here

    @torch.no_grad()
    def _restore(self, folder: Path) -> None:
        """Go on from the state in a checkpoint's folder, also if this run divides it among other processes."""
        process = self.accelerator.process_index
        state = checkpoints.load_state(folder, process)
        saved = state["settings"]
        current = self.current_settings
        changes = checkpoints.changes_of_cut(saved, current)
        if changes:
            self.accelerator.print(f"Resuming with {', '.join(changes)}.")
            state = checkpoints.divided_state(folder, current, process)
            if state["micro_batches"] is not None:  # of the pass inside which the checkpoint was saved
                state["micro_batches"] = self._cut_anew(
                    send_to_device(state["micro_batches"], self.accelerator.device)
                )
        if saved["processes"] != current["processes"]:  # the random states in the checkpoint are not of this process
            checkpoints.draw_random_state(self.args.seed, self.state.global_step, process)
        self._load_state(state)
        if self.args.sync_ref_model:
            checkpoints.MovingReference(self).load(folder)

    @property
    def current_settings(self) -> dict[str, Any]:
        """Settings that determine the rest of a run, for a checkpoint to compare."""
        # Recorded rollouts as they were loaded: what is added depends on the number of processes, up to rounding.
        data = self.train_dataset if self._recorded is None else self._recorded.dataset
        return checkpoints.settings_of(self, name=self._name, optimizer=self._optimizer_class, data=data)

    def _state(self) -> dict[str, Any]:
        """What this process needs to resume exactly, besides weights, optimizer, schedule and random states."""
        # Number of the rollout in the run, and calls of `training_step` that have used it
        rollout, position = divmod(self._step, self.args.micro_steps_per_rollout)
        is_inside_pass = position % self.args.steps_per_generation > 0
        # Later passes are cut from the rollouts; the current one has been cut.
        draws_from_rollouts = self.args.num_iterations > 1 and (self.args.max_staleness > 0 or position > 0)
        return {
            "settings": self._settings,
            "rollout": rollout,
            "position": position,
            **super()._state(),
            "replay": self._replay.state_dict() if draws_from_rollouts else {},
            "micro_batches": self._cut_pass if is_inside_pass else None,
            "advantage_range": self._advantage_range,
            "target_metrics": self._target_metrics,
            "skipped_steps": self._skipped.state_dict(),
            "pending_loss": self._tr_loss,  # of the steps since the last log entry
            "log": {
                "last_step": self._globalstep_last_logged,
                **unlogged.state_of(self._metrics, self._logs if self.log_completions else {}),
            },
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `_state`: also with the log, as if the run had not ended."""
        super()._load_state(state)
        device = self.accelerator.device
        self._step = state["rollout"] * self.args.micro_steps_per_rollout + state["position"]
        self._cut_pass = send_to_device(state["micro_batches"], device)
        self._replay.load_state_dict(send_to_device(state["replay"], device))
        self._advantage_range = state["advantage_range"]
        self._target_metrics = state["target_metrics"]
        self._skipped.load_state_dict(state["skipped_steps"])
        # The steps since the last log entry count in the next entry, but not in this call's mean loss.
        self._tr_loss = state["pending_loss"].to(self.args.device)
        self._total_loss_scalar = -self._tr_loss.item()
        self._globalstep_last_logged = state["log"]["last_step"]
        unlogged.load(state["log"], self._metrics, self._logs)

    def _load_best_model(self, **named):
        super()._load_best_model(**named)
        self._last_loaded_step = -1  # vLLM has the last weights
