"""
`RolloutTrainer`: TRL's `GRPOTrainer` and its losses, with rollouts that can be reproduced.

[`OPOTrainer`] is this trainer with another loss; GRPO, GSPO and DAPO are this trainer with TRL's losses.
A comparison thus changes nothing but the loss. This trainer adds to TRL's:

1. The order of the prompts, and the optimizer step that a completion serves, are functions of the seed (`prompts`,
   `rows`). A step whose gradient is not finite is skipped, and its samples are kept (`skipped_steps`).
2. Dynamic sampling replaces zero-variance groups (`dynamic_sampling`), as DAPO does. Unscored completions are counted,
   and end the run when there are too many (`scored`).
3. The time of a step is logged by phase (`step_clock`), and bounds on logged metrics can be watched (`watches`).
4. A checkpoint holds all that the rest of the run depends on, including the current rollout (`position`).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, send_to_device
from datasets import Dataset
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length
from trl import GRPOTrainer
from trl.extras.profiling import profiling_decorator
from trl.trainer.utils import get_config_model_id

from ..checks.text import printable
from ..checks.weights import check_models, check_trainable
from ..config import RolloutConfig
from ..metrics.opo import gradient_response_efficiency
from ..metrics.step_clock import StepClock
from ..metrics.watches import Watches
from ..objective import SEQUENCE_CLAMP, Objective, token_sum
from ..rewards.checked import checked, checked_environments, checked_tools, reward_list
from ..trl import check, check_replaced, temporarily
from . import checkpoint, disk, evaluated, padding, position, recorded, reference, wording
from .dynamic_sampling import DynamicSampling
from .frozen_base import FrozenBase
from .prompts import EpochSampler, PromptStream, check_datasets, check_train_dataset, epochs_of_sampler, permutations
from .replay import ReplayBuffer
from .rows import completion_tokens, micro_batches, rows_of_steps
from .scored import RewardFailures, recorded_rewards
from .skipped_steps import SkippedSteps
from .vllm_server import watched, without_password


logger = get_logger(__name__)

check()


class RolloutTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with reproducible rollouts, dynamic sampling and exact resumption; the losses are TRL's.

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, ...:
            As in [`~trl.GRPOTrainer`].
        args ([`RolloutConfig`], *optional*):
            Configuration of the trainer. `None` takes the defaults, with an output folder named after the model.
        compute_metrics (`Callable[[EvalPrediction], dict[str, float]]`, *optional*):
            Metrics of an evaluation on `eval_dataset`, called once per evaluation on every process. `predictions` are
            the N completions of all processes as text; `label_ids` their rewards, `[N, number of reward functions]`,
            NaN where unscored; `inputs` the row of the dataset of each. (From a stream, several processes may repeat
            some in the last batch.) What it returns is logged under `eval_`, where `metric_for_best_model` and early
            stopping find it.

    Raises:
        `TypeError`: `args` is a configuration of another trainer, one of `reward_funcs` is not a reward, or
            `compute_metrics` does not return a dictionary.
        `ValueError`: vLLM would have to generate from a quantized base model, the dataset has fewer prompts than a
            rollout needs, `max_sampling_rounds` is above 1 and the prompts come from a stream, or `max_staleness` is
            above 0 and the prompts have images.
        [`RewardError`]: in training, a reward function raises, or does not return one number, or `None`, for each
            completion; isolated ones fail to score more than `max_reward_failure_rate`; an environment fails, or a
            tool raises what is not an `Exception`.
        `RuntimeError`: in training, too many gradients in a row are not finite (`max_skipped_steps`), or a checkpoint
            cannot be written (`save_failure`).
    """

    config_class: type[RolloutConfig] = RolloutConfig
    args: RolloutConfig
    model: Any  # a PreTrainedModel, or PEFT's wrapper around one
    policy_objective: Objective | None = None  # the losses are TRL's
    num_generations: int
    num_generations_eval: int

    # The trainer's own numbers, and dictionaries of numbers, that a checkpoint holds besides those of its parts.
    _saved_numbers: tuple[str, ...] = (
        "_advantage_range",
        "completions_generated",
        "_pass",
        "_globalstep_last_logged",
        "entropy_coef",
        "_last_world_entropy",
    )

    _has_trained = False  # whether `train` has been called before
    _is_spent = False  # whether the run is resumed from a checkpoint that spends `max_completions`
    _resumed_at: tuple[int, int] | None = None  # in a stream: passes over it, and micro-steps of the next
    _recorded_samples: recorded.Rows = ()  # of the current rollout
    _recorded_digest: str | None = None
    _evaluated: list[tuple[Tensor, list[evaluated.Sample]]] | None = None  # in an evaluation: rewards of each batch
    _padding: padding.Padding | None = None  # on which log-probabilities depend; found before the first
    _sampler: EpochSampler | None = None  # of the data loader, set when training starts; a stream of data has none

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: RolloutConfig | None = None,
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
        *,
        compute_metrics=None,
    ):
        check_replaced()
        args = self._checked_args(model, args, quantized=quantization_config is not None)
        not_recorded = {"rollout_func": rollout_func, "tools": tools, "environment_factory": environment_factory}
        if args.rollouts is not None:
            train_dataset = recorded.dataset_for(args, train_dataset, not_recorded)
            if not reward_funcs and recorded.has_rewards(train_dataset):
                reward_funcs = recorded.recorded_reward
        recorded.check_recordable(args, not_recorded, train_dataset)
        check_datasets(train_dataset, eval_dataset, environment_factory)
        rewards = reward_list(reward_funcs)
        check_models(model, rewards or (), args)
        factories = [*environment_factory.values()] if isinstance(environment_factory, dict) else [environment_factory]
        url = args.vllm_server_base_url
        with without_password(url), checked_environments(factories, {}), reference.given(model):
            super().__init__(
                model=model,
                reward_funcs=rewards,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        # TRL tells by the model's own tokens where completions end.
        ends = (cast(Any, args.generation_kwargs) or {}).get("stop_token_ids" if args.use_vllm else "eos_token_id")
        if ends is not None:
            ends = [ends] if isinstance(ends, int) else ends
            self.eos_token_ids = [*self.eos_token_ids, *ends] if args.use_vllm else ends
        if args.use_vllm and (cast(Any, args.generation_kwargs) or {}).get("stop"):
            logger.warning("`completions/clipped_ratio` counts completions that `stop` ends as truncated.")
        evaluated.check(compute_metrics, args, eval_dataset)
        self.compute_metrics = compute_metrics
        check_train_dataset(self)
        if args.rollouts is not None:
            self._recorded_digest = recorded.digest(train_dataset)
            self.train_dataset = recorded.completed(self)
        # For its table of completions, TRL gathers images on the processes that have some, and hangs if others have
        # none. Without the table they are not needed.
        self.log_multimodal = self.log_multimodal and self.log_completions
        process = self.accelerator.process_index
        self._replay = ReplayBuffer(args.max_staleness, self.num_generations, seed=args.seed, process=process)
        self._reward_failures = RewardFailures(args, self.accelerator)
        self._skipped = SkippedSteps(args, self.accelerator)
        self._set_up()
        self._begin()
        self._clock, self._watches = StepClock(self.accelerator.device), Watches(args.watches)
        self.add_callback(self._clock)
        self.add_callback(self._watches)
        if args.use_vllm:
            engine: Any = self.vllm_generation
            engine.sync_weights = self._clock.phase("sync")(FrozenBase(self.model)(engine.sync_weights))
            if args.vllm_mode == "server" and self.accelerator.is_main_process:
                watch = watched(engine.vllm_client.base_url)
                engine.sync_weights, engine.generate = watch(engine.sync_weights), watch(engine.generate)

    def _set_up(self) -> None:
        """What a subclass makes and checks once, when the model is loaded and before a run begins."""

    def _begin(self) -> None:
        """Be at the start of a run, whatever an earlier call of `train` has left: it may have ended anywhere."""
        self._step, self._buffered_inputs = 0, None
        self._window_start: int | None = None  # micro-step with which the accumulation window began
        self._batches_of_step: list[Any] = []  # micro-batches of that window so far, of any number of rollouts
        self._replay.clear()
        self._current_train_step_time = 0.0
        if self.use_vllm:
            self._last_loaded_step = -1  # the engine may hold the weights of the same step of another call
        if self.use_adaptive_entropy:
            self.entropy_coef, self._last_world_entropy = self.args.entropy_coef, math.inf
        self._advantage_range = 0.0  # of the current rollout, over all processes
        self._pass = {"number": 0, "rollouts": 0}  # over a stream, and rollouts before it
        self.completions_generated = 0  # for training so far, over all processes
        self._reward_failures.load_state_dict({"counts": {}, "rate": 0.0})
        self._skipped.load_state_dict({"total": 0, "in_a_row": 0, "moved_at": 0})
        self._ratio_sums: Tensor | None = None  # of the optimizer step: Σ r, Σ r² and number, r = π/π_k
        for name in ("_prompt_stream", "_dynamic_sampling"):
            vars(self).pop(name, None)

    def _checked_args(self, model, args: RolloutConfig | None, *, quantized: bool) -> RolloutConfig:
        wanted = self.config_class
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = wanted(f"{model_id.split('/')[-1]}-{self._name}")
        elif not isinstance(args, wanted):
            raise TypeError(
                f"`args` is a `{type(args).__name__}`, but {type(self).__name__} needs a `{wanted.__name__}`. "
                "Both take the fields of `GRPOConfig`: change the class name."
            )
        if args.use_vllm and quantized:
            raise ValueError(
                "use_vllm=True cannot be combined with a quantized base model: TRL sends vLLM the packed weights, "
                "which it rejects (huggingface/trl#4973). Set use_vllm=False, or train LoRA on the base as it is."
            )
        return args

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _replays_recorded(self) -> bool:
        """Whether completions are taken from `rollouts`; an evaluation generates its own."""
        return self.args.rollouts is not None and self._mode == "train"

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """
        Train, from the beginning or from a checkpoint.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                Folder of a checkpoint, `"last"` or `"auto"`; see [`rollout.checkpoint.resolve`].

        Raises:
            `ValueError`: the checkpoint is not complete, or lies inside a rollout that is cut differently in this run;
                or no weight would be trained.
            `ImportError`: another package has replaced TRL's trainer since this one was made.
        """
        check_replaced()
        check_trainable(self.model, None if self._has_trained else self.optimizer)
        found = checkpoint.resolve(resume_from_checkpoint, self.args.output_dir)
        if found is not None:
            position.check_resumable(self, found)
        self._is_spent = found is not None and position.has_spent_budget(self, Path(found))
        self._resumed_at = None if found is None else position.place_in_stream(self, Path(found))
        self._begin()
        if self._has_trained:  # before that, a script may have made rollouts to look at, which TRL logs
            for kept in (self._metrics["train"], self._pending_metrics, self._pending_extra_logs):
                kept.clear()
        self._has_trained = True
        if self.accelerator.is_main_process:
            # Not in a callback: DeepSpeed and FSDP allocate before the first one, and may run out of memory.
            print(printable(self.plan), flush=True)
            del self.plan  # another call may have other arguments
        return super().train(found, *args, **kwargs)

    @cached_property
    def plan(self) -> str:
        """The plan, printed when training starts."""
        from ..forecast.plan import training_plan  # needed once, and not to import a trainer

        return training_plan(self)

    def _largest_micro_batch(self, prompt: int, completion: int) -> tuple[int, int]:
        """Rows of a micro-batch, and completions in each, of prompts and completions of at most so many tokens."""
        return self.args.per_device_train_batch_size, 1

    def _run_epoch(self, **named):
        # Resumed from the last step's checkpoint, Transformers would train one step more.
        if self.state.global_step >= self.state.max_steps or self._is_spent:
            self.control.should_training_stop = True
            return
        if self._sampler is not None:
            self._sampler.epoch = named["epoch"]
        elif not has_length(self.train_dataset):
            if self._resumed_at is not None:  # Transformers takes all steps so far for steps of the first pass
                passes, steps = self._resumed_at
                named |= {"epochs_trained": passes, "steps_trained_in_current_epoch": steps}
                named["epoch"] += passes
            self._pass = {"number": named["epoch"], "rollouts": self._step // self.args.micro_steps_per_rollout}
        super()._run_epoch(**named)

    # 1. The order of the prompts, and the optimizer step that a completion serves

    def _get_train_sampler(self, dataset=None):
        self._sampler = EpochSampler.of(super()._get_train_sampler(dataset))
        return self._sampler

    @cached_property
    def _prompt_stream(self) -> PromptStream:
        """Prompts of dynamic sampling. Made at first use: a subclass's sampler may need what its `__init__` sets."""
        args, dataset = self.args, cast(Dataset, self.train_dataset)
        if type(self)._get_train_sampler is RolloutTrainer._get_train_sampler:
            return PromptStream(permutations(len(dataset), seed=args.seed, shuffle=self.shuffle_dataset))
        of_data_loader, sampler = self._sampler, self._get_train_sampler(dataset)
        self._sampler = of_data_loader
        return PromptStream(epochs_of_sampler(sampler, args))

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        # Called once per accumulation window. An epoch ends with a short one, so `_step` cannot tell windows apart.
        self._window_start = None  # a resumed run restores `_step` only after its first window is drawn
        self._batches_of_step = []
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    @profiling_decorator
    def _prepare_inputs(self, generation_batch):
        if self._mode == "eval":
            return self._rollout(generation_batch)
        return self._buffered(generation_batch)

    def _buffered(self, generation_batch: list[dict[str, Any]]) -> Any:
        """What this micro-step trains on; when the rollout is used up, a new one is generated."""
        args = self.args
        if self._window_start is None:
            self._window_start = self._step
        # Micro-steps, including this one, until the policy moves
        until_update = self._window_start + self.current_gradient_accumulation_steps - self._step
        index, place = divmod(self._step, args.micro_steps_per_rollout)
        if place == 0:
            rollout = self._rollout(generation_batch)
            # TRL's shuffle, drawn only to advance the random state, so that the same seed samples as in GRPOTrainer.
            torch.randperm(len(rollout["advantages"]))
            self._replay.add(rollout, self._scored_advantages(rollout) if args.max_staleness else None)
        passed, place = divmod(place, args.steps_per_generation)
        if place == 0:
            rows = self._rows_of_pass(index, passed)
            if passed + 1 == args.num_iterations and not args.max_staleness:
                self._replay.clear()  # what no pass draws from should not take memory, least of all images
            steps = rows_of_steps(rows, args, self.accelerator, index=index, passed=passed)
            has_moved = passed > 0 and "old_per_token_logps" in rows  # since these log-probabilities
            self._buffered_inputs = self._micro_batches(steps, 0 if has_moved else until_update)
        if args.num_iterations > 1:
            self._metrics["train"]["opo/pass"].append(passed + 1)
        buffered: Any = self._buffered_inputs
        batch = buffered[place]
        self._batches_of_step += batch if isinstance(batch, list) else [batch]
        return batch

    def _rows_of_pass(self, index: int, passed: int) -> dict[str, Any]:
        """This process's samples in a pass over the rollout of this index, after `passed` passes over it."""
        rows = self._replay.rows_of_pass(index, passed)
        if passed and self.args.max_staleness:
            # TRL divides losses per token by the number of tokens of all processes' samples: here, of those drawn.
            tokens = self.accelerator.gather(completion_tokens(rows).sum()).sum()
            rows = {**rows, "num_items_in_batch": tokens}
        return rows

    def _scored_advantages(self, rollout: Mapping[str, Any]) -> Tensor:
        """Advantages of all processes' samples, `[N]`; NaN for completions without a reward or a token that counts."""
        counts = completion_tokens(rollout).any(dim=1)
        if "rewards_per_func" in rollout:  # a rollout that an override made from scratch may have none
            counts = counts & ~rollout["rewards_per_func"].isnan().all(dim=1)
        advantages = rollout["advantages"]  # of an override, perhaps per token
        counts = counts.view(-1, *[1] * (advantages.ndim - 1))
        return self.accelerator.gather(advantages.where(counts, torch.nan))

    def _micro_batches(self, steps: list[dict[str, Any]], until_update: int) -> Any:
        """One entry per micro-step, from the samples of each optimizer step. The policy moves after `until_update`."""
        n_batches = self.args.steps_per_generation // len(steps)
        return [batch for rows in steps for batch in micro_batches(rows, n_batches)]

    @property
    def rollout_is_used_up(self) -> bool:
        """Whether the next optimizer step needs a new rollout."""
        return position.needs_rollout(self.args, self._step)

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm)
        step = self.state.global_step + 1
        return self._skipped.check(model, norm, step=step, micro_batches=self._batches_of_step)

    def _determine_best_metric(self, metrics, trial):
        # Under `save_strategy: best` it decides alone, also where a signal, a watch or a skipped step wants to save.
        return super()._determine_best_metric(metrics, trial) or self.control.should_save

    def _maybe_log_save_evaluate(self, *args, **named):
        limit = self.args.max_completions
        spent = limit is not None and self.rollout_is_used_up and self.completions_generated >= limit
        if spent and not self.control.should_training_stop:  # at the end of the epoch it is set, and all is saved
            # End the run after this step, and log, save and evaluate what Transformers does at the last of `max_steps`
            last = replace(self.state, max_steps=self.state.global_step)
            DefaultFlowCallback().on_step_end(self.args, last, self.control)
            self.control.should_log = True
        with self._skipped.end_of_step(self):
            super()._maybe_log_save_evaluate(*args, **named)

    # 2. A rollout

    @contextmanager
    def _keep_mode(self) -> Iterator[None]:
        """TRL's continuous batching, or a `rollout_func`, may switch the model's mode, on which `_mode` relies."""
        training = self.model.training
        try:
            yield
        finally:
            self.model.train(training)

    def _generate_single_turn(self, *inputs, **options):
        with self._keep_mode():
            return super()._generate_single_turn(*inputs, **options)

    def _generate(self, prompts: list):
        with self._keep_mode(), self._clock.phase("generate"):
            return super()._generate(prompts)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._mode == "eval" or self.args.max_sampling_rounds == 1:
            return self._generate_once(inputs)
        rollout, metrics = self._dynamic_sampling.fill(self._generate_round, len(inputs), self.reward_weights)
        for name, value in metrics.items():
            self._metrics["train"][f"dynamic_sampling/{name}"].append(value)
        return rollout

    def _rollout(self, generation_batch: list[dict[str, Any]]) -> dict[str, Any]:
        """A complete rollout, on the device, where processes can gather also what an override has left on the host."""
        device = self.accelerator.device
        rollout = send_to_device(self._generate_and_score_completions(generation_batch), device)
        return send_to_device(self._finish_rollout(rollout), device)

    def _finish_rollout(self, rollout: dict[str, Any]) -> dict[str, Any]:
        """Add what is computed from a rollout, once no override of `_generate_and_score_completions` can change it."""
        if self._mode == "train":
            advantages = self.accelerator.gather(rollout["advantages"])
            self._advantage_range = (advantages.max() - advantages.min()).item()
        return rollout

    @cached_property
    def _dynamic_sampling(self) -> DynamicSampling:
        rounds = self.args.max_sampling_rounds
        return DynamicSampling(self._prompt_stream, self.accelerator, self.num_generations, rounds)

    def _generate_round(self, prompts: list[int], first: bool) -> dict[str, Any]:
        """A round of dynamic sampling, for these prompts of the dataset."""
        dataset = cast(Dataset, self.train_dataset)
        metrics = self._metrics["train"] if first else defaultdict(list)
        with temporarily(self, _metrics={**self._metrics, "train": metrics}):
            rollout = self._generate_once([dict(dataset[index]) for index in prompts])
        # Other metrics are those of the first round, whose prompts are those of a rollout without dynamic sampling.
        for name in ("num_tokens", "completions/generated"):
            self._metrics["train"][name] = metrics[name]
        return rollout

    def _generate_once(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """One round of generation; `rewards_per_func` `[B, number of reward functions]` travels with the samples."""
        factories: Any = self.environment_factories or {}
        environments = checked_environments(factories.values(), self._environment_pool if factories else {})
        source: AbstractContextManager[None] = nullcontext()
        if self._replays_recorded:
            inputs, samples = recorded.one_by_one(inputs, self.accelerator.process_index, self.num_generations)
            source = temporarily(self, rollout_func=partial(recorded.recall, samples))
            self._recorded_samples = samples
        # A reward may score with the policy itself, and leave it in evaluation mode; or change the current folder.
        with self._keep_mode(), chdir("."), recorded_rewards(self) as scored, environments, source:
            rollout = super()._generate_and_score_completions(inputs)
        rewards, completion_ids = scored[-1]
        if self._replays_recorded:
            logps = recorded.behaviour_logps(self._recorded_samples, completion_ids, rollout["completion_ids"])
            rollout["old_per_token_logps"] = logps
        n_local = len(rollout["advantages"])
        rollout["rewards_per_func"] = rewards[self.accelerator.process_index * n_local :][:n_local]
        if self._mode == "train":
            self.completions_generated += len(rewards)
            self._metrics["train"]["completions/generated"] = [self.completions_generated]
            if self.args.save_rollouts:
                recorded.save(self, inputs, rollout, completion_ids)
        elif self._evaluated is not None:
            seen = []
            if self.compute_metrics is not None:
                texts = cast(Any, self.processing_class).batch_decode(completion_ids, skip_special_tokens=True)
                seen = gather_object([*zip(texts, rollout["rewards_per_func"].tolist(), inputs, strict=True)])
            self._evaluated.append((rewards, seen))
        return rollout

    def _tool_call_loop(self, *inputs, **options):
        with checked_tools(self):
            return super()._tool_call_loop(*inputs, **options)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        known = recorded.rewards(self._recorded_samples, self.reward_weights) if self._replays_recorded else None
        if known is not None:
            return self.accelerator.gather(known.to(self.accelerator.device))
        with self._clock.phase("score"), checked(self):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._mode == "train":  # the log and the limit cover training only
            self._reward_failures.count(self.reward_funcs, len(completions))
        return rewards

    @cached_property
    def _takes_positions(self) -> bool:
        return padding.takes_positions(self.accelerator.unwrap_model(self.model))

    def _check_padding(self, input_ids: Tensor, attention_mask: Tensor, width: int) -> None:
        """Before the first log-probabilities: find on what they depend. A model with images is taken as it is."""
        config = self.model.config
        if self._padding is not None or config.get_text_config() is not config:
            return
        self._padding, said = padding.find(self, input_ids, attention_mask, width)
        if self.accelerator.is_main_process:
            print(said, flush=True)
        if not self._padding.harmless:
            self._takes_positions = False  # by whose maximum in a batch a model may scale them
            padding.reject_other_widths(self.args)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **options):
        self._check_padding(input_ids, attention_mask, logits_to_keep)
        if self._takes_positions:
            model = partial(padding.with_positions, model)
        with nullcontext() if torch.is_grad_enabled() else self._clock.phase("anchor"):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **options
            )

    # 3. What is logged

    def _compute_loss(self, model, inputs):
        passes: list[Tensor] = []
        token_logps = self._get_per_token_logps_and_entropies

        def kept(*args, **kwargs):
            found = token_logps(*args, **kwargs)
            if torch.is_grad_enabled():
                passes.append(found[0].detach())
            return found

        with temporarily(self, _get_per_token_logps_and_entropies=kept):
            loss = super()._compute_loss(model, inputs)
        behaviour = inputs.get("old_per_token_logps")
        if self._mode == "train" and passes and behaviour is not None:
            mask = completion_tokens(inputs)
            log_ratio = token_sum(passes[-1] - behaviour, mask).clamp(-SEQUENCE_CLAMP, SEQUENCE_CLAMP)
            ratio = log_ratio.exp()[mask.any(dim=1)]
            sums = torch.stack([ratio.sum(), ratio.square().sum(), ratio.new_tensor(len(ratio))])
            self._ratio_sums = sums if self._ratio_sums is None else self._ratio_sums + sums
        return loss

    def evaluation_loop(self, dataloader, *args, metric_key_prefix="eval", **named):
        # TRL logs how long it generates; to trackio even if its run has not begun or is over.
        quiet = nullcontext() if self.is_in_train else temporarily(self.args, report_to=[])
        self._evaluated = batches = []
        try:
            with quiet:
                output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **named)
        finally:
            self._evaluated = None
        # The last batch may be filled with repetitions.
        known = len(dataloader.dataset) * self.num_generations_eval if has_length(dataloader.dataset) else None
        own = self._metrics["eval"]
        if batches:
            own |= evaluated.means(self, torch.cat([rewards for rewards, _ in batches])[:known])
        if self.compute_metrics is not None:
            samples = [sample for _, seen in batches for sample in seen][:known]
            logged = {name.removeprefix(f"{metric_key_prefix}_") for name in output.metrics} | own.keys()
            found = evaluated.metrics(self.compute_metrics, samples, logged)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        if metric_key_prefix != "eval":  # TRL puts "eval_" before all alike
            dataset = metric_key_prefix.removeprefix("eval_")
            self._metrics["eval"] = defaultdict(list, {f"{dataset}_{name}": values for name, values in own.items()})
        return output

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients and self._ratio_sums is not None:
            total, squares, count = self.accelerator.gather(self._ratio_sums[None]).sum(dim=0).tolist()
            self._metrics["train"]["opo/ratio/ess"].append(total**2 / (count * squares) if count else math.nan)
            self._ratio_sums = None
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "grad_norm" in logs:
            metrics = self._metrics["train"]
            for phase, seconds in self._clock.seconds_per_step().items():
                metrics[f"opo/time/{phase}"].append(seconds)
            metrics["opo/tokens_per_second"].append(self._clock.tokens_per_second(self.state.num_input_tokens_seen))
            metrics["opo/advantage_range"].append(self._advantage_range)
            efficiency = gradient_response_efficiency(logs["grad_norm"], self._advantage_range)
            metrics["opo/gradient_response_efficiency"].append(efficiency)
            if len({*metrics.get("opo/pass", ())}) > 1:
                del metrics["opo/pass"]  # the mean of several passes could be mistaken for one of them
            for kind, count in self._reward_failures.take().items():
                metrics[kind].append(count)
            metrics["opo/skipped_steps"].append(self._skipped.total)
        # TRL would log metrics without a value as None, which a script's callbacks and TensorBoard do not expect.
        own = self._metrics[self._mode]
        for name in [name for name in own if "opo/" in name and all(map(math.isnan, own[name]))]:
            del own[name]
        super().log(logs, start_time)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        super().create_model_card(model_name, wording.if_on_the_hub(dataset_name), tags)
        wording.name_model(self)

    # 4. A checkpoint: saving and loading, in the order of Transformers

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        writes = self.args.should_save
        try:
            if writes:
                checkpoint.make_way(folder)
            disk.check_room(self, folder.parent)
            with temporarily(self.args, save_total_limit=None):  # older ones are deleted by `finish`
                super()._save_checkpoint(model, trial)
            if writes:
                checkpoint.finish(folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        except (Exception, CheckpointException) as error:  # FSDP's is a `BaseException`
            disk.give_up(self, folder, error)

    def _finalize_training(self, *inputs, **named):
        with temporarily(self.args, save_total_limit=None):
            return super()._finalize_training(*inputs, **named)

    def _save_rng_state(self, output_dir: str):
        super()._save_rng_state(output_dir)
        folder = Path(output_dir)
        torch.save(position.state_of(self), checkpoint.state_file(folder, self.accelerator.process_index))
        if self.args.sync_ref_model:
            position.MovingReference(self).save(folder)
        self.accelerator.wait_for_everyone()  # the manifest lists the files of all processes
        if self.args.should_save:
            checkpoint.finalize(folder)

    def _issue_warnings_after_load(self, load_result):
        wording.leave_out_tied(self.model, load_result)
        super()._issue_warnings_after_load(load_result)

    def _load_optimizer_and_scheduler(self, folder: str | None):
        if folder is None or checkpoint.lacking(Path(folder)) is not None:
            return super()._load_optimizer_and_scheduler(folder)
        # TRL reads its entropy controller from a file that it writes after the manifest, so a kill can cut it short.
        # `position.restore` has the same numbers.
        return super(GRPOTrainer, self)._load_optimizer_and_scheduler(folder)

    @torch.no_grad()
    def _load_rng_state(self, folder: str | None):
        super()._load_rng_state(folder)
        if folder is None or checkpoint.lacking(Path(folder)) is not None:
            return
        position.restore(self, checkpoint.load_state(Path(folder), self.accelerator.process_index))
        if self.args.sync_ref_model:
            position.MovingReference(self).load(Path(folder))
