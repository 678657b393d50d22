"""`OPOConfig`: TRL's `GRPOConfig` with the fields of Orthogonalized Policy Optimization, validated."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from transformers import GenerationConfig
from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from . import compatibility  # noqa: F401  checks versions
from .checks.secrets import Masked
from .fields import (
    COUNT,
    COUNT_OR_ZERO,
    FRACTION,
    NONE_OR_ONE,
    PART,
    POSITIVE,
    check_fields,
    defaults,
    documented,
    mapping_of,
    require,
)
from .objective import DriveScaling, Objective, Positivity, RatioForm, Reduction
from .objectives import NEAREST, OBJECTIVES, Push, objective_named
from .options import checked_options


logger = logging.getLogger(__name__)

AnchorCorrection = Literal["absorbed", "length_normalized", "sequence"]

# The usual optimizers among those that Transformers offers, which read no `optim_args`
_OPTIMIZERS_WITHOUT_ARGS = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "adafactor",
)


@dataclass
class ObjectiveConfig:
    """
    The fields of the objective, a part of [`OPOConfig`], which describes them.

    Raises:
        `ValueError`: `mu` and `chi2_radius` are both set, a range is none, `objective` does not exist or has no such
            option, or a field is set that it does not read.
    """

    objective: str | None = None
    loss_type: str | None = None
    objective_options: dict | str | None = None
    push: Push = "reward"
    positive_bounds: list[float] = field(default_factory=lambda: [1.0, 1.0])
    negative_bounds: list[float] = field(default_factory=lambda: [0.0, 1.0])
    alpha: Annotated[float, FRACTION] = 0.4
    escort_temperature: Annotated[float, POSITIVE] = 1.0
    adaptive_temperature: bool = False
    temperature_range: list[float] = field(default_factory=lambda: [0.2, 1.5])
    anchor_correction: AnchorCorrection = "absorbed"
    drive_scaling: DriveScaling = "none"
    mu: Annotated[float | None, POSITIVE] = None
    chi2_radius: Annotated[float | None, POSITIVE] = None
    positivity: Positivity = "none"
    positivity_epsilon: Annotated[float, PART] = 1e-3
    log_ratio_reduction: Reduction = "sum"
    log_ratio_clamp: Annotated[float | None, POSITIVE] = None
    ratio_form: RatioForm = "truncated"

    def check_objective(self) -> None:
        """Check the combinations of fields, and fill in the defaults that depend on other fields."""
        if self.mu is not None and self.chi2_radius is not None:
            raise ValueError(f"mu={self.mu} and chi2_radius={self.chi2_radius} are both set. Remove one of them.")
        for name in ("temperature_range", "positive_bounds", "negative_bounds"):
            value = getattr(self, name)
            # With an upper bound of 0, every weight would be 0, which excludes samples.
            ordered = len(value) == 2 and 0 <= value[0] <= value[1] > 0
            require(ordered, name, value, "two numbers of at least 0, the lower first, the upper above 0")
        if self.loss_type is not None:
            self._take_from_loss_type(self.loss_type)
        kind = objective_named(self.objective or "opo")
        for name, built_in in OBJECTIVES.items():
            if built_in is kind:  # also where it is named by its dotted path
                self.objective = name
        values = mapping_of("objective_options", self.objective_options)
        self.objective_options = checked_options(kind, str(self.objective), values)
        self._check_fields_of_others(kind)
        if self.mu is None and self.chi2_radius is None and "mu" in kind.fields:
            self.mu = 0.3
        # An objective of the user's, which is not in `OBJECTIVES`, may read any field.
        reads_clamp = "log_ratio_clamp" in kind.fields or self.objective not in OBJECTIVES
        if self.log_ratio_clamp is None and reads_clamp:
            self.log_ratio_clamp = 20.0 if self.log_ratio_reduction == "sum" else 5.0

    def _take_from_loss_type(self, loss_type: str) -> None:
        """Set `objective` to the loss that `loss_type`, TRL's field, names."""
        # `NEAREST`: a loss of TRL that this package does not have → the most similar one that it has
        allowed = f"one of {', '.join(OBJECTIVES)}; nearest is {NEAREST.get(loss_type, 'dapo')}"
        require(loss_type in OBJECTIVES, "loss_type", loss_type, allowed)
        if self.objective not in (None, loss_type):
            raise ValueError(
                f"objective={self.objective!r} and loss_type={loss_type!r} are both set, and each names a loss. "
                "Remove one of them."
            )
        self.objective = loss_type

    def _check_fields_of_others(self, kind: type[Objective]) -> None:
        """
        Reject a field that only other objectives of this package read, or that another field leaves without effect,
        unless it has its default. An objective of the user's may read any field.
        """
        if self.objective not in OBJECTIVES:
            return
        fields_off = kind(self).fields_off  # field without effect → the field whose value is the cause
        read_by_others = {name for other in OBJECTIVES.values() for name in other.fields}
        unread = (read_by_others - kind.fields) | fields_off.keys()
        for name, usual in defaults(type(self)).items():
            value = getattr(self, name)
            is_usual = (list(value) if isinstance(usual, list) else value) == usual
            if name not in unread or is_usual:
                continue
            cause = f"objective={self.objective!r}"
            if name in fields_off:
                other_field = fields_off[name]
                cause += f" and {other_field}={getattr(self, other_field)!r}"
            readers = [word for word, other in OBJECTIVES.items() if name in other.fields]
            instead = f", or set `objective` to {' or '.join(readers)}" if readers else ""
            raise ValueError(f"{name}={value!r} has no effect with {cause}. Remove `{name}`{instead}.")


def check_optim_args(args: Any) -> None:
    """
    Check that the optimizer and the schedule of the learning rate read the options that are set for them, which
    Transformers would ignore: a `ValueError`, but only a warning for a warm-up.
    """
    if args.lr_scheduler_kwargs and args.lr_scheduler_type in ("constant", "constant_with_warmup"):
        raise ValueError(
            f"lr_scheduler_kwargs={args.lr_scheduler_kwargs!r} has no effect on a constant learning rate. "
            "Remove it, or set `lr_scheduler_type`."
        )
    if args.warmup_steps and args.lr_scheduler_type in ("constant", "reduce_lr_on_plateau", "greedy"):
        logger.warning(
            f"warmup_steps={args.warmup_steps} has no effect with lr_scheduler_type={args.lr_scheduler_type.value!r}. "
            "Set it to 'constant_with_warmup'."
        )
    if args.optim_args and args.optim in _OPTIMIZERS_WITHOUT_ARGS:
        raise ValueError(f"optim_args={args.optim_args!r} has no effect on optim={args.optim.value!r}. Remove it.")


# Fields of the optimizer. Its state in a checkpoint would hide other values.
OPTIMIZER = ["optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"]

_CONTENT = """
    trainer dataset_name dataset_config dataset_train_split dataset_test_split dataset_settings columns levels fraction
    subset_seed shuffle_dataset disable_dropout test_fraction prompt_style instruction max_prompt_length tools
    environment_factory rollouts rollouts_model chat_template_kwargs num_generations max_completion_length
    max_tool_calling_iterations max_sampling_rounds max_staleness prefetch_rollouts temperature top_p top_k min_p
    repetition_penalty generation_kwargs vllm_structured_outputs_regex reward_funcs reward_model_name_or_path
    reward_weights overlong_cache scale_rewards multi_objective_aggregation importance_sampling_level
    epsilon epsilon_high delta
    sapo_temperature_neg sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos beta
    use_bias_correction_kl sync_ref_model ref_model_sync_steps ref_model_mixup_alpha entropy_coef top_entropy_quantile
    off_policy_mask_threshold mask_truncated_completions router_aux_loss_coef vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_importance_sampling_cap vllm_importance_sampling_clip_min
    vllm_importance_sampling_clip_max
"""
_OF_OBJECTIVE = [field.name for field in dataclasses.fields(ObjectiveConfig) if field.name != "loss_type"]
# Besides the model and the optimizer, the fields that decide what is trained: a run that resumes keeps them.
CONTENT = [*_OF_OBJECTIVE, *_CONTENT.split()]


@documented
@dataclass
class OPOConfig(ObjectiveConfig, Masked, GRPOConfig):
    r"""
    Configuration class for the [`OPOTrainer`].

    It adds the fields below to those of [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`]. A field that the
    objective does not read, such as `epsilon` with `objective="opo"`, is rejected unless it has its default.

    Parameters:
        > Parameters that control the objective

        objective (`str`, *optional*):
            Loss to train with: `opo`, `topr`, a loss of TRL's (`grpo`, `gspo`, `dr_grpo`, `dapo`, `cispo`, `sapo`,
            `vespo`), or the dotted path of a subclass of [`Objective`], such as `my_module.Mine`. By default `opo`, or
            what `loss_type` names. See docs/objectives.md.
        loss_type (`str`, *optional*):
            The same by TRL's name, so that scripts and recipes which set it train with that loss. By default, unlike
            in TRL, it names none. See docs/migrating.md.
        objective_options (`dict` or `str`, *optional*):
            Options that an objective of your own declares, by name, such as `{clip: 0.2}`. An option that is not set
            has the default of its class. The objectives of this package have none. See docs/objectives.md.

        > Parameters that control the target of OPO

        alpha (`float`, *optional*, defaults to `0.4`):
            Escort exponent α, in `[0, 1]`: how evenly completions are weighted. 1 weights all alike, so that nothing
            is learned; 0 weights them as P\* ∝ exp(A/τ) does. The default is the paper's. See docs/choosing.md.
        escort_temperature (`float`, *optional*, defaults to `1.0`):
            Temperature τ of P\*, positive, in units of the advantage: the smaller, the more the best completions
            count. The default leaves advantages as they are. The base τ₀ of `adaptive_temperature`. See
            docs/choosing.md.
        adaptive_temperature (`bool`, *optional*, defaults to `False`):
            Whether τ follows the policy's entropy and success in each rollout, as in the paper. Off by default, so
            that a target depends on the rewards of its group alone. See docs/methods/opo.md.
        temperature_range (`list[float]`, *optional*, defaults to `[0.2, 1.5]`):
            Lowest and highest adaptive τ, at least 0. The default is the paper's. See docs/methods/opo.md.
        anchor_correction (`str`, *optional*, defaults to `"absorbed"`):
            How the log-probability under the behaviour policy π_k enters the escort weight: `absorbed`, not at all;
            `length_normalized`, as its mean per token; or `sequence`, as its sum, as in the paper's Algorithm 1. With
            `sequence`, the least likely completion gets all the weight, so it is not the default. See
            docs/methods/opo.md.
        drive_scaling (`str`, *optional*, defaults to `"none"`):
            Divisor of the centred escort weight g: `none`, or its standard deviation over each `group` or over the
            rollout (`batch`). By default none, so that `alpha` decides the size of the push. See docs/methods/opo.md.
        mu (`float`, *optional*):
            χ² coefficient μ, positive: how strongly a completion is pulled back to its probability under the behaviour
            policy. 0.3 by default, unless `chi2_radius` is set: the paper's 1 fell behind with four optimizer steps
            per rollout and more. No effect with one. See docs/choosing.md.
        chi2_radius (`float`, *optional*):
            χ² radius ε of the target, positive, in place of `mu`: each rollout has μ = √(mean(g²)/ε). For another
            `alpha`, `escort_temperature` or `drive_scaling` than the default. See docs/choosing.md.
        positivity (`str`, *optional*, defaults to `"none"`):
            How targets v\* are kept at -1 or above, where the target of a probability is not negative: `none`;
            `stiffen`, by a larger μ; `clip`, each by itself; or `project`, onto the simplex of each group. By default
            none, as the bounded ratio needs no admissible target. See docs/methods/opo.md.
        positivity_epsilon (`float`, *optional*, defaults to `0.001`):
            Margin above -1 that `positivity: clip` keeps, in `(0, 1)`. Small by default, so that few targets change.
            See docs/methods/opo.md.

        > Parameters that control the log-ratio of OPO and TOPR

        log_ratio_reduction (`str`, *optional*, defaults to `"sum"`):
            The log-ratio Δ of a completion: the `sum` over its T tokens, as in the theorems, or the `mean`, for which
            μ has to be T times larger. See docs/choosing.md.
        log_ratio_clamp (`float`, *optional*):
            Bound on the value of |Δ| in nats, positive, but not on its gradient: no exponential overflows. By default
            20 for `log_ratio_reduction: sum`, and 5 for `mean`. See docs/methods/opo.md.
        ratio_form (`str`, *optional*, defaults to `"truncated"`):
            Form of OPO's loss: `truncated`, with the ratio π/π_k bounded at 2, so that its variance is finite; `log`,
            the paper's surrogate in Δ; or `exact`, in π/π_k - 1 without a bound. See docs/theory.md.

        > Parameters that control the push and the weight of TOPR

        push (`str`, *optional*, defaults to `"reward"`):
            What a completion is pushed by: `reward`, less the mean of its group; `advantage`, TRL's; or `escort`,
            OPO's centred escort weight. The default is TOPR's. See docs/reuse.md.
        positive_bounds (`list[float]`, *optional*, defaults to `[1.0, 1.0]`):
            Lowest and highest weight π/π_k of a completion with a positive push. The default, a weight of 1, is
            TOPR's. See docs/reuse.md.
        negative_bounds (`list[float]`, *optional*, defaults to `[0.0, 1.0]`):
            The same for a negative push; the default is TOPR's. `[0, 2]` for both is truncated REINFORCE. See
            docs/reuse.md.

        > Parameters that control rollouts and their reuse

        max_sampling_rounds (`int`, *optional*, defaults to `1`):
            Most rounds of generation per rollout. From 2 on, groups of equal rewards are replaced by groups of other
            prompts, as in DAPO; by default they stay, at no further cost. See docs/methods/baselines.md.
        max_staleness (`int`, *optional*, defaults to `0`):
            Number of earlier rollouts from which passes after the first draw groups, too: a completion is trained on
            at most so many rollouts after its own, and one more with `prefetch_rollouts`. 0, the default, replays
            nothing. Needs `num_iterations` of 2 or more. See docs/reuse.md.
        prefetch_rollouts (`int`, *optional*, defaults to `0`):
            Rollouts that a vLLM server generates while the policy trains, 0 or 1. With 1, completions are one rollout
            old, so it is not the default. See docs/async.md.
        rollouts (`str`, *optional*):
            Recorded completions to train on, in place of generated ones: a file, a folder of files, or a dataset on
            the Hub. See docs/reuse.md.
        rollouts_model (`str`, *optional*):
            Model that sampled `rollouts`. It computes their log-probabilities, also in place of recorded ones. See
            docs/reuse.md.
        save_rollouts (`bool`, *optional*, defaults to `False`):
            Whether to record all completions of training in the folder `rollouts` of `output_dir`. Off by default:
            it costs disk space and, if training needs none, a forward pass over each rollout. See docs/reuse.md.
        max_completions (`int`, *optional*):
            Number of completions to generate for training: the run ends with the first rollout that reaches it, and
            so does the schedule. By default `max_steps` or `num_train_epochs` ends it. See docs/reuse.md.

        > Parameters that control optimizer steps

        max_skipped_steps (`int`, *optional*, defaults to `10`):
            Number of optimizer steps in a row with a gradient that is not finite, and which are skipped, that ends the
            run. By default 10: a few may be chance. See docs/faults.md.
        plan_micro_batches (`bool`, *optional*, defaults to `True`):
            Whether to cut optimizer steps by the lengths of completions, and evenly over processes. The gradient is
            the same in less time. See docs/performance.md.
        max_tokens_per_micro_batch (`int`, *optional*):
            Most tokens in a micro-batch, with padding: long completions get smaller ones, which bounds memory. By
            default only `per_device_train_batch_size` does. Needs `plan_micro_batches`. See docs/performance.md.
        skip_inert_rows (`bool`, *optional*, defaults to `True`):
            Whether to leave out the computation of completions at rest, whose gradient is 0. The gradient is the same;
            means over completions, such as `entropy`, lack them. See docs/performance.md.

    Raises:
        `ValueError`: a value is out of its range, fields exclude each other, or the objective does not read a field.
    """

    max_sampling_rounds: Annotated[int, COUNT] = 1
    max_staleness: Annotated[int, COUNT_OR_ZERO] = 0
    prefetch_rollouts: Annotated[int, NONE_OR_ONE] = 0
    rollouts: str | None = None
    rollouts_model: str | None = None
    save_rollouts: bool = False
    max_completions: Annotated[int | None, COUNT] = None
    max_skipped_steps: Annotated[int, COUNT] = 10
    plan_micro_batches: bool = True
    max_tokens_per_micro_batch: Annotated[int | None, COUNT] = None
    skip_inert_rows: bool = True

    def __post_init__(self):
        """Check each field by itself, then what Transformers and TRL check, then combinations."""
        scaling = str(self.scale_rewards).lower()
        if scaling in ("true", "yes"):  # as command lines and recipes say it
            self.scale_rewards = "group"
        elif scaling in ("false", "no"):
            self.scale_rewards = "none"
        check_fields(self)
        self._choose_metric_for_best_model()
        if self.bf16 is None and not (self.use_cpu or is_torch_bf16_gpu_available()):
            self.bf16 = False  # TRL's default, true, would be an error on this machine
        super().__post_init__()
        if self._schedule_follows_metric:
            mode = {"mode": "max" if self.greater_is_better else "min"}
            self.lr_scheduler_kwargs = mode | cast(dict, self.lr_scheduler_kwargs or {})
        if self.n_gpu > 1:  # a process that sees several devices: TRL would split the model over them
            self.model_init_kwargs = {"device_map": {"": 0}, **cast(dict, self.model_init_kwargs or {})}
            self._n_gpu = 1  # what `n_gpu` returns: the number of devices that this process uses
        level = self.importance_sampling_level
        require(level in ("token", "sequence"), "importance_sampling_level", level, "'token' or 'sequence'")
        self.check_objective()
        check_optim_args(self)
        self._check_generation()
        self._check_rollouts()
        self._check_updates()

    @property
    def _schedule_follows_metric(self) -> bool:
        return self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")

    def _choose_metric_for_best_model(self) -> None:
        """
        Where Transformers chooses the best checkpoint, or a schedule follows a metric, make it the reward by default,
        in place of the loss. A `ValueError` if the loss itself is asked for without `beta`.
        """
        is_followed = self.load_best_model_at_end or self.save_strategy == "best" or self._schedule_follows_metric
        if is_followed and self.metric_for_best_model is None:
            self.metric_for_best_model, self.greater_is_better = "reward", True
        is_loss = self.metric_for_best_model in ("loss", "eval_loss") and not self.beta
        allowed = "'reward': the loss does not say how good the policy is"
        require(not (is_followed and is_loss), "metric_for_best_model", self.metric_for_best_model, allowed)

    def _check_rollouts(self) -> None:
        """Check the combinations of fields of rollouts and their reuse."""
        if self.max_staleness and (self.num_iterations == 1 or self.is_on_policy):
            raise ValueError(
                f"max_staleness={self.max_staleness} replays nothing. Set `num_iterations` to 2 or more, and "
                f"`gradient_accumulation_steps` to at most {self.steps_per_generation}."
            )
        if self.rollouts and (self.max_sampling_rounds > 1 or self.remove_unused_columns or self.use_vllm):
            raise ValueError(
                f"rollouts={self.rollouts!r} cannot be combined with `use_vllm`, `max_sampling_rounds` above 1, or "
                "`remove_unused_columns`. Remove these."
            )
        if self.prefetch_rollouts:
            has_server = self.use_vllm and self.vllm_mode == "server"
            allowed = "0, or generate with `use_vllm` and `vllm_mode: server`"
            require(has_server, "prefetch_rollouts", self.prefetch_rollouts, allowed)
            knows_prompts = self.max_sampling_rounds == 1 and self.rollouts is None
            allowed = "0: prompts of `max_sampling_rounds` above 1, and `rollouts`, are not known in advance"
            require(knows_prompts, "prefetch_rollouts", self.prefetch_rollouts, allowed)
            changing = fields_of_sampling(self, CHANGES_OF_SAMPLING)
            allowed = f"0, or sample without {changing}, which would be part of the log-ratio"
            require(not changing, "prefetch_rollouts", self.prefetch_rollouts, allowed)
            # The log-ratio is to the policy that the server has sampled from, which leaves nothing to correct.
            self.vllm_importance_sampling_correction = False
        has_rollouts = bool(self.rollouts) or self.rollouts_model is None
        allowed = "None without `rollouts`, whose log-probabilities it computes"
        require(has_rollouts, "rollouts_model", self.rollouts_model, allowed)
        for name, value in (("scale_rewards", "batch"), ("multi_objective_aggregation", "normalize_then_sum")):
            fits = self.max_sampling_rounds == 1 or getattr(self, name) != value
            allowed = "another value with `max_sampling_rounds`: it normalizes over groups that are replaced later"
            require(fits, name, value, allowed)

    def _check_updates(self) -> None:
        """
        Check what would take an optimizer step before all its micro-batches are computed, could not be resumed, or
        would change the coefficient of the entropy bonus.
        """
        optim: Any = self.optim
        is_cut = self.max_tokens_per_micro_batch is not None and updates_in_backward(self)
        allowed = f"None: optim={optim.value!r} takes a step in every backward pass"
        require(not is_cut, "max_tokens_per_micro_batch", self.max_tokens_per_micro_batch, allowed)
        for name in ("enable_jit_checkpoint", "ignore_data_skip"):
            allowed = (
                "False: it saves inside an optimizer step, or loses a rollout, so no run could be resumed exactly"
            )
            require(not getattr(self, name), name, True, allowed)
        splits: Any = self.accelerator_config
        allowed = "{'split_batches': False}: each process takes its own batch of prompts"
        require(not splits.split_batches, "accelerator_config", {"split_batches": True}, allowed)
        allowed = "False: the entropy bonus has a constant `entropy_coef`"
        require(not self.use_adaptive_entropy, "use_adaptive_entropy", True, allowed)

    def _check_generation(self) -> None:
        """Check options of generation that would sample from another distribution than the policy's, or do nothing."""
        options: dict[str, Any] = cast(Any, self.generation_kwargs) or {}
        for name, value in options.items():
            if fault := self._fault_of_generation(name, value):
                raise ValueError(f"generation_kwargs={options!r}: {name!r} {fault}.")
        # Without options that are `None`, which would open what another field has set; and with 2.0 for 2 where
        # Transformers takes nothing but a float.
        if options:
            defaults = GenerationConfig._get_default_generation_params()
            self.generation_kwargs = {}
            for name, value in options.items():
                is_float = isinstance(defaults.get(name), float)
                if value is not None:
                    self.generation_kwargs[name] = float(value) if is_float and isinstance(value, int) else value

    def _fault_of_generation(self, name: str, value: Any) -> str | None:
        """
        What is wrong with the option `name` of `generation_kwargs`, and what to do, as the rest of a sentence that
        begins with the name; `None` if it is fine.
        """
        # Options that may only have the value by which the policy is sampled and trained
        required: dict[str, Any] = {"temperature": self.temperature, "do_sample": True}
        required |= dict.fromkeys(("max_new_tokens", "max_tokens"), self.max_completion_length)
        required |= dict.fromkeys(("num_beams", "guidance_scale", "num_return_sequences", "n"), 1)
        if name in required and value not in (None, required[name]):
            return (
                f"must be {required[name]!r}: `temperature` and `max_completion_length` say how to sample. Remove it"
            )
        if name == "stop" and value and self.mask_truncated_completions:
            return "ends completions that TRL then takes for truncated. Remove `mask_truncated_completions`"
        if name == "logprobs" and value and self.use_vllm:
            return "puts other tokens' log-probabilities in place of those that were sampled. Remove it"
        if name == "seed" and value is not None and self.use_vllm and self.vllm_mode == "colocate":
            return "gives all completions of a prompt the same random numbers. Remove it"
        if not self.use_vllm and name not in vars(GenerationConfig()):
            return "is not an option of GenerationConfig. Remove it"
        return None

    @property
    def micro_steps_per_rollout(self) -> int:
        """Forward and backward passes per rollout."""
        return self.steps_per_generation * self.num_iterations

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts that the data loader offers for a rollout."""
        return self.generation_batch_size // self.num_generations

    @property
    def optimizer_steps_per_rollout(self) -> float:
        """Optimizer steps per rollout; below 1 when one step spans several rollouts."""
        return self.micro_steps_per_rollout / self.gradient_accumulation_steps

    @property
    def is_on_policy(self) -> bool:
        """Whether every rollout is generated for a single optimizer step, so that the log-ratio is always 0."""
        return self.rollouts is None and not self.prefetch_rollouts and self.is_aligned

    @property
    def is_aligned(self) -> bool:
        """Whether every rollout serves a single optimizer step: TRL then scores no completion before its step."""
        return self.gradient_accumulation_steps % self.micro_steps_per_rollout == 0


# Fields that exclude unlikely tokens from sampling, with the values by which they exclude none
CUT_OFFS: dict[str, tuple] = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0)}

# These, and fields that change the probabilities in another way, also vLLM's own
CHANGES_OF_SAMPLING: dict[str, tuple] = {
    **CUT_OFFS,
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "min_tokens": (None, 0),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs"), (None,)),
    "vllm_structured_outputs_regex": (None,),
}


def fields_of_sampling(args: Any, neutral_values: Mapping[str, tuple]) -> str:
    """
    Those of the fields named in `neutral_values` that have none of the values there, as text such as `top_p=0.9`;
    empty if there are none.
    """
    # `generation_kwargs` win over the fields, as in generation.
    fields = {name: getattr(args, name, None) for name in neutral_values} | (args.generation_kwargs or {})
    return ", ".join(
        f"{name}={fields[name]}" for name, neutral in neutral_values.items() if fields[name] not in neutral
    )


def updates_in_backward(args: Any) -> bool:
    """Whether the optimizer takes a step in every backward pass, which leaves no gradient."""
    return any(kind in args.optim for kind in ("layerwise", "lomo"))
