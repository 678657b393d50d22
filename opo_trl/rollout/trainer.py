"""
`RolloutTrainer`: TRL's `GRPOTrainer` and its losses, with rollouts that can be reproduced.

[`OPOTrainer`] is this trainer with another loss, and GRPO, GSPO and DAPO are this trainer with TRL's, so that a
comparison differs in nothing else. What is added to TRL's:

1. The order of the prompts, and the optimizer step that a completion serves, are functions of the seed (`rollout`).
2. Dynamic sampling replaces groups without spread of rewards (`dynamic_sampling`), as DAPO does. Completions that
   cannot be scored are counted, and end the run when they are too many (`scoring`).
3. The log says where the time of a step goes (`step_clock`), and may be watched (`watches`).
4. A step whose gradient is not finite is skipped, and its rows are kept.
5. A checkpoint holds all that the rest of the run depends on, the rollout in use among it (`checkpoint`).
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from datasets import Dataset
from torch.distributed.checkpoint import CheckpointException
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.extras.profiling import profiling_decorator
from trl.trainer.utils import get_config_model_id

from .. import trl_contract
from ..config import RolloutConfig
from ..evaluate import check_placed, temporarily
from ..metrics.opo import gradient_response_efficiency
from ..metrics.plan import training_plan
from ..metrics.step_clock import StepClock
from ..metrics.watches import Watches
from ..rewards.checked import checked, reward_list
from ..rewards.scoring import IsolatedReward
from . import checkpoint, dynamic_sampling
from .dynamic_sampling import PromptStream, SampledPrompts
from .frozen_base import FrozenBase
from .rows import EpochSampler, check_enough_prompts, micro_batches, rows_of_steps
from .vllm_server import watched


logger = get_logger(__name__)

# Weight of a round of generation in the moving average of what rewards fail to score: about ten rounds count.
_FAILURE_WEIGHT = 0.1

trl_contract.check()


def takes_what_grpo_takes(config_class: type[RolloutConfig]) -> Callable[[Callable], Callable]:
    """Decorate an `__init__` that hands on its arguments: it shows those of the installed [`~trl.GRPOTrainer`]."""

    def decorate(init: Callable) -> Callable:
        parent = inspect.signature(GRPOTrainer.__init__)
        own = {"args": parent.parameters["args"].replace(annotation=config_class | None)}
        shown: Any = init
        shown.__signature__ = parent.replace(parameters=[*{**parent.parameters, **own}.values()])
        return init

    return decorate


class RolloutTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with reproducible rollouts, dynamic sampling and exact resumption; the losses are TRL's.

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, ...:
            As in [`~trl.GRPOTrainer`].
        args ([`RolloutConfig`], *optional*):
            Configuration of the trainer. `None` takes the defaults, with an output folder named after the model.

    Raises:
        `TypeError`: `args` is a configuration of another trainer, or one of `reward_funcs` is no reward.
        `ValueError`: a quantized base model is to be generated from by vLLM, the data set has fewer prompts than a
            rollout needs, or `max_sampling_rounds` is above 1 and the prompts come from a stream.
        [`RewardError`]: in training, a reward function raises, or does not return one number, or `None`, for each
            completion.
        `RuntimeError`: in training, isolated rewards fail to score more than `max_reward_failure_rate`, too many
            gradients in a row are not finite (`max_skipped_steps`), or a checkpoint cannot be written
            (`save_failure`).
    """

    config_class: type[RolloutConfig] = RolloutConfig
    args: RolloutConfig
    model: Any  # a PreTrainedModel, or PEFT's wrapper around one
    num_generations: int
    num_generations_eval: int

    # What a checkpoint holds of the trainer's own state: numbers, and dictionaries of them.
    _saved_numbers: tuple[str, ...] = (
        "_advantage_range",
        "_completions_generated",
        "_globalstep_last_logged",
        "entropy_coef",
        "_last_world_entropy",
        "_skipped_in_a_row",
        "_skipped_steps",
        "_reward_failures",
        "_reward_failure_rate",
    )

    @takes_what_grpo_takes(RolloutConfig)
    def __init__(self, model, reward_funcs=None, args: RolloutConfig | None = None, *further, **named):
        wanted = self.config_class
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = wanted(f"{model_id.split('/')[-1]}-{self._name}")
        elif not isinstance(args, wanted):
            raise TypeError(
                f"`args` is a `{type(args).__name__}`, but {type(self).__name__} needs a `{wanted.__name__}`. "
                "Both take the fields of `GRPOConfig`: change the class name."
            )
        if args.use_vllm and named.get("quantization_config") is not None:
            raise ValueError(
                "use_vllm=True does not go with a quantized base model: TRL hands vLLM the packed weights, which it "
                "refuses (huggingface/trl#4973). Set use_vllm=False, or train LoRA on the base as it is."
            )
        super().__init__(model, reward_list(reward_funcs), args, *further, **named)
        if isinstance(self.train_dataset, Dataset):
            check_enough_prompts(len(self.train_dataset), args)
        # TRL gathers images for its table of completions on the processes that have some, and hangs where others have
        # none. Without the table nobody reads them.
        self.log_multimodal = self.log_multimodal and self.log_completions
        self._window_start: int | None = None  # micro-step with which the accumulation window began
        self._advantage_range = 0.0  # of the rollout in use, over all processes
        self._completions_generated = 0  # for training, over all processes
        self._reward_failures: dict[str, float] = {}  # by kind, since the last log, over all processes
        self._reward_failure_rate = 0.0
        self._warned_of_bound = False
        self._skipped_steps = self._skipped_in_a_row = 0
        self._frozen_base: FrozenBase | None = None
        self._sampler: EpochSampler | None = None  # Transformers asks for it when training starts; not for a stream
        self._clock = StepClock(self.accelerator.device)
        self.add_callback(self._clock)
        self.add_callback(Watches(args.watches))
        if args.use_vllm:
            engine: Any = self.vllm_generation
            engine.sync_weights = self._clock.phase("sync")(engine.sync_weights)
            if args.vllm_mode == "server" and self.accelerator.is_main_process:
                watch = watched(engine.vllm_client.base_url)
                engine.sync_weights, engine.generate = watch(engine.sync_weights), watch(engine.generate)
        if args.max_sampling_rounds > 1 and not isinstance(self.train_dataset, Dataset):
            raise ValueError(
                f"max_sampling_rounds={args.max_sampling_rounds} needs a data set whose rows can be picked, not a "
                "stream. Load it whole, or set `max_sampling_rounds` to 1."
            )

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """
        Train, from the beginning or from a checkpoint.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                Folder of a checkpoint, `"last"` or `"auto"`; see [`checkpoint.resolve`].

        Raises:
            `ValueError`: the checkpoint is not whole, or lies inside a rollout that is cut differently in this run.
        """
        found = checkpoint.resolve(resume_from_checkpoint, self.args.output_dir)
        if found is not None:
            checkpoint.check_split(self, found)
        if self.accelerator.is_main_process:
            print(self.plan, flush=True)
            del self.plan  # another call may have other arguments
        return super().train(found, *args, **kwargs)

    @cached_property
    def plan(self) -> str:
        """The plan that is printed when training starts."""
        return training_plan(self)

    # 1. The order of prompts and completions

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        self._sampler = EpochSampler(
            sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )
        return self._sampler

    @cached_property
    def _prompt_stream(self) -> PromptStream:
        """Prompts of dynamic sampling. Made at first use: a subclass's sampler may need what its `__init__` sets."""
        args, dataset = self.args, cast(Dataset, self.train_dataset)
        if type(self)._get_train_sampler is RolloutTrainer._get_train_sampler:
            return PromptStream(len(dataset), seed=args.seed, shuffle=self.shuffle_dataset)
        kept, sampler = self._sampler, self._get_train_sampler(dataset)
        self._sampler = kept  # the one that Transformers draws from
        return SampledPrompts(
            sampler,
            rollout=args.generation_batch_size,
            repeats=args.micro_steps_per_rollout,
            num_generations=self.num_generations,
        )

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        # Called once per accumulation window. An epoch ends with a short one, so windows cannot be told from `_step`.
        self._window_start = None  # only now may a resumed run restore `_step`
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _until_update(self) -> int:
        """Micro-steps, this one included, until the policy moves."""
        if self._window_start is None:
            self._window_start = self._step
        return self._window_start + self.current_gradient_accumulation_steps - self._step

    @profiling_decorator
    def _prepare_inputs(self, generation_batch):
        if self._mode == "eval":
            return self._finish_rollout(self._generate_and_score_completions(generation_batch))
        return self._buffered(generation_batch)

    def _buffered(self, generation_batch: list[dict[str, Any]]) -> Any:
        """What this micro-step trains on, of a rollout that is generated where the last one is used up."""
        args, until_update = self.args, self._until_update()
        rollout, position = divmod(self._step, args.micro_steps_per_rollout)
        if position == 0:
            steps = rows_of_steps(
                self._finish_rollout(self._generate_and_score_completions(generation_batch)),
                steps_per_generation=args.steps_per_generation,
                gradient_accumulation_steps=args.gradient_accumulation_steps,
                seed=args.seed,
                index=rollout,
                process=self.accelerator.process_index,
                processes=self.accelerator.num_processes,
            )
            self._buffered_inputs = self._micro_batches(steps, until_update)
        buffered: Any = self._buffered_inputs
        return buffered[self._step % args.steps_per_generation]

    def _micro_batches(self, steps: list[dict[str, Any]], until_update: int) -> Any:
        """One entry a micro-step, from the rows of each optimizer step; the policy moves after `until_update`."""
        n_batches = self.args.steps_per_generation // len(steps)
        return [batch for rows in steps for batch in micro_batches(rows, n_batches)]

    @contextmanager
    def _mode_kept(self) -> Iterator[None]:
        """TRL's continuous batching, or a `rollout_func`, may leave the model in training mode, which is its mode."""
        training = self.model.training
        try:
            yield
        finally:
            self.model.train(training)

    def _generate_single_turn(self, *inputs, **options):
        with self._mode_kept():
            return super()._generate_single_turn(*inputs, **options)

    def _generate(self, prompts: list):
        check_placed(self)
        with self._mode_kept(), self._clock.phase("generate"):
            if not (self.use_vllm and is_peft_model(self.model)):
                return super()._generate(prompts)
            if self._frozen_base is None:
                self._frozen_base = FrozenBase(self.model)
            generated = super()._generate(prompts)
            with self._clock.phase("sync"):
                self._frozen_base.restore()
            return generated

    # 2. A rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._mode == "eval" or self.args.max_sampling_rounds == 1:
            rollout = self._generate_once(inputs)
        else:
            rollout = dynamic_sampling.fill(self, self._generate_once, len(inputs))
        trl_contract.check_rollout(rollout)
        return rollout

    def _finish_rollout(self, rollout: dict[str, Any]) -> dict[str, Any]:
        """Add what is computed from a rollout, once no override of `_generate_and_score_completions` can change it."""
        if self._mode == "train":
            advantages = self.accelerator.gather(rollout["advantages"])
            self._advantage_range = (advantages.max() - advantages.min()).item()
        return rollout

    def _generate_once(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """One round of generation; `rewards_per_func` `[B, number of reward functions]` travels with the rows."""
        with self._recorded_rewards() as recorded:
            rollout = super()._generate_and_score_completions(inputs)
        rewards = recorded[-1]
        n_local = len(rollout["advantages"])
        rollout["rewards_per_func"] = rewards[self.accelerator.process_index * n_local :][:n_local]
        if self._mode == "train":
            self._completions_generated += len(rewards)
            self._metrics["train"]["completions/generated"] = [self._completions_generated]
        return rollout

    @contextmanager
    def _recorded_rewards(self) -> Iterator[list[torch.Tensor]]:
        """
        Keep the rewards over all processes, as the outermost `_calculate_rewards` returns them: a subclass may change
        what `super()` returned, or never call it.
        """
        outermost = self._calculate_rewards
        recorded: list[torch.Tensor] = []

        def calculate(*args, **kwargs):
            recorded.append(self._finite_rewards(outermost(*args, **kwargs)))
            return recorded[-1]

        with temporarily(self, _calculate_rewards=calculate):
            yield recorded

    @contextmanager
    def _metrics_kept(self) -> Iterator[None]:
        """Keep the training metrics as they are, but for the counts of tokens and completions."""
        kept = self._metrics["train"]
        self._metrics["train"] = defaultdict(list)
        yield
        counts = {name: self._metrics["train"][name] for name in ("num_tokens", "completions/generated")}
        self._metrics["train"] = kept
        kept.update(counts)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        with self._clock.phase("score"), checked(self):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        isolated = [reward for reward in self.reward_funcs if isinstance(reward, IsolatedReward)]
        if isolated:
            self._count_failures(isolated, len(completions))
        return rewards

    def _finite_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """Rewards `[N, number of reward functions]` with infinite ones as if their function could not score."""
        infinite = rewards.isinf()
        if infinite.any():
            names = [self.reward_func_names[i] for i in infinite.any(dim=0).nonzero().flatten()]
            logger.warning(
                f"Of {len(rewards)} completions, {int(infinite.any(dim=1).sum())} have an infinite reward, by "
                f"{', '.join(names)}: they count as unscorable. Fix the function, or have it return None."
            )
        return rewards.masked_fill(infinite, torch.nan)

    def _count_failures(self, rewards: list[IsolatedReward], n_completions: int):
        if self._mode == "eval":  # what the log reports, and the limit, are of training
            return
        counts = [sum(r.timeouts for r in rewards), sum(r.errors for r in rewards), len(rewards) * n_completions]
        gathered = self.accelerator.gather(torch.tensor([counts], device=self.accelerator.device))
        timeouts, errors, n_scores = gathered.sum(dim=0).tolist()
        for kind, count in (("reward/timeouts", timeouts), ("reward/errors", errors)):
            self._reward_failures[kind] = self._reward_failures.get(kind, 0) + count
        self._reward_failure_rate += _FAILURE_WEIGHT * ((timeouts + errors) / n_scores - self._reward_failure_rate)
        limit = self.args.max_reward_failure_rate
        if self._reward_failure_rate > limit:
            raise RuntimeError(
                f"max_reward_failure_rate={limit} is exceeded: {self._reward_failure_rate:.1%} of the completions of "
                f"about the last {1 / _FAILURE_WEIGHT:.0f} rounds of generation could not be scored, {timeouts} of "
                f"{n_scores} in the last one by running out of time and {errors} by errors. The warnings above say "
                "why: fix the reward function, give it more time or memory, or raise `max_reward_failure_rate`."
            )

    def _get_per_token_logps_and_entropies(self, *inputs, **options):
        with nullcontext() if torch.is_grad_enabled() else self._clock.phase("anchor"):
            return super()._get_per_token_logps_and_entropies(*inputs, **options)

    # 3. What is logged

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "grad_norm" in logs:
            metrics = self._metrics["train"]
            for phase, seconds in self._clock.seconds_per_step().items():
                metrics[f"opo/time/{phase}"].append(seconds)
            tokens_per_second = self._clock.tokens_per_second(self.state.num_input_tokens_seen)
            metrics["opo/tokens_per_second"].append(tokens_per_second)
            metrics["opo/advantage_range"].append(self._advantage_range)
            metrics["opo/gradient_response_efficiency"].append(
                gradient_response_efficiency(logs["grad_norm"], self._advantage_range)
            )
            for kind in self._reward_failures:
                metrics[kind].append(self._reward_failures[kind])
                self._reward_failures[kind] = 0
            metrics["opo/skipped_steps"].append(self._skipped_steps)
        super().log(logs, start_time)

    # 4. Numbers that go wrong

    _schedule_due = False  # whether a step was skipped after which the learning rate has not been looked after

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm)
        # Over all processes, so that they agree. DeepSpeed has skipped the step by now, and kept the norm of another.
        if self.is_deepspeed_enabled:
            skipped = self.accelerator.optimizer_step_was_skipped
        else:
            skipped = not math.isfinite(grad_norm)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self._schedule_due = skipped
        if skipped:
            model.zero_grad()  # optimizers leave parameters without a gradient alone
            self._skipped_steps += 1
            kept = self._keep_rows_of_step()
            logger.warning(
                f"Step {self.state.global_step + 1} is skipped: its gradient is not finite. Its rows are kept in "
                f"{str(kept)!r} and its like of the other processes."
            )
        return math.nan if skipped else grad_norm

    def _keep_rows_of_step(self) -> Path:
        end = (self._step - 1) % self.args.steps_per_generation + 1
        buffered: Any = self._buffered_inputs
        batches = buffered[max(end - self.current_gradient_accumulation_steps, 0) : end]
        rows = [part for batch in batches for part in (batch if isinstance(batch, list) else [batch])]
        path = Path(self.args.output_dir) / f"skipped_step_{self.accelerator.process_index}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"step": self.state.global_step + 1, "micro_batches": rows}, path)
        return path

    def _step_schedule(self) -> None:
        """
        Let the learning rate follow its schedule over a skipped step, too.

        Transformers does, but not where a gradient scaler (float16) or DeepSpeed says that it has skipped the step.
        """
        held = self._schedule_due and self.accelerator.optimizer_step_was_skipped
        self._schedule_due = False
        if held and not isinstance(self.lr_scheduler, (ReduceLROnPlateau, GreedyLR)):
            getattr(self.lr_scheduler, "scheduler", self.lr_scheduler).step()  # around DeepSpeed's own is a wrapper

    def _maybe_log_save_evaluate(self, *args, **named):
        self._step_schedule()  # after the step's learning rate was read, and before it is saved
        too_many = self._skipped_in_a_row >= self.args.max_skipped_steps
        if too_many:
            self.control.should_log = self.control.should_save = True
        super()._maybe_log_save_evaluate(*args, **named)
        if too_many:
            raise RuntimeError(
                f"max_skipped_steps={self.args.max_skipped_steps} is reached: as many optimizer steps in a row had a "
                f"gradient that is not finite. The checkpoint of step {self.state.global_step} has the weights from "
                "before them. Look at the rows in `skipped_step_*.pt`; often a lower `learning_rate`, or bfloat16 in "
                "place of float16, helps."
            )

    # 5. What a checkpoint holds

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            if self.args.should_save:
                checkpoint.make_way(folder)
            checkpoint.check_room(self, folder)
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                checkpoint.forget_replaced(folder.parent)
        except (Exception, CheckpointException) as error:
            checkpoint.give_up(self, folder, error)

    def _save_rng_state(self, output_dir: str):
        super()._save_rng_state(output_dir)
        checkpoint.save_state(self, Path(output_dir))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoint.seal(Path(output_dir))

    def _load_optimizer_and_scheduler(self, folder: str | None):
        if folder is None or checkpoint.lacking(Path(folder)) is not None:
            return super()._load_optimizer_and_scheduler(folder)
        # TRL reads its entropy controller from a file that it writes after the manifest, so that a kill can cut it
        # short. `restore_state` has the same numbers.
        return super(GRPOTrainer, self)._load_optimizer_and_scheduler(folder)

    def _load_rng_state(self, folder: str | None):
        super()._load_rng_state(folder)
        if folder is not None and checkpoint.lacking(Path(folder)) is None:
            checkpoint.restore_state(self, checkpoint.load_state(self, folder))
            checkpoint.restore_reference(self, folder)

    def _run_epoch(self, **named):
        # Resumed from the last step's checkpoint, Transformers would train one step more.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if self._sampler is not None:
            self._sampler.epoch = named["epoch"]
        super()._run_epoch(**named)
