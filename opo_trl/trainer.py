"""
`OPOTrainer`: TRL's `GRPOTrainer` with rollouts that can be reproduced, and a loss that is an [`Objective`].

The sections of this file, after the set-up, follow a step:

1. The order of the prompts (`_run_epoch`): it, and the optimizer step that a completion serves, are functions of the
   seed (`generation.prompt_order`, `updates.steps`).
2. A rollout (`_rollout`): TRL generates and scores (`_generate_once`); dynamic sampling replaces zero-variance groups;
   `_finish_rollout` gives each completion its target. TRL's computation of the behaviour policy's log-probabilities
   is left out. Log-probabilities have a section of their own (`_token_logps`).
3. Micro-batches (`training_step`, `_next_micro_batches`): a [`Planner`] cuts the completions of each optimizer step
   (`_micro_batches`). Those that need the behaviour policy's log-probabilities get them here, in the shape of their
   micro-batch. The rollout, too, is made in `training_step`, and not in `_prepare_inputs` as in TRL.
4. The loss (`_compute_loss`): the objective's of each completion (`_sample_losses`), and what TRL's options add. It is
   a plain sum over completions, so that it does not depend on how they are split into micro-batches and processes.
5. The log (`_log_step`, `log`): the completions' reports are gathered and logged under `opo/` (`metrics.step`).
6. The end of a step (`_get_grad_norm`, `_maybe_log_save_evaluate`): a gradient that is not finite skips the step
   (`resume.skipped_steps`), and a spent budget ends the run.
7. A checkpoint (`_save_checkpoint`, `_restore`) holds all that the rest of the run depends on, including the current
   rollout (`resume.checkpoint`).

Overrides pass on keywords that they do not know (`named`): a later release of TRL may have more.
"""

import math
import textwrap
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, chdir, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, send_to_device
from datasets import Dataset
from torch import Tensor
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import has_length
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import grpo_trainer
from trl.trainer.utils import get_config_model_id, use_adapter


# First, because it checks versions: another release may lack names that are imported below.
from .trl import check_replaced, temporarily, untested  # isort: skip
from .batch import Batch, as_batch, carried, completion_tokens, image_entries, model_inputs
from .checks.processes import check_processes
from .checks.text import printable
from .checks.weights import check_models, check_trainable
from .config import OPOConfig
from .data import prompt_ids
from .generation import sampling
from .generation.dynamic_sampling import DynamicSampling
from .generation.failures import RewardFailures, RewardRecorder
from .generation.first_step import NO_CHECKS, FirstStep
from .generation.prefetch import Prefetch
from .generation.prompt_order import EpochSampler, Place, PromptStream, check_enough_prompts
from .groups import equal_rewards, gather_samples, own_samples
from .metrics.opo import gradient_response_efficiency, rollout_metrics
from .metrics.step import SampleReport, metrics_of_samples
from .metrics.step_clock import StepClock
from .models import adapter, reference
from .models.frozen_base import FrozenBase
from .objective import OPO, Groups, Objective, Samples, Targets, token_mean
from .objectives import objective_named
from .resume import checkpoint as checkpoints
from .resume.interrupts import SaveOnInterrupt
from .resume.skipped_steps import SkippedSteps
from .reuse.conversations import tokenizer_of
from .reuse.replay import ReplayBuffer
from .rewards.actions import ActionReader, reads_actions, with_tokenizer
from .rewards.checked import checked
from .updates import padding, shared_prompts
from .updates.cutting import spread
from .updates.planner import Planner, without_exchange
from .updates.steps import rows_of_steps


logger = get_logger(__name__)


class OPOTrainer(GRPOTrainer):
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
        model, reward_funcs, train_dataset, eval_dataset, processing_class, callbacks, peft_config, **options:
            As in [`~trl.GRPOTrainer`], which says what all of them are.
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
    config_class: type[OPOConfig] = OPOConfig
    args: OPOConfig
    model: Any  # a PreTrainedModel, or PEFT's wrapper around one
    policy_objective: Objective

    _recorded: Any = None  # rollouts that are trained on in place of own ones, or a record of these
    _prefetch: Prefetch | None = None  # of the main process, with `prefetch_rollouts`
    _prompts_of_rows: prompt_ids.PromptsOfRows | None = None  # in a round of generation whose rows bring their tokens
    _any_width: bool | None = None  # whether log-probabilities do not depend on padding; `None`: none computed yet
    _evaluated: list[Tensor]  # rewards of each batch of an evaluation
    _sampler: EpochSampler | None = None  # of the data loader, set when training starts; a stream of data has none

    # Set-up

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
        check_replaced()
        args = self._checked_args(model, args, quantized=options.get("quantization_config") is not None)
        check_processes(args.world_size)
        if args.rollouts is not None or args.save_rollouts:
            self._recorded = self._recorder(args, train_dataset, options)
            train_dataset = self._recorded.dataset
            reward_funcs = reward_funcs or self._recorded.reward_func
        if isinstance(model, str):
            options = adapter.prepared(model, args, options)
        rewards = [*reward_funcs] if isinstance(reward_funcs, list | tuple) else reward_funcs and [reward_funcs]
        check_models(model, rewards or (), args)
        if isinstance(train_dataset, Dataset):
            check_enough_prompts(len(train_dataset), args)
        with reference.loading(model):
            super().__init__(model, rewards, args, train_dataset, eval_dataset, **options)
        self._know_ends_of_completions()
        for reward in self.reward_funcs:
            if reads_actions(reward):
                ActionReader(with_tokenizer(reward, tokenizer_of(self)).keywords["tokenizer"])
        for dataset in prompt_ids.datasets_with_tokens(self.train_dataset, self.eval_dataset):
            prompt_ids.check(self, dataset)
        if args.max_sampling_rounds > 1 and not has_length(self.train_dataset):
            raise ValueError("max_sampling_rounds above 1 needs a dataset with a length, not a stream. Set it to 1.")
        if args.rollouts is not None:
            self.train_dataset = self._recorded.completed(
                self, tokenize_prompts=self._tokenize_prompts, takes_positions=self._takes_positions
            )
        # For its table of completions, TRL gathers images on the processes that have some, and hangs if others have
        # none. Without the table they are not needed.
        self.log_multimodal = self.log_multimodal and self.log_completions
        self.policy_objective = self._named_objective()
        self._evaluated = []
        self._logged_of_sampling: set[str] = set()  # An evaluation's copy of this trainer has the same set.
        self._begin()
        self._clock = StepClock(self.accelerator.device)
        self.add_callback(self._clock)
        if args.use_vllm:
            self._wrap_vllm(options)

    def _recorder(self, args: OPOConfig, train_dataset: Any, options: Mapping[str, Any]) -> Any:
        """What replays `rollouts`, or records those of this run, of the dataset that it was given."""
        from .reuse.recorded import Recorded  # only such runs need it

        writers = {name: options.get(name) for name in ("rollout_func", "tools", "environment_factory")}
        return Recorded(args, train_dataset, writers)

    def _know_ends_of_completions(self) -> None:
        """Let TRL, which tells by the model's own tokens where completions end, know those of `generation_kwargs`."""
        options = cast(dict, self.args.generation_kwargs or {})
        ends = options.get("stop_token_ids" if self.args.use_vllm else "eos_token_id")
        if ends is None:
            return
        if isinstance(ends, int):
            ends = [ends]
        self.eos_token_ids = [*self.eos_token_ids, *ends] if self.args.use_vllm else ends

    def create_model_card(self, *args, **named):
        """As in TRL, which has only names on the Hub; a local base model and output are named by their folders."""
        super().create_model_card(*args, **named)
        card = Path(self.args.output_dir, "README.md")
        if self.is_world_process_zero():
            base = Path(get_config_model_id(self.model.config)).name
            text = card.read_text(encoding="utf-8").replace("[None](https://huggingface.co/None)", f"`{base}`")
            output = Path(self.args.output_dir).name
            card.write_text(text.replace('model="None"', f'model="{output}"'), encoding="utf-8")

    def _named_objective(self) -> Objective:
        """The objective of the class or the configuration; the model card of another than OPO has its name."""
        kind = self.objective_class or objective_named(self.args.objective)
        if not (self.objective_class or issubclass(kind, OPO)):
            self._name = kind.__name__
            self._paper = {}
        return kind(self.args)

    def _wrap_vllm(self, options: Mapping[str, Any]) -> None:
        """Time the synchronization of weights, keep those of a frozen base, prefetch rollouts, and watch a server."""
        engine: Any = self.vllm_generation
        engine.sync_weights = self._clock.phase("sync")(FrozenBase(self.model)(engine.sync_weights))
        if self.args.prefetch_rollouts:
            self._prefetch_rollouts(options)
        if self.args.vllm_mode == "server" and self.accelerator.is_main_process:
            from .generation.vllm_server import watched  # only such runs need it

            watch = watched(engine.vllm_client.base_url)
            engine.sync_weights = watch(engine.sync_weights)
            engine.generate = watch(engine.generate)

    def _prefetch_rollouts(self, options: Mapping[str, Any]) -> None:
        """Have the main process ask the vLLM server for the next rollout while the policy trains on this one."""
        columns = getattr(self.train_dataset, "column_names", None) or ()
        obstacles = [name for name in ("rollout_func", "tools", "environment_factory") if options.get(name)]
        obstacles += [name for name in ("image", "images") if name in columns]
        if not has_length(self.train_dataset):
            obstacles.append("a stream of data")
        if obstacles:
            raise ValueError(
                f"prefetch_rollouts=1 cannot ask for completions in advance with {obstacles[0]}. Set it to 0."
            )
        if not self.accelerator.is_main_process:
            return
        engine: Any = self.vllm_generation
        mode = engine.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise ValueError(
                f"prefetch_rollouts=1: the vLLM server has --logprobs-mode {mode}. Restart it with "
                "`--logprobs-mode processed_logprobs`."
            )
        prefetch = Prefetch(engine.vllm_client.generate, self._prompts_of_next_rollout, lambda: self.state.global_step)
        engine.vllm_client.generate = prefetch.generate
        sync_weights = engine.sync_weights

        def sync_after_request() -> None:
            prefetch.wait()
            sync_weights()

        engine.sync_weights = sync_after_request
        self._prefetch = prefetch

    def _begin(self) -> None:
        """Be at the start of a run, whatever an earlier call of `train` has left: it may have ended anywhere."""
        args = self.args
        accelerator = self.accelerator
        self._step = 0  # calls of `training_step` so far, also by the run that is resumed
        # Micro-batches of each call of `training_step` in the current pass
        self._cut_pass: list[list[Batch]] | None = None
        if self._prefetch is not None:
            self._prefetch.drop()
        # Call of `training_step` with which the accumulation window (an optimizer step) began; `None`: none has yet
        self._window_start: int | None = None
        process = accelerator.process_index
        self._replay = ReplayBuffer(args.max_staleness, self.num_generations, seed=args.seed, process=process)
        self._reward_failures = RewardFailures()
        self._skipped = SkippedSteps(args, accelerator, self.optimizer)
        self._current_train_step_time = 0.0
        self._last_loaded_step = -1  # vLLM may hold the weights of the same step of another call
        for unlogged in (self._metrics["train"], self._pending_metrics, self._pending_extra_logs):
            unlogged.clear()
        self._advantages: Tensor | None = None  # those of the current rollout, over all processes; NaN where invalid
        self._advantage_range = 0.0  # highest advantage of the current rollout less the lowest
        self._place = Place()  # place in the data after the prompts of the current rollout
        self.completions_generated = 0  # for training so far, over all processes
        self._target_metrics: dict[str, dict[str, float]] = {"train": {}, "eval": {}}  # of the current rollout
        self._reports: list[SampleReport] = []  # of the current optimizer step, one per micro-batch
        self._policy_is_behaviour = False  # whether the rollout's behaviour policy is the policy when it was made
        self._leaves_out_logps = False  # whether TRL gets zeros when it asks for log-probabilities next
        self._first_step: FirstStep | None = FirstStep(self) if untested() else None
        self._n_prompts: float = math.inf  # of a stream
        if has_length(self.train_dataset):
            n_prompts = len(cast(Dataset, self.train_dataset))
            self._n_prompts = n_prompts
            self._prompt_stream = PromptStream(n_prompts, seed=args.seed, shuffle=self.shuffle_dataset)

    def _checked_args(self, model, args: OPOConfig | None, *, quantized: bool) -> OPOConfig:
        """The configuration, or the defaults; `quantized`: whether the base model is loaded with packed weights."""
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self.config_class(f"{model_id.split('/')[-1]}-{self._name}")
        elif not isinstance(args, self.config_class):
            raise TypeError(
                f"`args` is a `{type(args).__name__}`, but {type(self).__name__} needs a "
                f"`{self.config_class.__name__}`. Both take the fields of `GRPOConfig`: change the class name."
            )
        if args.use_vllm and quantized:
            raise ValueError(
                "use_vllm=True cannot be combined with a quantized base model: TRL sends vLLM the packed weights, "
                "which it rejects (huggingface/trl#4973)."
            )
        return args

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _first_step_checks(self) -> FirstStep:
        """Checks of the first rollout and optimizer step that train, with releases that have not been tested."""
        return self._first_step if self._first_step is not None and self._mode == "train" else NO_CHECKS

    @property
    def _replays_recorded(self) -> bool:
        """Whether completions are taken from `rollouts`; an evaluation generates its own."""
        return self.args.rollouts is not None and self._mode == "train"

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
        - by a tool or an environment that exits: `OPOTrainer._generate_once`;
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
        # Whether the run of the checkpoint has generated `max_completions`, so that nothing is left to train
        self._is_spent = state is not None and checkpoints.has_spent_budget(self.args, state)
        # Micro-steps of the checkpoint's last rollout that are trained
        self._resumed_position = 0 if state is None else state["position"]
        self._begin()
        if state is not None:
            self._place = Place(**state["place"])  # the rest is restored when the first prompts have been loaded
        self._settings = self.current_settings  # before a callback changes them
        if self.accelerator.is_main_process:
            # Not in a callback: DeepSpeed and FSDP allocate before the first one, and may run out of memory.
            print(printable(self.plan), flush=True)
            del self.plan  # another call may have other arguments
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
        """As in Transformers, but with the `max_steps` that `max_completions` last for, if these end the run first."""
        *values, max_steps = super().set_initial_training_values(args, dataloader, **named)
        per_rollout = args.optimizer_steps_per_rollout
        # Where an optimizer step may span rollouts, an epoch's last one is shorter, and their number is not known.
        if args.max_completions is not None and per_rollout.is_integer():
            n_rollouts = math.ceil(args.max_completions / args.generation_batch_size)
            max_steps = min(max_steps, n_rollouts * int(per_rollout))
        return *values, max_steps

    # 1. The order of the prompts

    def _run_epoch(self, **named):
        """
        Train for an epoch of Transformers, which begins at `_place`, where the current rollout's prompts end.

        - If nothing is left to train, the run stops.
        - A dataset with a length has a sampler, which begins at the place. In the first epoch of this call of `train`,
          Transformers skips the `steps_trained_in_current_epoch`, in micro-steps (calls of `training_step`): the
          sampler puts as many in front.
        - A stream of data has none: Transformers skips its beginning, and is told its epoch and how much to skip.
        """
        # Resumed from the last step's checkpoint, Transformers would train one step more.
        if self.state.global_step >= self.state.max_steps or self._is_spent:  # the checkpoint spends `max_completions`
            self.control.should_training_stop = True
            return
        is_first = named["epoch"] == named["epochs_trained"]
        if self._sampler is not None:
            skipped = named["steps_trained_in_current_epoch"] if is_first else 0
            self._sampler.begin(self._place, skipped=skipped)
        elif not has_length(self.train_dataset):
            if is_first:
                named |= self._counters_of_stream()
            else:
                self._place = self._place.next_epoch()
                named["epoch"] = self._place.epoch
        super()._run_epoch(**named)
        if self.control.should_epoch_stop and self._sampler is not None:  # a callback drops the rest of the epoch
            self._place = self._place.next_epoch()

    def _counters_of_stream(self) -> dict[str, int]:
        """
        Transformers' counters where a run begins or resumes in a stream of data, of which Transformers does not know
        how long an epoch is: it takes all steps so far for steps of the first one. Steps are micro-steps.
        """
        n_rollouts = self._place.prompts // self.args.prompts_per_rollout  # in this epoch so far
        # Micro-steps of the last rollout that are not trained yet; `_resumed_position` are those that are.
        n_untrained = -self._resumed_position % self.args.micro_steps_per_rollout
        return {
            "epoch": self._place.epoch,
            "epochs_trained": self._place.epoch,
            "steps_trained_in_current_epoch": n_rollouts * self.args.micro_steps_per_rollout - n_untrained,
        }

    def _get_train_sampler(self, dataset=None, **named):
        """TRL's sampler, but as an [`EpochSampler`]."""
        with temporarily(grpo_trainer, RepeatSampler=EpochSampler):
            self._sampler = cast(EpochSampler, super()._get_train_sampler(dataset, **named))
        if self._first_step is not None:
            self._first_step.check_sampler(self._sampler)
        return self._sampler

    def get_batch_samples(self, epoch_iterator, num_batches, device, **named):
        # Called once per accumulation window. An epoch ends with a short one, so `_step` cannot tell windows apart.
        self._window_start = None  # a resumed run restores `_step` only after its first window is drawn
        return super().get_batch_samples(epoch_iterator, num_batches, device, **named)

    def _prompts_of_next_rollout(self) -> list[list[int]] | None:
        """Tokens of the next rollout's prompts, of all processes; `None` in an evaluation, and in the last rollout."""
        args = self.args
        n_generated = self.completions_generated + args.generation_batch_size  # after this rollout
        is_spent = args.max_completions is not None and n_generated >= args.max_completions
        step = self.state.global_step + args.micro_steps_per_rollout // args.gradient_accumulation_steps
        if self._mode == "eval" or is_spent or step >= self.state.max_steps:
            return None
        dataset = cast(Dataset, self.train_dataset)
        sampler = cast(EpochSampler, self._sampler)
        rows = [dataset[index] for index in sampler.prompts_after(self._place)]
        prompts = [row["prompt"] for row in rows]
        with temporarily(self, _prompts_of_rows=prompt_ids.of_rows(rows)):
            return self._tokenize_prompts(prompts)[0]

    # 2. A rollout

    def _generate(self, prompts: list, **named):
        """What TRL's `_generate` returns for these prompts: tokens of prompts and completions first."""
        training = self.model.training
        with self._clock.phase("generate"), self._sampled_by_its_fields(), self._first_step_checks.generating(prompts):
            generated = super()._generate(prompts, **named)
        self._first_step_checks.note_generated(generated)
        if self.args.save_rollouts:
            self._recorded.generated = generated
        self.model.train(training)  # TRL's continuous batching leaves it in training mode
        # TRL asks for the rollout's log-probabilities next, unless it is aligned.
        self._leaves_out_logps = not (self.args.is_aligned or self._needs_logps_of_rollout)
        return generated

    def _tokenize_prompts(self, prompts: list, **named):
        """As in TRL, but the tokens that the rows of a dataset bring for their prompts are taken as they are."""
        if self._prompts_of_rows is not None:
            return self._prompts_of_rows.tokens_of(prompts), None, {}
        return super()._tokenize_prompts(prompts, **named)

    def _sampled_by_its_fields(self) -> AbstractContextManager[None]:
        """Within, Transformers takes no cut-off from the model's own `generation_config.json`, as vLLM takes none."""
        if self.use_vllm:
            return nullcontext()
        closed = sampling.closed(
            self.generation_config,
            self.model,
            chosen=cast(dict, self.args.generation_kwargs or {}),
            continuous=self.use_transformers_continuous_batching,
            logged=self._logged_of_sampling if self.rollout_func is None else None,
        )
        return temporarily(self, generation_config=closed)

    @property
    def _needs_logps_of_rollout(self) -> bool:
        """
        Whether the log-probabilities of all completions are needed as TRL computes them: to record them, or for vLLM's
        importance weights. Otherwise `_micro_batches` computes them, of the completions that need them.
        """
        return self.args.save_rollouts or (self.use_vllm and self.vllm_importance_sampling_correction)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        """A rollout of TRL, as a `Batch`, in as many rounds of generation as dynamic sampling needs."""
        rounds = self.args.max_sampling_rounds
        if self._mode == "eval" or rounds == 1:
            return self._generate_once(inputs)
        sampling = DynamicSampling(self._prompt_stream, self.accelerator, self.num_generations, rounds)
        rollout, metrics = sampling.fill(self._generate_round, len(inputs), self.reward_weights)
        for name, value in metrics.items():
            self._metrics["train"][f"dynamic_sampling/{name}"].append(value)
        return rollout

    def _rollout(self, generation_batch: list[dict[str, Any]]) -> Batch:
        """A complete rollout, on the device also where an override has left something on the host."""
        rollout = self._generate_and_score_completions(generation_batch)
        return send_to_device(self._finish_rollout(rollout), self.accelerator.device)

    def _generate_round(self, prompts: list[int], first: bool) -> Batch:
        """A round of dynamic sampling, for these prompts of the dataset."""
        dataset = cast(Dataset, self.train_dataset)
        metrics = self._metrics["train"] if first else defaultdict(list)
        with temporarily(self, _metrics={**self._metrics, "train": metrics}):
            rollout = self._generate_once([dict(dataset[index]) for index in prompts])
        # Other metrics are those of the first round, whose prompts are those of a rollout without dynamic sampling.
        for name in ("num_tokens", "completions/generated"):
            self._metrics["train"][name] = metrics[name]
        return rollout

    def _generate_once(self, inputs: list[dict[str, Any]]) -> Batch:
        """
        One round of generation. `rewards_per_func`, `[B, number of reward functions]`, travels with the completions.
        """
        source: AbstractContextManager[None] = nullcontext()
        if self._replays_recorded:
            inputs = self._recorded.select_completions(inputs, self.accelerator.process_index)
            recall = partial(self._recorded.recall, tokenize_prompts=self._tokenize_prompts)
            source = temporarily(self, rollout_func=recall)
        # Recorded completions bring prompts' tokens of their own.
        prompts_of_rows = None if self._replays_recorded else prompt_ids.of_rows(inputs)
        training = self.model.training
        scored = RewardRecorder(self._calculate_rewards)
        replaced = temporarily(self, _calculate_rewards=scored, _prompts_of_rows=prompts_of_rows)
        with replaced, source, chdir("."):  # a reward may change the folder
            try:
                entries = super()._generate_and_score_completions(inputs)
            except SystemExit as error:  # it would end the run as if it had finished
                raise RuntimeError(f"A tool or an environment has exited, with status {error.code}.") from error
        self.model.train(training)  # a reward may score with the policy itself
        rewards = scored.rewards
        self._first_step_checks.check_rollout(inputs, entries, rewards, scored.completion_ids, self._tokenize_prompts)
        rollout = carried(entries)
        n_local = len(rollout["advantages"])
        first = self.accelerator.process_index * n_local
        local = slice(first, first + n_local)  # this process's completions among those of all
        is_rounding = rollout["advantages"].abs() <= self._rounding_of_advantages(rewards)[local]
        rollout["advantages"] = rollout["advantages"].masked_fill(is_rounding, 0.0)
        # An override that sets `old_per_token_logps` says what the behaviour policy is.
        logps = rollout.pop("old_per_token_logps", None)
        if logps is not None and self._needs_logps_of_rollout:
            rollout["opo_logps"] = logps
        self._leaves_out_logps = False
        if self._replays_recorded:
            rollout["old_per_token_logps"] = self._recorded.behaviour_logps(rollout["completion_ids"])
        elif self.args.prefetch_rollouts and self._mode == "train":
            rollout["old_per_token_logps"] = rollout.pop("sampling_per_token_logps")
        rollout["rewards_per_func"] = rewards[local]
        if self._mode == "train":
            self.completions_generated += len(rewards)
            self._metrics["train"]["completions/generated"] = [self.completions_generated]
            if self.args.save_rollouts:
                self._recorded.save(
                    self, inputs, rollout, scored.completion_ids, takes_positions=self._takes_positions
                )
        else:
            self._evaluated.append(rewards)
        return rollout

    def _rounding_of_advantages(self, rewards: Tensor) -> Tensor:
        """
        How large TRL's advantages may be by rounding alone, `[N]`: 0 in groups whose `rewards`, `[N, number of
        functions]`, differ. TRL divides a reward less the group's mean by a standard deviation plus 1e-4.
        """
        num_generations = self.num_generations if self._mode == "train" else self.num_generations_eval
        weights = self.reward_weights.to(rewards.device)
        scored = ~rewards.isnan()
        if self.multi_objective_aggregation == "sum_then_normalize":
            equal, rounding = equal_rewards(rewards, weights, scored.any(dim=1), num_generations)
            return torch.where(equal, rounding / 1e-4, 0.0)
        equal = torch.ones_like(scored[:, 0])
        rounding = torch.zeros_like(rewards[:, 0])
        for index, weight in enumerate(weights):
            column = rewards[:, index : index + 1]
            equal_here, rounding_here = equal_rewards(column, weight, scored[:, index], num_generations)
            equal = equal & equal_here
            rounding = rounding + rounding_here
        return torch.where(equal, rounding / 1e-8, 0.0)  # divided once per function, and their sum once more

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list, **named):
        """Rewards over all processes, `[N, number of functions]`: recorded ones, or by the reward functions."""
        recorded = self._recorded.rewards(self.reward_weights) if self._replays_recorded else None
        if recorded is not None:
            return self.accelerator.gather(recorded.to(self.accelerator.device))
        with self._clock.phase("score"), checked(self), self._first_step_checks.scoring():
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list, **named)
        self._first_step_checks.check_rewards(rewards, completion_ids_list, inputs)
        if self._mode == "train":  # the log and the limit cover training only
            self._reward_failures.add(self.reward_funcs, len(completions), self.accelerator)
        return rewards

    def _finish_rollout(self, rollout: Batch) -> Batch:
        """
        Add what is computed from a rollout, once no override of `_generate_and_score_completions` can change it:
        targets (`_targets`), the behaviour policy's log-probabilities if several passes train on the rollout, whether
        the policy itself has sampled each completion (`opo_own`), and after which optimizer step (`opo_step`).
        """
        # TRL's log-probabilities are good enough for escort weights, but in bfloat16 not for a log-ratio in
        # micro-batches of another shape.
        logps = rollout.pop("opo_logps", None)
        entropies = None
        self._policy_is_behaviour = "old_per_token_logps" not in rollout
        # Completions that the policy as it is now has sampled
        by_policy = torch.full_like(rollout["advantages"], self._policy_is_behaviour, dtype=torch.bool)
        sampled_elsewhere = self._replays_recorded or (self.args.prefetch_rollouts and self._mode == "train")
        if sampled_elsewhere and not self._skipped.moved_at:  # no step has moved the policy yet
            by_policy = self._recognize_policy(rollout)
        logps = rollout.get("old_per_token_logps", logps)
        policy_logps = partial(self._policy_logps, rollout, batch_size=self.args.per_device_train_batch_size)
        if (self.policy_objective.reads_logps and logps is None) or self.top_entropy_quantile < 1.0:
            current, entropies = policy_logps()
            logps = current if logps is None or self._policy_is_behaviour else logps
        moves = self._mode == "train" and self.num_iterations > 1 and not self.args.is_on_policy
        if moves and "old_per_token_logps" not in rollout:
            # Each pass has other micro-batches, so there is no shape in which a log-ratio would be free of rounding.
            rollout["old_per_token_logps"] = policy_logps()[0] if logps is None else logps
        rollout.update(self._targets(rollout, logps))
        rollout["opo_own"] = by_policy
        # Recorded completions of another policy are at least one step old.
        rollout["opo_step"] = self._sampled_at() - (~by_policy & self._replays_recorded).float()
        if entropies is not None and self.top_entropy_quantile < 1.0:
            # TRL computes the threshold per micro-batch; the rollout's does not depend on how it is cut.
            mask = completion_tokens(rollout) & rollout["opo_valid"].unsqueeze(1)
            rollout["opo_steering"] = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        return rollout

    def _recognize_policy(self, rollout: Batch) -> Tensor:
        """
        Completions, bool `[B]`, whose recorded log-probabilities are the policy's but for rounding. They get the
        policy's: as a log-ratio, the rounding would pull at a policy that has not moved.
        """
        batch_size = self.args.per_device_train_batch_size
        with padding.evaluating(self.model):
            current, entropies = self._policy_logps(rollout, batch_size=batch_size)
        recorded = rollout["old_per_token_logps"]
        mask = completion_tokens(rollout)
        difference = token_mean((recorded - current).square(), mask).sqrt()
        by_policy = difference <= padding.rounding_of_logps(self)
        rollout["old_per_token_logps"] = torch.where(by_policy.unsqueeze(1), current, recorded)
        if self.accelerator.gather(by_policy).all():
            del rollout["old_per_token_logps"]
            self._policy_is_behaviour = True
        elif self._replays_recorded:
            self._recorded.compare(self, recorded, current, entropies, mask)
        return by_policy

    def _sampled_at(self) -> int:
        """
        Number of optimizer steps before the rollout was sampled: with `prefetch_rollouts`, those before it was asked
        for, which only the main process knows.
        """
        if not self.args.prefetch_rollouts or self._mode == "eval":
            return self.state.global_step
        asked_at = None if self._prefetch is None else self._prefetch.asked_at
        asked_at = broadcast_object_list([asked_at])[0]
        self._metrics["train"]["opo/age"].append(self.state.global_step - asked_at)
        return asked_at

    def _targets(self, rollout: Batch, logps: Tensor | None) -> Batch:
        """Compute the targets of the complete rollout; returns what this process's completions need for the loss."""
        groups, lengths = self._groups(rollout, logps)
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
        return as_batch({**local, "opo_valid": local["opo_valid"].bool()})

    def _groups(self, rollout: Batch, logps: Tensor | None) -> tuple[Groups, Tensor]:
        """The completions of all processes as the objective sees them, and how many tokens of each count, `[N]`."""
        num_generations = self.num_generations if self._mode == "train" else self.num_generations_eval
        advantages, length, logp_sum, logp_mean, rewards = gather_samples(rollout, logps, self.accelerator)
        valid = (length > 0) & ~rewards.isnan().all(dim=1) & advantages.isfinite()
        # An override may subtract the mean of equal rewards, too. A constant that it adds is a signal.
        reward_weights = self.reward_weights.cpu().double()
        equal, rounding = equal_rewards(rewards, reward_weights, valid, num_generations)
        advantages = advantages.masked_fill(equal & (advantages.abs() <= rounding), 0.0)
        sums = (rewards * reward_weights).nansum(dim=1)
        highest = sums.where(valid, -torch.inf).view(-1, num_generations).amax(dim=1)
        groups = Groups(
            advantages=advantages,
            rewards=torch.where(equal, highest.repeat_interleave(num_generations), sums),
            valid=valid,
            num_generations=num_generations,
            logps=logp_sum,
            mean_logps=logp_mean,
            vocab_size=self.model.config.get_text_config().vocab_size if self.policy_objective.reads_logps else 0,
            has_rewards="rewards_per_func" in rollout,
        )
        return groups, length

    def _note_targets(self, targets: Targets, groups: Groups) -> None:
        """Keep what the log says of a rollout's targets; in training also its advantages, and warn if all are 0."""
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

    # Log-probabilities

    @torch.no_grad()
    def _policy_logps(self, rows: Batch, **options: Any) -> tuple[Tensor, Tensor]:
        """
        Log-probabilities and entropies `[B, T]` of the completions' tokens under the policy as it is now: where it has
        not moved yet, the behaviour policy's.
        """
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with disable_gradient_checkpointing(self.model, checkpointing):
            logps, entropies, _ = self._token_logps(self.model, rows, compute_entropy=True, **options)
        return logps, entropies

    @torch.no_grad()
    def _reference_logps(self, rows: Batch) -> Tensor:
        """Log-probabilities `[B, T]` of the completions' tokens under TRL's reference policy."""
        reference: Any = self.ref_model
        adapters: AbstractContextManager = nullcontext()
        if reference is None:  # the policy with a copy of its first adapter, or without any
            reference = self.model
            policy: Any = self.accelerator.unwrap_model(self.model)
            adapters = use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None)
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with adapters, disable_gradient_checkpointing(self.model, checkpointing):
            logps, _, _ = self._token_logps(reference, rows)
        return logps

    def _token_logps(self, model, inputs: Batch, **options):
        """Per-token log-probabilities, entropies and auxiliary loss, through TRL's fused language-model head."""
        # Micro-batches of a checkpoint may be arranged to compute prompts once, where this run's attention cannot.
        if self.planner.balance is not None:
            model = shared_prompts.model_for(model, inputs)
        ids, mask, width = model_inputs(inputs)
        return self._get_per_token_logps_and_entropies(model, ids, mask, width, **options, **image_entries(inputs))

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **options
    ):
        """TRL's log-probabilities, entropies and auxiliary loss; zeros if `_generate` knows that none reads them."""
        if self._leaves_out_logps:
            self._leaves_out_logps = False
            zeros = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
            return zeros, zeros, None
        self._check_padding(input_ids, attention_mask, logits_to_keep)
        logps = self._logps_of_trl
        if batch_size is not None and self.planner.plans:
            logps = partial(self.planner.score, logps)
        return logps(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **options)

    def _logps_of_trl(self, model, *inputs, **options):
        """Log-probabilities, entropies and auxiliary loss by TRL's own pass, timed unless it is part of the loss."""
        if self._takes_positions:
            model = partial(padding.with_positions, model)
        with nullcontext() if torch.is_grad_enabled() else self._clock.phase("anchor"):
            return super()._get_per_token_logps_and_entropies(model, *inputs, **options)

    @cached_property
    def _takes_positions(self) -> bool:
        """Whether the policy gets the positions of tokens, counted without padding."""
        return padding.takes_positions(self.accelerator.unwrap_model(self.model))

    def _check_padding(self, input_ids: Tensor, attention_mask: Tensor, width: int) -> None:
        """
        Before the first log-probabilities, find whether they depend on the width of a batch `[B, P + T]`, with T =
        `width`. A model with images is taken as it is.
        """
        config = self.model.config
        if self._any_width is not None or config.get_text_config() is not config:
            return
        self._any_width = padding.is_harmless(self, input_ids, attention_mask, width)
        if not self._any_width:
            self._takes_positions = False  # a model may scale positions by the largest one in a batch
            padding.reject_other_widths(self.args)
        vars(self).pop("planner", None)  # what it plans depends on what has been found now

    # 3. Micro-batches

    def _next_micro_batches(self, generation_batch: list[dict[str, Any]]) -> list[Batch]:
        """Micro-batches of this call of `training_step`; when the rollout is used up, a new one is generated."""
        args = self.args
        if self._window_start is None:
            self._window_start = self._step
        # Calls of `training_step`, including this one, until the policy moves
        until_update = self._window_start + self.current_gradient_accumulation_steps - self._step
        index, place = divmod(self._step, args.micro_steps_per_rollout)  # number of the rollout, and calls that use it
        if place == 0:
            self._place = self._place.after_rollout(args.prompts_per_rollout, self._n_prompts)
            rollout = self._rollout(generation_batch)
            # TRL's shuffle, drawn only to advance the random state, so that the same seed samples as in GRPOTrainer.
            torch.randperm(len(rollout["advantages"]))
            self._replay.add(rollout, self._advantages)
        passed, place = divmod(place, args.steps_per_generation)  # passes over the rollout, and calls in this one
        if place == 0:
            rows = self._rows_of_pass(index, passed)
            if passed + 1 == args.num_iterations and not args.max_staleness:
                self._replay.clear()  # what no pass draws from should not take memory, least of all images
            steps = rows_of_steps(rows, args, self.accelerator, index=index, passed=passed)
            has_moved = passed > 0 and "old_per_token_logps" in rows  # since these log-probabilities
            self._cut_pass = self._micro_batches(steps, 0 if has_moved else until_update)
        return self._cut_pass[place]

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
    def _loss_is_overridden(self) -> bool:
        """Whether a subclass computes the loss: it may be a mean, and count on as many micro-batches."""
        losses = type(self).compute_loss, type(self)._compute_loss
        return losses != (GRPOTrainer.compute_loss, OPOTrainer._compute_loss)

    @cached_property
    def planner(self) -> Planner:
        """What cuts this run's optimizer steps into micro-batches."""
        zero_stage = self.accelerator.state.deepspeed_plugin.zero_stage if self.is_deepspeed_enabled else 0
        sharded = (
            zero_stage >= 2 or self.is_fsdp_enabled or getattr(self, "is_distributed_loading_by_transformers", False)
        )
        policy = self.accelerator.unwrap_model(self.model)
        return Planner(
            self.args,
            self.accelerator,
            communicates=sharded,
            # `None`: prompts are not computed once for their completions, as the model, or the router's loss over all
            # tokens that a pass computes, may need each completion with a prompt of its own.
            balance=None if self.aux_loss_enabled else shared_prompts.attention_balance(policy),
            # With `pad_to_multiple_of`, micro-batches are as wide as TRL has made the rollout. So they are where
            # log-probabilities depend on padding (`_any_width` is false; `None` if that is not known yet).
            plans=(
                self.args.plan_micro_batches
                and not self._loss_is_overridden
                and self.pad_to_multiple_of is None
                and self._any_width is not False
            ),
        )

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
        self._mark_at_rest(steps)
        for rows, is_on_policy in zip(steps, on_policy, strict=True):
            if is_on_policy and self._policy_is_behaviour:  # the log-ratio of an on-policy step is exactly 0
                rows.pop("old_per_token_logps", None)
        left_out = (self._left_out(*step) for step in zip(steps, on_policy, strict=True))
        cuts = self.planner.micro_batches(steps, left_out)
        batches_of_calls = []
        for rows, is_on_policy, cut in zip(steps, on_policy, cuts, strict=True):
            if not is_on_policy and "old_per_token_logps" not in rows:
                self._fill_in_behaviour_logps(cut)
            if self.beta != 0.0 and not self._skipped.moved_at:  # no step has moved the policy yet
                self._fill_in_reference_logps(cut)
            # The last call of an optimizer step gets at least one micro-batch: in its backward pass processes exchange
            # gradients.
            batches_of_calls += spread(cut, n_calls)
        return batches_of_calls

    def _mark_at_rest(self, steps: list[Batch]) -> None:
        """
        Note in `opo_at_rest` which completions have no gradient until the policy moves.

        The objective decides it, for completions that the policy itself has sampled (`opo_own`): of others, the
        log-ratio is not 0. The planner leaves these completions out of an on-policy step ([`~OPOTrainer._left_out`]),
        and the loss keeps their gradient at exactly 0 until `_skipped.moved_at` says that the policy has moved.
        """
        for rows in steps:
            mask = completion_tokens(rows) & rows["opo_valid"].unsqueeze(1)
            at_rest = self.policy_objective.zero_gradient(rows["opo_target"], rows["opo_mu"], mask)
            rows["opo_at_rest"] = at_rest & rows["opo_own"]

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

        In the same shape their log-probabilities are equal; in TRL's they differ by rounding.
        """
        for micro_batch in micro_batches:
            logps_of_trl = micro_batch["ref_per_token_logps"]
            micro_batch["ref_per_token_logps"] = self._reference_logps(micro_batch)
            self._first_step_checks.check_reference(logps_of_trl, micro_batch)

    def _cut_anew(self, steps: list[Batch]) -> list[list[Batch]]:
        """Micro-batches of a pass, of which a checkpoint holds these last steps, divided otherwise than before."""
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
        has_other_terms = self.beta != 0.0 or self.args.entropy_coef or self.aux_loss_enabled
        if has_other_terms or not self.args.skip_inert_rows:
            return torch.zeros_like(rows["opo_at_rest"])
        # Log-probabilities of an override may be those of another policy.
        is_behaviour_policy = on_policy and "old_per_token_logps" not in rows
        mask = completion_tokens(rows) & rows["opo_valid"].unsqueeze(1)
        always = self.policy_objective.zero_gradient(rows["opo_target"], rows["opo_mu"], mask, moved=True)
        return always | (rows["opo_at_rest"] & is_behaviour_policy)

    def training_step(self, model, inputs, num_items_in_batch=None, **named):
        """
        Draw micro-batches; of each, one call of `compute_loss` and one backward pass. Returns the sum of their losses.
        """
        began = time.perf_counter()
        model.train()  # so that a rollout is made for training
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers: generate with the weights that are trained
        micro_batches = self._next_micro_batches(inputs)
        loss = torch.zeros((), device=self.accelerator.device)
        with without_exchange(self, model):
            for micro_batch in micro_batches[:-1]:
                # Transformers' step: TRL's also counts its calls.
                loss += super(GRPOTrainer, self).training_step(model, micro_batch, num_items_in_batch, **named)
        self._current_train_step_time += time.perf_counter() - began
        if micro_batches:
            loss += super().training_step(model, micro_batches[-1], num_items_in_batch, **named)
        else:  # all completions of the optimizer step are in its other calls
            self._step += 1
        if self.accelerator.sync_gradients and self._reports:  # none if a subclass has its own loss
            self._log_step(self._reports)
            self._reports = []
        if self.accelerator.sync_gradients and self.num_iterations > 1:
            calls = np.arange(self._window_start, self._step)
            passes = calls % self.args.micro_steps_per_rollout // self.args.steps_per_generation + 1
            self._append("train", "opo/pass", float(passes.mean()))
        return loss

    def _prepare_inputs(self, inputs, **_):
        """What `compute_loss` gets: in training a micro-batch as it is, in an evaluation a rollout of its prompts."""
        return inputs if self._mode == "train" else self._rollout(inputs)

    # 4. The loss

    def _compute_loss(self, model, inputs: Batch, **_) -> Tensor:
        """Sum of the losses of some completions of an optimizer step, divided by their number in the step."""
        logps, entropies, aux_loss = self._token_logps(
            model, inputs, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        losses, report = self._sample_losses(inputs, logps, entropies)
        reports = [report]
        if "opo_filler" in inputs:
            on_policy = "old_per_token_logps" not in inputs
            left_out = partial(SampleReport.of_skipped, mu=inputs["opo_mu"].max(), on_policy=on_policy)
            reports = [report.with_fillers(inputs["opo_filler"], left_out(inputs["opo_counts"]))]
            if "opo_skipped" in inputs:
                reports.append(left_out(inputs["opo_skipped"]))
        loss = losses.sum()
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss * len(losses)
            self._metrics[self._mode]["aux_loss"].append(self.accelerator.gather(aux_loss.detach()).mean().item())
        if self._mode == "eval":
            self._log_step(reports)  # an optimizer step that a callback interrupts keeps its own
            return loss / len(losses)
        self._reports += reports
        loss = loss / (self.args.per_device_train_batch_size * self.current_gradient_accumulation_steps)
        if not self._loss_is_overridden:
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
        at_rest = inputs.get("opo_at_rest", torch.zeros_like(inputs["opo_valid"]))  # an evaluation has no such key
        # `opo_step` is the optimizer step after which the completion was sampled, `moved_at` the last that may have
        # moved the policy.
        rests_now = at_rest & (inputs["opo_step"] >= self._skipped.moved_at)
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
        weights = torch.ones_like(inputs["opo_target"])
        if "importance_sampling_ratio" in inputs:
            ratio = inputs["importance_sampling_ratio"]  # `[B, 1]` in TRL's modes of sequences, `[B, T]` of tokens
            weights = ratio.squeeze(1) if ratio.shape[1] == 1 else token_mean(ratio, mask)
        if self.off_policy_mask_threshold is not None:
            keep = self.get_off_policy_mask(
                advantages=inputs["advantages"].unsqueeze(1),
                per_token_logps=logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", behaviour_logps),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
            weights = weights * keep.squeeze(1)
        return Samples(
            logps=logps,
            anchor_logps=behaviour_logps,
            mask=mask,
            target=inputs["opo_target"],
            mu=inputs["opo_mu"],
            weights=torch.where(inputs["opo_valid"], weights, 0.0),
            sampler_ratios=inputs.get("importance_sampling_ratio"),
            age=self.state.global_step - inputs["opo_step"],
            reused=self.num_iterations > 1 or self.args.rollouts is not None or bool(self.args.prefetch_rollouts),
            # Under `top_entropy_quantile`, the other tokens stay in the length but have no ratio.
            steering=inputs.get("opo_steering"),
        )

    # 5. The log

    def evaluation_loop(self, dataloader, *args, metric_key_prefix="eval", **named):
        """As in TRL, but without rows that fill the last batch, and under the name of one of several datasets."""
        self._evaluated.clear()
        self._metrics["eval"].clear()
        # TRL logs how long it generates; to trackio even if its run has not begun or is over.
        with nullcontext() if self.is_in_train else temporarily(self.args, report_to=[]):
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **named)
        metrics = self._metrics["eval"]
        if self._evaluated and has_length(dataloader.dataset):
            n_completions = len(dataloader.dataset) * self.num_generations_eval
            rewards = torch.cat(self._evaluated)[:n_completions]
            totals = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
            is_scored = ~rewards.isnan().all(dim=1)
            metrics["reward"] = [totals[is_scored].mean().item()]
            for name, mean in zip(self.reward_func_names, rewards.nanmean(dim=0).tolist(), strict=True):
                metrics[f"rewards/{name}/mean"] = [mean]
        if metric_key_prefix != "eval":  # TRL puts "eval_" before all alike
            dataset = metric_key_prefix.removeprefix("eval_")
            named_metrics = {f"{dataset}_{name}": values for name, values in metrics.items()}
            self._metrics["eval"] = defaultdict(list, named_metrics)
        return output

    def _log_step(self, reports: list[SampleReport]):
        """Gather the reports of an optimizer step, or evaluated batch, from all processes, once, and log them."""
        mode = self._mode
        samples = SampleReport.gather(reports, self.accelerator)
        metrics = {f"opo/{name}": value for name, value in self._target_metrics[mode].items()}
        metrics |= metrics_of_samples(
            samples, self.policy_objective, kl=self.beta != 0.0, bonus=self.args.entropy_coef != 0.0
        )
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
            efficiency = gradient_response_efficiency(logs["grad_norm"], self._advantage_range)
            self._append("train", "opo/gradient_response_efficiency", efficiency)
            for kind, count in self._reward_failures.take().items():
                metrics[kind].append(count)
            metrics["opo/skipped_steps"].append(self._skipped.total)
        super().log(logs, start_time, **named)

    # 6. The end of a step

    @property
    def rollout_is_used_up(self) -> bool:
        """Whether the next optimizer step needs a new rollout."""
        return checkpoints.needs_rollout(self.args, self._step)

    def _get_grad_norm(self, model, grad_norm=None, **named):
        """Norm of the gradient of an optimizer step, for the log; a gradient that is not finite is dropped."""
        if self._window_start is not None:
            self._first_step_checks.check_step(self._step - self._window_start)
        if self._first_step_checks.is_complete:
            self._first_step = None
        norm = super()._get_grad_norm(model, grad_norm, **named)
        return self._skipped.check(model, self.optimizer, norm, step=self.state.global_step + 1)

    def _maybe_log_save_evaluate(self, *args, **named):
        self._end_if_budget_is_spent()
        with self._skipped.end_of_step(self):
            super()._maybe_log_save_evaluate(*args, **named)

    def _end_if_budget_is_spent(self) -> None:
        """After this optimizer step, end a run that has generated `max_completions` and trained on them."""
        limit = self.args.max_completions
        is_spent = limit is not None and self.rollout_is_used_up and self.completions_generated >= limit
        if not is_spent:
            return
        self.control.should_log = True
        # `max_steps` has ended the run, unless dynamic sampling generates more. Transformers calls this again at the
        # epoch's end: by then the stop is set and the checkpoint written.
        if self.control.should_training_stop:
            return
        # End the run here. Transformers decides what to save and evaluate after a last step, so it is shown a state in
        # which this is the last.
        last = replace(self.state, max_steps=self.state.global_step)
        DefaultFlowCallback().on_step_end(self.args, last, self.control)

    # 7. A checkpoint: saving and loading, in the order of Transformers

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
        if saved["processes"] != current["processes"]:
            checkpoints.draw_random_state(self.args.seed, self.state.global_step, process)
        self._load_state(state, is_divided=bool(changes))
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
        rollout, position = divmod(self._step, self.args.micro_steps_per_rollout)
        is_inside_pass = position % self.args.steps_per_generation > 0
        # Later passes are cut from the rollouts; the current one has been cut.
        draws_from_rollouts = self.args.num_iterations > 1 and (self.args.max_staleness > 0 or position > 0)
        return {
            "settings": self._settings,
            "rollout": rollout,
            "position": position,
            "place": self._place.state_dict(),
            "prompt_stream": self._prompt_stream.state_dict() if self.args.max_sampling_rounds > 1 else {},
            "completions_generated": self.completions_generated,
            "replay": self._replay.state_dict() if draws_from_rollouts else {},
            "micro_batches": self._cut_pass if is_inside_pass else None,
            "advantage_range": self._advantage_range,
            "target_metrics": self._target_metrics,
            "reward_failures": self._reward_failures.state_dict(),
            "skipped_steps": self._skipped.state_dict(),
            "pending_loss": self._tr_loss,
            "log": self._log_state(),
        }

    def _load_state(self, state: Mapping[str, Any], *, is_divided: bool) -> None:
        """Go on from a state of [`~OPOTrainer._state`], perhaps `is_divided` among other processes."""
        device = self.accelerator.device
        self._step = state["rollout"] * self.args.micro_steps_per_rollout + state["position"]
        saved = send_to_device(state["micro_batches"], device)
        self._cut_pass = self._cut_anew(saved) if is_divided and saved is not None else saved
        self._replay.load_state_dict(send_to_device(state["replay"], device))
        self._place = Place(**state["place"])
        if self.args.max_sampling_rounds > 1:
            self._prompt_stream.load_state_dict(state["prompt_stream"])
        self.completions_generated = state["completions_generated"]
        self._advantage_range = state["advantage_range"]
        self._target_metrics = state["target_metrics"]
        self._reward_failures.load_state_dict(state["reward_failures"])
        self._skipped.load_state_dict(state["skipped_steps"])
        # The steps since the last log entry count in the next entry, but not in this call's mean loss.
        self._tr_loss = state["pending_loss"].to(self.args.device)
        self._total_loss_scalar = -self._tr_loss.item()
        self._load_log_state(state["log"])

    def _log_state(self) -> dict[str, Any]:
        """What TRL and Transformers have not logged yet, without images."""
        completions = {name: values for name, values in self._logs.items() if name != "images"}
        return {
            "last_step": self._globalstep_last_logged,
            "metrics": self._metrics,
            "completions": completions if self.log_completions else {},
        }

    def _load_log_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of [`~OPOTrainer._log_state`]."""
        self._globalstep_last_logged = state["last_step"]
        for mode, metrics in state["metrics"].items():
            self._metrics[mode].update(metrics)
        logs: Any = self._logs  # name → values of the latest rollout, or name → column → values
        for name, values in state["completions"].items():
            if isinstance(values, dict):
                for column, values_of_column in values.items():
                    logs[name][column].extend(values_of_column)
            else:
                logs[name].extend(values)

    def _load_best_model(self, **named):
        super()._load_best_model(**named)
        self._last_loaded_step = -1  # vLLM has the last weights
