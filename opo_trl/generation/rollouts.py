"""
`RolloutTrainer`: TRL's `GRPOTrainer` with rollouts that are a function of the configuration and the place in the data.

It is what [`OPOTrainer`] derives from, and has all that happens before a completion gets its target. It knows nothing
of targets, optimizer steps and losses. Log-probabilities are those of its base class, [`LogpsTrainer`].

1. Set-up: the models, data and rewards that TRL gets, recorded rollouts, and what is put around TRL's vLLM engine.
2. The order of the prompts (`_run_epoch`): a function of the seed (`generation.prompt_order`).
3. A rollout (`_generate_and_score_completions`): TRL generates and scores (`_generate_once`), and dynamic sampling
   replaces zero-variance groups. TRL's computation of the behaviour policy's log-probabilities is left out.
4. An evaluation (`evaluation_loop`): the rewards of rollouts for its prompts.

Overrides pass on keywords that they do not know (`named`): a later release of TRL may have more.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, chdir, nullcontext
from functools import partial
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers.trainer_utils import has_length
from trl.trainer import grpo_trainer
from trl.trainer.utils import get_config_model_id


# First, because it checks versions: another release may lack names that are imported below.
from ..compatibility import check_replaced, untested  # isort: skip
from ..batch import Batch, carried, completion_tokens
from ..checks.processes import check_processes
from ..checks.weights import check_models
from ..config import OPOConfig
from ..data import prompt_ids
from ..groups import rounding_of_advantages
from ..models import adapter, reference
from ..models.frozen_base import FrozenBase
from ..objective import token_mean
from ..patching import temporarily
from ..resume.checkpoint import has_spent_budget
from ..reuse.conversations import tokenizer_of
from ..rewards.checked import check_tokenizer, checked
from ..updates import padding
from ..updates.logps import LogpsTrainer
from . import prefetch, sampling
from .dynamic_sampling import DynamicSampling
from .failures import RewardFailures, RewardRecorder
from .first_step import NO_CHECKS, FirstStep
from .prompt_order import EpochSampler, InOneShard, Place, PromptStream, check_enough_prompts


logger = get_logger(__name__)


class RolloutTrainer(LogpsTrainer):
    """
    GRPOTrainer whose rollouts are generated, recorded, or replayed from a record, as its [`OPOConfig`] says.

    What a subclass may read: the fields that [`~RolloutTrainer._begin`] sets.
    """

    config_class: type[OPOConfig] = OPOConfig

    _recorded: Any = None  # rollouts that are trained on in place of own ones, or a record of these
    _prefetch: prefetch.Prefetch | None = None  # of the main process, with `prefetch_rollouts`
    _tokens_of_rows: prompt_ids.PromptsOfRows | None = None  # in a round of generation whose rows bring their tokens
    _evaluated: list[Tensor]  # rewards of each batch of an evaluation
    _sampler: EpochSampler | None = None  # of the data loader, set when training starts; a stream of data has none

    # 1. Set-up

    def __init__(
        self, model, reward_funcs=None, args: OPOConfig | None = None, train_dataset=None, eval_dataset=None, **options
    ):
        check_replaced()
        args = self._checked_args(model, args)
        check_processes(args.world_size)
        if args.rollouts is not None or args.save_rollouts:
            from ..reuse.recorded import Recorded  # only such runs need it

            # What a user's trainer may have besides the model to write completions
            writers = {name: options.get(name) for name in ("rollout_func", "tools", "environment_factory")}
            self._recorded = Recorded(args, train_dataset, writers)
            train_dataset = self._recorded.dataset
            reward_funcs = reward_funcs or self._recorded.reward_func
        if isinstance(model, str):
            options = adapter.prepared(model, args, options)
        rewards = reward_funcs
        if isinstance(reward_funcs, list | tuple):
            rewards = [*reward_funcs]
        elif reward_funcs:
            rewards = [reward_funcs]
        check_models(model, rewards or (), args, quantized=options.get("quantization_config") is not None)
        if isinstance(train_dataset, Dataset):
            check_enough_prompts(len(train_dataset), args)
        with reference.loading(model):
            super().__init__(model, rewards, args, train_dataset, eval_dataset, **options)
        # For its table of completions, TRL gathers images on the processes that have some, and hangs if others have
        # none. Without the table they are not needed.
        self.log_multimodal: bool = self.log_multimodal and self.log_completions
        self._know_ends_of_completions()
        self._check_data_and_rewards()
        if args.rollouts is not None:
            self.train_dataset = self._recorded.completed(
                self, tokenize_prompts=self._tokenize_prompts, takes_positions=self._takes_positions
            )
        self._evaluated = []
        self._logged_of_sampling: set[str] = set()  # An evaluation's copy of this trainer has the same set.
        if args.use_vllm:
            self._wrap_vllm(options)

    def _checked_args(self, model, args: OPOConfig | None) -> OPOConfig:
        """
        The configuration that a user has given or, for `None`, the default one, with an output folder named after the
        model. A `TypeError` if it is a configuration of another trainer.
        """
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self.config_class(f"{model_id.split('/')[-1]}-{self._name}")
        elif not isinstance(args, self.config_class):
            raise TypeError(
                f"`args` is a `{type(args).__name__}`, but {type(self).__name__} needs a "
                f"`{self.config_class.__name__}`. Both take the fields of `GRPOConfig`: change the class name."
            )
        return args

    def _know_ends_of_completions(self) -> None:
        """Let TRL, which tells by the model's own tokens where completions end, know those of `generation_kwargs`."""
        options = cast(dict, self.args.generation_kwargs or {})
        ends = options.get("stop_token_ids" if self.args.use_vllm else "eos_token_id")
        if ends is None:
            return
        if isinstance(ends, int):
            ends = [ends]
        # vLLM ends completions at these tokens and at the model's own, Transformers at these alone.
        self.eos_token_ids = [*self.eos_token_ids, *ends] if self.args.use_vllm else ends

    def _check_data_and_rewards(self) -> None:
        """Check what depends on the model, the tokenizer, and on datasets as TRL has prepared them."""
        check_tokenizer(self.reward_funcs, tokenizer_of(self))
        for dataset in prompt_ids.datasets_with_tokens(self.train_dataset, self.eval_dataset):
            prompt_ids.check(self, dataset)
        rates = [module.p for module in self.model.modules() if isinstance(module, torch.nn.Dropout)]
        dropout = max(rates, default=0.0)
        if dropout and not self.args.is_on_policy:
            logger.warning(
                f"Dropout of {dropout:g} becomes part of every log-ratio, as two passes of the policy differ by it "
                "before a step has moved it. Set `lora_dropout: 0.0` or `disable_dropout: true`."
            )
        if self.args.max_sampling_rounds > 1 and not has_length(self.train_dataset):
            raise ValueError("max_sampling_rounds above 1 needs a dataset with a length, not a stream. Set it to 1.")

    def _wrap_vllm(self, options: Mapping[str, Any]) -> None:
        """
        Put around TRL's vLLM engine what times the synchronization of weights, keeps those of a frozen base,
        prefetches rollouts and watches a server. `options` are those with which this trainer is made.
        """
        engine: Any = self.vllm_generation
        # Both contexts are entered whenever TRL calls the method.
        engine.sync_weights = self._clock.phase("sync")(FrozenBase(self.model)(engine.sync_weights))
        if self.args.prefetch_rollouts:
            prefetch.check_prompts_are_known(self.train_dataset, options)
        if self.args.prefetch_rollouts and self.accelerator.is_main_process:
            self._prefetch = prefetch.of_engine(
                engine, self._prompts_of_next_rollout, step=lambda: self.state.global_step
            )
        if self.args.vllm_mode == "server" and self.accelerator.is_main_process:
            from .vllm_server import watched  # only such runs need it

            watch = watched(engine.vllm_client.base_url)
            engine.sync_weights = watch(engine.sync_weights)
            engine.generate = watch(engine.generate)

    def _begin(self, resumed: Mapping[str, Any] | None = None) -> None:
        """
        Be at the start of a run, whatever an earlier call of `train` has left: it may have ended anywhere.

        Of `resumed`, the state of the checkpoint that the run goes on from, only the place in the data is restored
        here: the first prompts are loaded before the rest is restored.
        """
        self._place: Place = Place()  # place in the data after the prompts of the current rollout
        self._resumed_position = 0  # micro-steps of the checkpoint's last rollout that are trained
        self._budget_was_spent = False  # whether the checkpoint ends a run that has generated `max_completions`
        if resumed is not None:
            self._place = Place(**resumed["place"])
            self._resumed_position = resumed["position"]
            self._budget_was_spent = has_spent_budget(self.args, resumed)
        if self._prefetch is not None:
            self._prefetch.drop()
        self._reward_failures = RewardFailures()
        self._last_loaded_step = -1  # vLLM may hold the weights of the same step of another call
        self.completions_generated = 0  # for training so far, over all processes
        self._leaves_out_logps = False
        self._first_step: FirstStep | None = FirstStep(self) if untested() else None
        self._n_prompts: float = math.inf  # of a stream
        if has_length(self.train_dataset):
            n_prompts = len(cast(Dataset, self.train_dataset))
            self._n_prompts = n_prompts
            self._prompt_stream = PromptStream(n_prompts, seed=self.args.seed, shuffle=self.shuffle_dataset)

    def _state(self) -> dict[str, Any]:
        """What this process needs to go on with the same rollouts, besides random states."""
        return {
            "place": self._place.state_dict(),
            "prompt_stream": self._prompt_stream.state_dict() if self.args.max_sampling_rounds > 1 else {},
            "completions_generated": self.completions_generated,
            "reward_failures": self._reward_failures.state_dict(),
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of [`~RolloutTrainer._state`]."""
        self._place = Place(**state["place"])
        if self.args.max_sampling_rounds > 1:
            self._prompt_stream.load_state_dict(state["prompt_stream"])
        self.completions_generated = state["completions_generated"]
        self._reward_failures.load_state_dict(state["reward_failures"])

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _group_size(self) -> int:
        """Number of completions of a prompt."""
        return self.num_generations if self._mode == "train" else self.num_generations_eval

    @property
    def _first_step_checks(self) -> FirstStep:
        """Checks of the first rollout and optimizer step that train, with releases that have not been tested."""
        return self._first_step if self._first_step is not None and self._mode == "train" else NO_CHECKS

    def _check_first_step(self, n_calls: int) -> None:
        """Check the backward passes of an optimizer step of so many micro-steps. The last check ends all checks."""
        self._first_step_checks.check_step(n_calls)
        if self._first_step_checks.is_complete:
            self._first_step = None

    @property
    def _replays_recorded(self) -> bool:
        """Whether completions are taken from `rollouts`; an evaluation generates its own."""
        return self.args.rollouts is not None and self._mode == "train"

    # 2. The order of the prompts

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
        # So it would if the checkpoint has already spent `max_completions`.
        if self.state.global_step >= self.state.max_steps or self._budget_was_spent:
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
        is_stream = self._n_prompts == math.inf
        if is_stream and self._place == Place():  # it had the prompts of no rollout
            check_enough_prompts(None, self.args)
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

    def _get_dataloader(self, dataset, **named):
        """
        TRL's data loader. Of a stream of data, each process takes its part of each rollout: Accelerate would give it
        its own files instead, if there are enough, and the processes' parts of a group would have different prompts.
        """
        if isinstance(dataset, IterableDataset) and self.accelerator.num_processes > 1:
            dataset = InOneShard(dataset)
        return super()._get_dataloader(dataset=dataset, **named)

    def _get_train_sampler(self, dataset=None, **named):
        """
        TRL's sampler of prompts, but as an [`EpochSampler`], which `_run_epoch` can have begin at any place in the
        data. Kept in `_sampler`.
        """
        with temporarily(grpo_trainer, RepeatSampler=EpochSampler):
            self._sampler = cast(EpochSampler, super()._get_train_sampler(dataset, **named))
        if self._first_step is not None:
            self._first_step.check_sampler(self._sampler)
        return self._sampler

    def _note_drawn_prompts(self) -> None:
        """Note that the data loader has drawn the prompts of one more rollout: `_place` is where they end."""
        self._place = self._place.after_rollout(self.args.prompts_per_rollout, self._n_prompts)

    def _prompts_of_next_rollout(self) -> list[list[int]] | None:
        """Tokens of the next rollout's prompts, of all processes; `None` in an evaluation, and in the last rollout."""
        args = self.args
        n_generated = self.completions_generated + args.generation_batch_size  # after this rollout
        is_spent = args.max_completions is not None and n_generated >= args.max_completions
        # Number of the optimizer step after which the next rollout is needed
        step = self.state.global_step + args.micro_steps_per_rollout // args.gradient_accumulation_steps
        if self._mode == "eval" or is_spent or step >= self.state.max_steps:
            return None
        dataset = cast(Dataset, self.train_dataset)
        sampler = cast(EpochSampler, self._sampler)
        # `_place` is where the prompts of the current rollout end.
        rows = [dataset[index] for index in sampler.prompts_after(self._place)]
        prompts = [row["prompt"] for row in rows]
        with temporarily(self, _tokens_of_rows=prompt_ids.of_rows(rows)):
            tokens_of_prompts, *_ = self._tokenize_prompts(prompts)
            return tokens_of_prompts

    # 3. A rollout

    def _generate(self, prompts: list, **named):
        """
        TRL's generation for these prompts, timed and, with untested releases, noted to be checked. Returns what TRL's
        `_generate` does: first of all the tokens of prompts and completions.
        """
        training = self.model.training
        kept = sampling.same_tensors_afterwards(self.model)  # TRL's continuous batching casts the model
        checks = self._first_step_checks.generating(prompts)
        with self._clock.phase("generate"), self._sampled_by_its_fields(), checks, kept:
            generated = super()._generate(prompts, **named)
        self._first_step_checks.note_generated(generated)
        if self.args.save_rollouts:
            self._recorded.generated = generated  # which the record of this round is written from
        self.model.train(training)  # TRL's continuous batching leaves it in training mode
        # Next, TRL asks for the log-probabilities of these completions, unless each rollout serves a single optimizer
        # step (`is_aligned`). It gets zeros where nothing reads them.
        self._leaves_out_logps = not (self.args.is_aligned or self._needs_logps_of_rollout)
        return generated

    def _tokenize_prompts(self, prompts: list, **named):
        """As in TRL, but the tokens that the rows of a dataset bring for their prompts are taken as they are."""
        if self._tokens_of_rows is not None:
            return self._tokens_of_rows.tokens_of(prompts), None, {}  # no images, and no entries of theirs
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
        importance weights. Otherwise they are computed later, of the completions that need them.
        """
        return self.args.save_rollouts or (self.use_vllm and self.vllm_importance_sampling_correction)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        """
        TRL's rollout for these rows of the dataset, generated and scored, as a `Batch`. In training, dynamic sampling
        may replace some of its groups in further rounds of generation (`max_sampling_rounds`).
        """
        rounds = self.args.max_sampling_rounds
        if self._mode == "eval" or rounds == 1:
            return self._generate_once(inputs)
        dynamic_sampling = DynamicSampling(self._prompt_stream, self.accelerator, self.num_generations, rounds)
        rollout, metrics = dynamic_sampling.fill(self._generate_round, len(inputs), self.reward_weights)
        for name, value in metrics.items():
            self._metrics["train"][f"dynamic_sampling/{name}"].append(value)
        return rollout

    def _generate_round(self, prompts: list[int], first: bool) -> Batch:
        """
        A round of dynamic sampling: a completion for each of these indices of prompts in the dataset, generated and
        scored. `first`: whether it is the first round for a rollout, whose metrics are logged.
        """
        dataset = cast(Dataset, self.train_dataset)
        metrics = self._metrics["train"] if first else defaultdict(list)
        with temporarily(self, _metrics={**self._metrics, "train": metrics}):
            rollout = self._generate_once([dict(dataset[index]) for index in prompts])
        # Totals of the run include every round. Other metrics are those of the first round, whose prompts are those of
        # a rollout without dynamic sampling.
        for name in ("num_tokens", "completions/generated"):
            self._metrics["train"][name] = metrics[name]
        return rollout

    def _generate_once(self, inputs: list[dict[str, Any]]) -> Batch:
        """
        One round of generation: TRL's rollout for these rows, with the rewards by function added, and advantages of 0
        where TRL's are only rounding. In training, the completions are counted and, with `save_rollouts`, recorded.
        """
        if self._replays_recorded:  # each row is a recorded group, from which the row of one completion is taken
            inputs = self._recorded.select_completions(inputs, self.accelerator.process_index)
        entries, scored = self._generated_by_trl(inputs)
        rewards = scored.rewards
        self._first_step_checks.check_rollout(inputs, entries, rewards, scored.completion_ids, self._tokenize_prompts)
        rollout = carried(entries)  # the entries that can be divided among micro-batches
        n_local = len(rollout["advantages"])
        first = self.accelerator.process_index * n_local
        local = slice(first, first + n_local)  # this process's completions among those of all
        # How large an advantage may be by rounding alone, of all processes' completions; 0 where rewards differ
        rounding = rounding_of_advantages(
            rewards,
            self.reward_weights.to(rewards.device),
            self._group_size,
            is_of_sums=self.multi_objective_aggregation == "sum_then_normalize",
        )
        is_rounding = rollout["advantages"].abs() <= rounding[local]
        rollout["advantages"] = rollout["advantages"].masked_fill(is_rounding, 0.0)
        self._name_logps(rollout)
        rollout["rewards_per_func"] = rewards[local]
        if self._mode == "train":
            self.completions_generated += len(rewards)
            self._metrics["train"]["completions/generated"] = [self.completions_generated]
            if self.args.save_rollouts:
                self._recorded.save(
                    self, inputs, rollout, scored.completion_ids, takes_positions=self._takes_positions
                )
        else:
            self._evaluated.append(rewards)  # for the means of `evaluation_loop`
        return rollout

    def _generated_by_trl(self, inputs: list[dict[str, Any]]) -> tuple[Any, RewardRecorder]:
        """
        TRL's rollout for rows of the dataset, generated or recalled from a record, and scored. With it, what has noted
        the rewards by function, which TRL does not return.
        """
        source: AbstractContextManager[None] = nullcontext()
        if self._replays_recorded:
            recall = partial(self._recorded.recall, tokenize_prompts=self._tokenize_prompts)
            source = temporarily(self, rollout_func=recall)
        # The tokens that rows of the dataset may bring for their prompts, in place of TRL's (`_tokenize_prompts`);
        # `None`: they bring none. Prompts of recorded completions have tokens of their own.
        prompts_of_rows = None if self._replays_recorded else prompt_ids.of_rows(inputs)
        training = self.model.training
        scored = RewardRecorder(self._calculate_rewards)
        replaced = temporarily(self, _calculate_rewards=scored, _tokens_of_rows=prompts_of_rows)
        with replaced, source, chdir("."):  # returns to the current folder, which a reward may change
            try:
                entries = super()._generate_and_score_completions(inputs)
            except SystemExit as error:  # it would end the run as if it had finished
                raise RuntimeError(f"A tool or an environment has exited, with status {error.code}.") from error
        self.model.train(training)  # a reward may score with the policy itself
        # `_generate` may have set it so that TRL got zeros for this rollout. If TRL has asked for none, it is still
        # set, and the next caller wants values.
        self._leaves_out_logps = False
        return entries, scored

    def _name_logps(self, rollout: Batch) -> None:
        """
        Leave `old_per_token_logps` in a rollout only if its behaviour policy may be another than the policy: of a
        record, or of the server that has sampled it in advance. TRL's own, of the policy, become `opo_logps` if they
        are needed. Otherwise they may be zeros, and are dropped.
        """
        # Later, an override of `_generate_and_score_completions` may still set `old_per_token_logps`.
        logps = rollout.pop("old_per_token_logps", None)
        if logps is not None and self._needs_logps_of_rollout:
            rollout["opo_logps"] = logps
        if self._replays_recorded:
            rollout["old_per_token_logps"] = self._recorded.behaviour_logps(rollout["completion_ids"])
        elif self.args.prefetch_rollouts and self._mode == "train":
            rollout["old_per_token_logps"] = self._without_missing(rollout.pop("sampling_per_token_logps"), rollout)

    def _without_missing(self, logps: Tensor, rollout: Batch) -> Tensor:
        """
        Log-probabilities `[B, T]` of a vLLM server, with the policy's own for tokens that the server could not score
        (NaN): their log-ratio is 0, as TRL corrects nothing there.
        """
        missing = logps.isnan()
        misses_some = self.accelerator.gather(missing.any().unsqueeze(0))  # of each process
        if not misses_some.any():
            return logps
        # The mask of a truncated completion may be 0 for all of its tokens. They end with the last one with a value.
        n_ahead = (missing | (logps != 0)).flip(1).cumsum(1).flip(1)
        mask = n_ahead.clamp(max=1).to(rollout["completion_mask"].dtype)
        rows = cast(Batch, {**rollout, "completion_mask": mask})
        with padding.evaluating(self.model):  # without dropout
            current, _ = self._policy_logps(rows, batch_size=self.args.per_device_train_batch_size)
        return torch.where(missing, current, logps)

    def _recognize_policy(self, rollout: Batch) -> Tensor:
        """
        Completions, bool `[B]`, whose recorded log-probabilities are the policy's but for rounding. They get the
        policy's own: otherwise the rounding would be a log-ratio other than 0, whose gradient pulls the policy back
        although it has not moved. If all of them are the policy's, there is no other behaviour policy, and no
        log-probabilities of one. Those of a record that are of another are described in a warning, once.
        """
        batch_size = self.args.per_device_train_batch_size
        with padding.evaluating(self.model):  # without dropout
            current, entropies = self._policy_logps(rollout, batch_size=batch_size)
        recorded = rollout["old_per_token_logps"]
        mask = completion_tokens(rollout)
        difference = token_mean((recorded - current).square(), mask).sqrt()  # root mean square in nats, `[B]`
        by_policy = difference <= padding.rounding_of_logps(self)
        rollout["old_per_token_logps"] = torch.where(by_policy.unsqueeze(1), current, recorded)
        if self.accelerator.gather(by_policy).all():
            # From here on, it is like a rollout of the policy's own: steps that need these log-probabilities compute
            # them in the shape of their micro-batches.
            del rollout["old_per_token_logps"]
        elif self._replays_recorded:
            self._recorded.compare(self, recorded, current, entropies, mask)
        return by_policy

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list, **named):
        """Rewards over all processes, `[N, number of functions]`: recorded ones, or by the reward functions."""
        recorded = self._recorded.rewards(self.reward_weights) if self._replays_recorded else None
        if recorded is not None:
            return self.accelerator.gather(recorded.to(self.accelerator.device))
        with self._clock.phase("score"), checked(self, tokenizer_of(self)), self._first_step_checks.scoring():
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list, **named)
        self._first_step_checks.check_rewards(rewards, completion_ids_list, inputs)
        if self._mode == "train":  # the log and the limit cover training only
            self._reward_failures.add(self.reward_funcs, len(completions), self.accelerator)
        return rewards

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

    # 4. An evaluation

    def evaluation_loop(self, dataloader, *args, metric_key_prefix="eval", **named):
        """
        As in TRL, but means of rewards are without the rows that only fill the last batch. Of several datasets, the
        metrics of each have its name, which `metric_key_prefix` ends with.
        """
        self._evaluated.clear()
        self._metrics["eval"].clear()
        # TRL logs how long it generates; to trackio even if its run has not begun or is over.
        with nullcontext() if self.is_in_train else temporarily(self.args, report_to=[]):
            output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **named)
        metrics = self._metrics["eval"]
        if self._evaluated and has_length(dataloader.dataset):
            n_completions = len(dataloader.dataset) * self.num_generations_eval
            # `[completions, number of reward functions]`, without those of rows that fill the last batch
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
