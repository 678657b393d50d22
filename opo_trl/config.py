"""`OPOConfig`: TRL's `GRPOConfig` with the fields of Orthogonalized Policy Optimization, validated."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from transformers import GenerationConfig
from trl import GRPOConfig

from . import trl  # noqa: F401  checks versions
from .checks.secrets import Masked
from .fields import (
    COUNT,
    COUNT_OR_ZERO,
    FRACTION,
    NONE_OR_ONE,
    PART,
    POSITIVE,
    check_fields,
    default,
    require,
    setting,
)
from .objective import DriveScaling, Objective, Positivity, RatioForm, Reduction
from .objectives import NEAREST, OBJECTIVES, Push, objective_named


AnchorCorrection = Literal["absorbed", "length_normalized", "sequence"]

# Of the optimizers that Transformers offers, the usual ones that read no `optim_args`.
_WITHOUT_ARGS = ("adamw_torch", "adamw_torch_fused", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adafactor")


@dataclass
class ObjectiveConfig:
    """
    The fields of the objective, a part of [`OPOConfig`].

    Raises:
        `ValueError`: `mu` and `chi2_radius` are both set, a range is none, `objective` does not exist, or a field is
            set that it does not read.
    """

    objective: str | None = setting(
        None, "`'opo'`, `'topr'`, a loss of TRL's ([`~opo_trl.objectives`]), or the dotted path of an [`Objective`]."
    )
    loss_type: str | None = setting(None, "TRL's name of an objective, for scripts that set it.")
    push: Push = setting(
        "reward", "Of TOPR, the push: `'reward'` less its group's mean, `'advantage'`, or OPO's `'escort'` weight."
    )
    positive_bounds: list[float] = setting(
        lambda: [1.0, 1.0], "Of TOPR: bounds on the weight π/π_k of a completion whose push is positive."
    )
    negative_bounds: list[float] = setting(
        lambda: [0.0, 1.0], "The same where it is negative. `[0, 2]` for both is truncated REINFORCE."
    )
    alpha: Annotated[float, FRACTION] = setting(
        0.4, r"Escort exponent α in `[0, 1]`. At 1 nothing is learned; 0 gives the oracle P\* ∝ exp(A/τ)."
    )
    escort_temperature: Annotated[float, POSITIVE] = setting(
        1.0, r"Temperature τ of P\*; smaller is sharper. The base τ₀ of `adaptive_temperature`."
    )
    adaptive_temperature: bool = setting(
        False, "Whether τ follows the policy's entropy and success rate, see [`OPO.temperature`]."
    )
    temperature_range: list[float] = setting(lambda: [0.2, 1.5], "Lowest and highest adaptive τ.")
    anchor_correction: AnchorCorrection = setting(
        "absorbed", "How log π_k enters the escort weight: not at all, as its mean per token, or as its sum."
    )
    drive_scaling: DriveScaling = setting(
        "none", "Divisor of the drive g: its standard deviation over the `'group'` or the rollout (`'batch'`)."
    )
    mu: Annotated[float | None, POSITIVE] = setting(
        None, "χ² coefficient μ: 0.3 unless `chi2_radius` is set. No effect when a rollout serves a single step."
    )
    chi2_radius: Annotated[float | None, POSITIVE] = setting(
        None, "χ² radius ε of the target: each rollout then uses μ = √(mean(g²)/ε). Excludes `mu`."
    )
    positivity: Positivity = setting(
        "none", r"How to keep 1 + v\* ≥ 0: `'stiffen'` μ, `'clip'` v\*, or `'project'` it on each group's simplex."
    )
    positivity_epsilon: Annotated[float, PART] = setting(1e-3, "Margin of `positivity='clip'`, in `(0, 1)`.")
    log_ratio_reduction: Reduction = setting(
        "sum", "Δ of a completion: the `'sum'` over tokens, or the `'mean'`, with a trust region T times softer."
    )
    log_ratio_clamp: Annotated[float | None, POSITIVE] = setting(
        None, "Bound on the value of |Δ|, not on its gradient: by default 20 for `'sum'` and 5 for `'mean'`."
    )
    ratio_form: RatioForm = setting(
        "truncated", "Loss in π/π_k, bounded at 2; or the paper's, in u = Δ (`'log'`) or in u = π/π_k − 1 (`'exact'`)."
    )

    def check_objective(self) -> None:
        """Check the combinations of fields, and fill in the defaults that depend on other fields."""
        if self.mu is not None and self.chi2_radius is not None:
            raise ValueError(f"mu={self.mu} and chi2_radius={self.chi2_radius} are both set. Remove one of them.")
        for name in ("temperature_range", "positive_bounds", "negative_bounds"):
            value = getattr(self, name)
            ordered = len(value) == 2 and 0 <= value[0] <= value[1] > 0  # a weight of 0 would exclude samples
            require(ordered, name, value, "two numbers of at least 0, the lower first, the upper above 0")
        if self.loss_type is not None:
            nearest = f"one of {', '.join(OBJECTIVES)}; nearest is {NEAREST.get(self.loss_type, 'dapo')}"
            require(self.loss_type in OBJECTIVES, "loss_type", self.loss_type, nearest)
            if self.objective not in (None, self.loss_type):
                both = f"objective={self.objective!r} and loss_type={self.loss_type!r}"
                raise ValueError(f"{both} are both set, and each names a loss. Remove one of them.")
            self.objective = self.loss_type
        kind = objective_named(self.objective or "opo")
        self.objective = next((word for word, own in OBJECTIVES.items() if own is kind), self.objective)
        self._check_fields_of_others(kind)
        if self.mu is None and self.chi2_radius is None and "mu" in kind.fields:
            self.mu = 0.3
        reads_clamp = "log_ratio_clamp" in kind.fields or self.objective not in OBJECTIVES
        if self.log_ratio_clamp is None and reads_clamp:
            self.log_ratio_clamp = 20.0 if self.log_ratio_reduction == "sum" else 5.0

    def _check_fields_of_others(self, kind: type[Objective]) -> None:
        """Reject fields of another objective of ours; one of the user's may read any."""
        if self.objective not in OBJECTIVES:
            return
        unread = {name for other in OBJECTIVES.values() for name in other.fields - kind.fields}
        unread |= kind.unread_fields(self)
        mode = "" if kind.mode_field is None else f" and {kind.mode_field}={getattr(self, kind.mode_field)!r}"
        for each in dataclasses.fields(self):
            value, usual = getattr(self, each.name), default(each)
            if each.name in unread and (list(value) if isinstance(usual, list) else value) != usual:
                readers = [name for name, other in OBJECTIVES.items() if each.name in other.fields]
                instead = f", or set `objective` to {' or '.join(readers)}" if readers else ""
                said = f"{each.name}={value!r} has no effect with objective={self.objective!r}{mode}"
                raise ValueError(f"{said}. Remove `{each.name}`{instead}.")


def check_optim_args(args: Any) -> None:
    """Check that optimizer and schedule read their options, which Transformers would ignore."""
    if args.lr_scheduler_kwargs and args.lr_scheduler_type in ("constant", "constant_with_warmup"):
        said = f"lr_scheduler_kwargs={args.lr_scheduler_kwargs!r} has no effect on a constant learning rate"
        raise ValueError(f"{said}. Remove it, or set `lr_scheduler_type`.")
    if args.warmup_steps and args.lr_scheduler_type in ("constant", "reduce_lr_on_plateau", "greedy"):
        said = "warmup_steps=%s has no effect with lr_scheduler_type=%r. Set it to 'constant_with_warmup'."
        logging.getLogger(__name__).warning(said, args.warmup_steps, args.lr_scheduler_type.value)
    if args.optim_args and args.optim in _WITHOUT_ARGS:
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
# Besides the model and the optimizer, the fields that decide what is trained: a run that resumes keeps them.
CONTENT = [each.name for each in dataclasses.fields(ObjectiveConfig) if each.name != "loss_type"] + _CONTENT.split()


@dataclass
class OPOConfig(ObjectiveConfig, Masked, GRPOConfig):
    r"""
    Configuration class for the [`OPOTrainer`].

    It adds parameters to those of [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`]. Parameters that the
    objective does not read, such as `epsilon` with `objective: opo`, are rejected unless they have their default.

    Raises:
        `ValueError`: a value is out of its range, fields exclude each other, or the objective does not read a field.
    """

    max_sampling_rounds: Annotated[int, COUNT] = setting(
        1, "Most rounds of generation per rollout: from 2, zero-variance groups are replaced, as in DAPO."
    )
    max_staleness: Annotated[int, COUNT_OR_ZERO] = setting(
        0, "Earlier rollouts from which passes after the first draw groups, too: [`~rollout.replay`]."
    )
    prefetch_rollouts: Annotated[int, NONE_OR_ONE] = setting(
        0, "Rollouts that a vLLM server generates while the policy trains, 0 or 1: completions are one rollout old."
    )
    rollouts: str | None = setting(
        None, "Recorded rollouts to train on, in place of `train_dataset`: [`~data.rollouts.load_rollouts`]."
    )
    rollouts_model: str | None = setting(
        None, "Model that sampled them: computes their log-probabilities, also in place of recorded ones."
    )
    save_rollouts: bool = setting(
        False, "Whether to record all completions of training in the folder `rollouts` of `output_dir`."
    )
    max_completions: Annotated[int | None, COUNT] = setting(
        None, "Number of completions to generate for training: the run ends with the first rollout that reaches it."
    )
    max_skipped_steps: Annotated[int, COUNT] = setting(
        10, "Optimizer steps in a row with a non-finite gradient, which are skipped, that end the run."
    )
    plan_micro_batches: bool = setting(
        True, "Whether to cut optimizer steps by the lengths of samples, evenly over processes."
    )
    max_tokens_per_micro_batch: Annotated[int | None, COUNT] = setting(
        None, "Most tokens in a planned micro-batch, with padding: long samples get smaller ones."
    )
    skip_inert_rows: bool = setting(
        True, "Whether to skip completions without a gradient; only some means leave them out, as `entropy`."
    )

    def __post_init__(self):
        words = {"true": "group", "yes": "group", "false": "none", "no": "none"}  # as command lines and recipes say it
        self.scale_rewards = words.get(str(self.scale_rewards).lower(), self.scale_rewards)
        check_fields(self)
        by_metric = self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        follows = self.load_best_model_at_end or self.save_strategy == "best" or by_metric
        if follows and self.metric_for_best_model is None:  # Transformers would take the loss, which says little
            self.metric_for_best_model, self.greater_is_better = "reward", True
        wanted = "'reward': the loss does not say how good the policy is"
        is_loss = follows and self.metric_for_best_model in ("loss", "eval_loss") and not self.beta
        require(not is_loss, "metric_for_best_model", self.metric_for_best_model, wanted)
        super().__post_init__()
        if by_metric:
            mode = {"mode": "max" if self.greater_is_better else "min"}
            self.lr_scheduler_kwargs = mode | cast(dict, self.lr_scheduler_kwargs or {})
        if self.n_gpu > 1:  # a process that sees several devices: TRL would split the model over them
            self.model_init_kwargs = {"device_map": {"": 0}, **cast(dict, self.model_init_kwargs or {})}
            self._n_gpu = 1
        level = self.importance_sampling_level
        require(level in ("token", "sequence"), "importance_sampling_level", level, "'token' or 'sequence'")
        self.check_objective()
        check_optim_args(self)
        self._check_generation()
        if self.max_staleness and (self.num_iterations == 1 or self.is_on_policy):
            fix = f"2 or more, and `gradient_accumulation_steps` to at most {self.steps_per_generation}"
            raise ValueError(f"max_staleness={self.max_staleness} replays nothing. Set `num_iterations` to {fix}.")
        if self.rollouts and (self.max_sampling_rounds > 1 or self.remove_unused_columns or self.use_vllm):
            others = "`use_vllm`, `max_sampling_rounds` above 1, or `remove_unused_columns`. Remove these"
            raise ValueError(f"rollouts={self.rollouts!r} cannot be combined with {others}.")
        if self.prefetch_rollouts:
            has_server = self.use_vllm and self.vllm_mode == "server"
            wanted = "0, or generate with `use_vllm` and `vllm_mode: server`"
            require(has_server, "prefetch_rollouts", self.prefetch_rollouts, wanted)
            more = self.max_sampling_rounds > 1 or self.rollouts is not None
            wanted = "0: prompts of `max_sampling_rounds` above 1, and `rollouts`, are not known in advance"
            require(not more, "prefetch_rollouts", self.prefetch_rollouts, wanted)
            # The log-ratio is to the policy that the server has sampled from, which leaves nothing to correct.
            self.vllm_importance_sampling_correction = False
        wanted = "None without `rollouts`, whose log-probabilities it computes"
        require(self.rollouts_model is None or bool(self.rollouts), "rollouts_model", self.rollouts_model, wanted)
        wanted = f"None: optim={self.optim.value!r} takes a step in every backward pass"
        is_cut = self.max_tokens_per_micro_batch is not None and updates_in_backward(self)
        require(not is_cut, "max_tokens_per_micro_batch", self.max_tokens_per_micro_batch, wanted)
        for name in ("enable_jit_checkpoint", "ignore_data_skip"):
            wanted = "False: it saves inside an optimizer step, or loses a rollout, so no run could be resumed exactly"
            require(not getattr(self, name), name, True, wanted)
        wanted = "False: the entropy bonus has a constant `entropy_coef`"
        require(not self.use_adaptive_entropy, "use_adaptive_entropy", True, wanted)
        for name, value in (("scale_rewards", "batch"), ("multi_objective_aggregation", "normalize_then_sum")):
            wanted = "another value with `max_sampling_rounds`: it normalizes over groups that are replaced later"
            require(self.max_sampling_rounds == 1 or getattr(self, name) != value, name, value, wanted)

    def _check_generation(self):
        """Check options of generation that would sample from another distribution than the policy's, or do nothing."""
        options: dict[str, Any] = cast(Any, self.generation_kwargs) or {}
        needed: dict[str, Any] = {"temperature": self.temperature, "do_sample": True}
        needed |= dict.fromkeys(("max_new_tokens", "max_tokens"), self.max_completion_length)
        needed |= dict.fromkeys(("num_beams", "guidance_scale", "num_return_sequences", "n"), 1)
        for key, value in options.items():
            fix = None
            if key in needed and value not in (None, needed[key]):
                fix = (
                    f"must be {needed[key]!r}: `temperature` and `max_completion_length` say how to sample. Remove it"
                )
            elif key == "stop" and value and self.mask_truncated_completions:
                fix = "ends completions that TRL then takes for truncated. Remove `mask_truncated_completions`"
            elif key == "seed" and value is not None and self.use_vllm and self.vllm_mode == "colocate":
                fix = "gives all completions of a prompt the same random numbers. Remove it"
            elif not self.use_vllm and key not in vars(GenerationConfig()):
                fix = "is not an option of GenerationConfig. Remove it"
            if fix:
                raise ValueError(f"generation_kwargs={options!r}: {key!r} {fix}.")
        if options:  # `None` would open what another field has set, and Transformers takes no 2 for 2.0.
            usual = GenerationConfig._get_default_generation_params()
            self.generation_kwargs = {
                key: float(value) if isinstance(value, int) and isinstance(usual.get(key), float) else value
                for key, value in options.items()
                if value is not None
            }

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


def updates_in_backward(args: Any) -> bool:
    """Whether the optimizer takes a step in every backward pass, which leaves no gradient."""
    return any(kind in args.optim for kind in ("layerwise", "lomo"))
