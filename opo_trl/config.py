"""`OPOConfig`: TRL's `GRPOConfig` with the fields of Orthogonalized Policy Optimization, validated."""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from trl import GRPOConfig

from .checks import devices, ranges
from .checks.ranges import require
from .checks.secrets import Masked
from .checks.silent import check_options
from .fields import COUNT, DATA, FRACTION, OBJECTIVE, POSITIVE, Range, default, integer, setting
from .objective import DriveScaling, Objective, Positivity, RatioForm, Reduction
from .objectives import NEAREST, OBJECTIVES, Push, objective_named


AnchorCorrection = Literal["absorbed", "length_normalized", "sequence"]


# Field that acts on supervised labels only → what is wrong with it. Only non-default values are rejected.
REJECTED_FIELDS = {"label_smoothing_factor": "it acts on supervised labels only"}


BOUNDS = Range(0, text="two numbers of at least 0, the lower first")


@dataclass
class ObjectiveConfig:
    """
    The fields of OPO's objective, which [`OPOConfig`] documents, for all configurations that have them.

    Raises:
        `ValueError`: `mu` and `chi2_radius` are both set, a range is none, `objective` does not exist, or a field is
            set that it does not read.
    """

    objective: Annotated[str | None, OBJECTIVE] = setting(
        None,
        "`'opo'`, the default: the paper's objective, [`OPO`]; `'topr'`: REINFORCE with bounded importance "
        "weights, [`TOPR`]; `'grpo'`, `'gspo'`, `'dr_grpo'`, `'dapo'`, `'cispo'`, `'sapo'` or `'vespo'`: TRL's "
        "loss of that name ([`~opo_trl.objectives`]); or the dotted path of a subclass of [`Objective`].",
    )
    loss_type: Annotated[str | None, OBJECTIVE] = setting(
        None,
        "TRL's name of an objective, for scripts that set it.",
    )
    push: Annotated[Push, OBJECTIVE] = setting(
        "reward",
        "What pushes a completion: `'reward'`: its reward less the mean of its group; `'advantage'`; `'escort'`: "
        "OPO's centred escort weight, by `alpha` and `escort_temperature`.",
    )
    positive_bounds: Annotated[list[float], OBJECTIVE, BOUNDS] = setting(
        lambda: [1.0, 1.0],
        "Bounds on the weight π/π_k of the whole completion, without gradient, where the push is positive.",
    )
    negative_bounds: Annotated[list[float], OBJECTIVE, BOUNDS] = setting(
        lambda: [0.0, 1.0],
        "The same where the push is negative. `[0, 2]` for both with `push: reward` is truncated REINFORCE.",
    )
    alpha: Annotated[float, OBJECTIVE, FRACTION] = setting(
        0.4,
        r"Escort exponent α in `[0, 1]`. 1 gives every completion of a group the same weight, so that nothing is "
        r"learned; 0 gives the weights of the oracle P\* ∝ exp(A/τ).",
    )
    escort_temperature: Annotated[float, OBJECTIVE, POSITIVE] = setting(
        1.0,
        r"Temperature τ of P\*, positive. Smaller is sharper. With `adaptive_temperature` this is the base τ₀.",
    )
    adaptive_temperature: Annotated[bool, OBJECTIVE] = setting(
        False,
        "Whether to set τ per rollout from the behaviour policy's entropy and the rollout's success rate, see "
        "[`OPO.temperature`].",
    )
    temperature_range: Annotated[
        list[float], OBJECTIVE, Range(0, ends="(]", text="two positive numbers, the lower first")
    ] = setting(
        lambda: [0.2, 1.5],
        "Lowest and highest adaptive τ.",
    )
    anchor_correction: Annotated[AnchorCorrection, OBJECTIVE] = setting(
        "absorbed",
        "How log π_k, the log-probability under the behaviour policy (the paper's anchor), enters the escort "
        "weight: `'absorbed'`: not at all, since the samples come from π_k; `'length_normalized'`: as the mean "
        "per token; `'sequence'`: as the sum over the completion, which puts all weight on the least likely "
        "completion when completions are long.",
    )
    drive_scaling: Annotated[DriveScaling, OBJECTIVE] = setting(
        "none",
        "Divisor of the centred escort weight (the drive g = ω − E[ω]): its standard deviation over the `'group'`"
        " or over the rollout (`'batch'`), or nothing (`'none'`).",
    )
    mu: Annotated[float | None, OBJECTIVE, POSITIVE] = setting(
        None,
        "χ² coefficient μ (the paper's stiffness), positive. Defaults to 0.3 if `chi2_radius` is not set either. "
        "The paper's 1 is too large when a rollout serves many optimizer steps (`docs/choosing.md`). It has no "
        "effect when a rollout serves a single step.",
    )
    chi2_radius: Annotated[float | None, OBJECTIVE, POSITIVE] = setting(
        None,
        "χ² radius ε of the target, positive: each rollout then uses μ = √(mean(g²)/ε). Excludes `mu`.",
    )
    positivity: Annotated[Positivity, OBJECTIVE] = setting(
        "none",
        r"How to keep 1 + v\* ≥ 0: `'none'`, `'stiffen'` (raise μ as much as needed), `'clip'` (v\* ≥ −1 + "
        r"`positivity_epsilon`) or `'project'` (Euclidean projection on the simplex of each group).",
    )
    positivity_epsilon: Annotated[float, OBJECTIVE, Range(0, 1, ends="()")] = setting(
        1e-3,
        "Margin of `positivity='clip'`, in `(0, 1)`.",
    )
    log_ratio_reduction: Annotated[Reduction, OBJECTIVE] = setting(
        "sum",
        "`'sum'`: Δ is the log-ratio of the whole completion, and `opo/chi2` the χ² divergence of the policy; the"
        " loss is divided by the rollout's mean completion length, so that gradient norms are comparable to "
        "GRPO's. `'mean'`: Δ is divided by the completion's length T, which makes the trust region T times softer"
        " at the same μ.",
    )
    log_ratio_clamp: Annotated[float | None, OBJECTIVE, POSITIVE] = setting(
        None,
        "Bound on the value of |Δ|, not on its gradient; positive. Defaults to 20 for `'sum'` and 5 for `'mean'`."
        " `opo/frac_clamped` is the fraction of completions beyond it.",
    )
    ratio_form: Annotated[RatioForm, OBJECTIVE] = setting(
        "truncated",
        "Form of the loss: `'truncated'`: the gradient of the χ²-regularized reward, with π/π_k bounded at 2; "
        "`'log'`: the paper's surrogate, in u = Δ; `'exact'`: in u = π/π_k − 1, unbounded. Where completions are "
        "reused or stale, the last two also have the weight min(π/π_k, 2).",
    )

    def check_objective(self) -> None:
        """Check the combinations of fields, and fill in the defaults that depend on other fields."""
        if self.mu is not None and self.chi2_radius is not None:
            raise ValueError(
                f"mu={self.mu} and chi2_radius={self.chi2_radius} are both set, but chi2_radius determines mu. "
                "Remove one of them."
            )
        ranges_ = {
            "temperature_range": "positive numbers",
            **dict.fromkeys(("positive_bounds", "negative_bounds"), ""),
        }
        for name, wanted in ranges_.items():
            low_high = getattr(self, name)
            ordered = len(low_high) == 2 and low_high[0] <= low_high[1] > 0  # a weight of 0 would exclude samples
            require(ordered, name, low_high, f"two {wanted or 'numbers'}, the lower first, the upper above 0")
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
        unread: set[str] = set()
        if self.objective in OBJECTIVES:
            unread |= {name for other in OBJECTIVES.values() for name in other.fields - kind.fields}
        if self.objective == "topr" and self.push != "escort":
            unread |= {"alpha", "escort_temperature"}
        if self.objective == "topr" and self.push == "reward":
            unread |= {"scale_rewards", "multi_objective_aggregation"}
        for each in dataclasses.fields(self):
            value, usual = getattr(self, each.name), default(each)
            value = list(value) if isinstance(usual, list) else value
            if each.name in unread and value != usual:
                pushed = f" and push={self.push!r}" if self.objective == "topr" else ""
                readers = [name for name, other in OBJECTIVES.items() if each.name in other.fields]
                instead = f", or set `objective` to {' or '.join(readers)}" if readers else ""
                raise ValueError(
                    f"{each.name}={value!r} has no effect with objective={self.objective!r}{pushed}. Remove "
                    f"`{each.name}`{instead}."
                )

    def describe_objective(self) -> str:
        """Line of a run's plan: the loss."""
        temperature = f"in {self.temperature_range} from {self.escort_temperature:g}"
        terms = [
            f"alpha = {self.alpha:g}",
            f"temperature {temperature if self.adaptive_temperature else f'{self.escort_temperature:g}'}",
            f"anchor correction {self.anchor_correction}",
            f"drive scaling {self.drive_scaling}",
            f"positivity {self.positivity}",
            f"log-ratio {self.log_ratio_reduction} within ±{self.log_ratio_clamp:g}, {self.ratio_form} form",
        ]
        return ", ".join(terms)


def field_problems(kind: Any, values: Mapping[str, Any]) -> dict[str, str]:
    """
    Field → what is wrong with it by itself: the one place where a field is validated, besides its type.

    Args:
        kind (`type`): a configuration of a trainer, the script's arguments or TRL's [`~trl.ModelConfig`].
        values (`Mapping`): its fields, perhaps with others.
    """
    found = ranges.problems(kind, values)
    for name, reason in REJECTED_FIELDS.items():
        if value := values.get(name):
            found[name] = f"{name}={value!r} has no effect: {reason}. Remove `{name}`."
    return found


def check_fields(arguments: Any) -> None:
    """
    Check each field of a configuration by itself, with [`field_problems`].

    Raises:
        `ValueError`: names each field that is out of its range, or has no effect.
    """
    kind = type(arguments)
    if found := field_problems(kind, {each.name: getattr(arguments, each.name) for each in dataclasses.fields(kind)}):
        raise ValueError("\n".join(found.values()))


@dataclass
class OPOConfig(ObjectiveConfig, Masked, GRPOConfig):
    r"""
    Configuration class for the [`OPOTrainer`].

    It adds parameters to those of [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`]. Parameters that the
    objective does not read, such as `epsilon` with `objective: opo`, are rejected unless they have their default.

    Raises:
        `ValueError`: a value is out of its range, fields exclude each other, the objective does not read a field,
            batch sizes do not divide evenly, there are more processes than devices, or
            `enable_jit_checkpoint` is set, which saves in the middle of an optimizer step. The message names the
            field, the value and what to do.
    """

    max_sampling_rounds: Annotated[int, OBJECTIVE, COUNT] = setting(
        1,
        "Maximum rounds of generation per rollout, at least 1. With 2 or more, sampling is dynamic, as in DAPO: "
        "zero-variance groups, whose completions all have the same reward, are replaced by groups of new prompts "
        "until none is left or the rounds are used up.",
    )
    max_staleness: Annotated[int, OBJECTIVE, integer(0, 2**31 - 1)] = setting(
        0,
        "Number of earlier rollouts, at least 0, from which the passes after the first (`num_iterations`) draw "
        "groups besides the current one; see [`~rollout.replay`]. With 0, each pass is over the current rollout.",
    )
    rollouts: Annotated[str | None, DATA] = setting(
        None,
        "Recorded rollouts to train on, in place of `train_dataset` and generation: a file, folder or dataset on "
        "the Hub, as [`~data.rollouts.load_rollouts`] reads it.",
    )
    rollouts_model: Annotated[str | None, DATA] = setting(
        None,
        "Model that wrote the recorded completions, folder or Hub id. It computes their log-probabilities before "
        "training, if they are not recorded.",
    )
    save_rollouts: bool = setting(
        False,
        "Whether to record all completions of training in the folder `rollouts` of `output_dir`, in the form that"
        " `rollouts` reads. Costs one forward pass over each rollout if training needs none.",
    )
    max_completions: Annotated[int | None, COUNT] = setting(
        None,
        "Number of completions to generate for training, at least 1: the run ends with the first rollout that "
        "reaches it, or earlier, by `max_steps` or `num_train_epochs`.",
    )
    max_reward_failure_rate: Annotated[float, FRACTION] = setting(
        0.1,
        "Maximum fraction of completions, in `[0, 1]`, that an [`IsolatedReward`] may fail to score; above it, "
        "the run ends. The fraction is a moving average over all processes, in which each round of generation has"
        " weight 0.1. 1 sets no limit.",
    )
    max_skipped_steps: Annotated[int, COUNT] = setting(
        10,
        "Number of consecutive optimizer steps with a non-finite gradient after which the run saves a checkpoint "
        "and ends, at least 1. Each such step is skipped on all processes.",
    )
    plan_micro_batches: bool = setting(
        True,
        "Whether to sort the samples of an optimizer step by length before they are cut into micro-batches, trim "
        "each micro-batch to its longest sample, and exchange samples so that all processes compute about the "
        "same number of tokens. The number of micro-batches minimizes the cost, counting each as 256 tokens of "
        "padding (4,096 on a GPU, where a micro-batch may hold more than `per_device_train_batch_size` samples, "
        "but no more tokens than that many of the longest, if prompts can be computed once). With ZeRO-2, ZeRO-3 "
        "and FSDP, which communicate in every micro-batch, it is the smallest possible.",
    )
    max_tokens_per_micro_batch: Annotated[int | None, integer(1, text="a positive number of tokens")] = setting(
        None,
        "Maximum number of tokens in a micro-batch, including padding, so long samples get smaller micro-batches."
        " A single sample above the limit gets one to itself. Needs `plan_micro_batches`.",
    )
    skip_inert_rows: bool = setting(
        True,
        "Whether to skip zero-gradient samples: completions with g = 0, in an optimizer step where the log-ratio "
        "is still 0, or in any step with `objective: topr`, which does not pull them back. They count in every "
        "mean except `entropy` and `clip_ratio/*`, and off-policy those of log-ratios, which then cover only the "
        "others. No sample is skipped if a KL term or an entropy bonus acts on it, or if a later iteration needs it.",
    )

    def __post_init__(self):
        self._check_values()
        self._check_batches()
        self._check_in_parents()
        devices.check_own(self.device)
        devices.use_one(self)
        rounds = self.max_sampling_rounds
        if self.max_staleness and self.num_iterations == 1:
            raise ValueError(
                f"max_staleness={self.max_staleness} with num_iterations=1 has no effect: the only pass over a "
                "rollout is over its own samples. Set `num_iterations` to 2 or more, or `max_staleness` to 0."
            )
        if self.max_staleness and self.is_on_policy:
            raise ValueError(
                f"max_staleness={self.max_staleness} cannot be combined with gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}, which accumulates all num_iterations={self.num_iterations} "
                "passes over a rollout in one optimizer step: no earlier rollout would be off-policy. Lower "
                f"`gradient_accumulation_steps` to {self.steps_per_generation} or less, or set `max_staleness` to 0."
            )
        if self.rollouts_model is not None and self.rollouts is None:
            raise ValueError(
                f"rollouts_model={self.rollouts_model!r} has no effect without recorded rollouts. Set `rollouts`, or "
                "remove it."
            )
        generates = "no completion is generated for training"
        excluded = {
            "use_vllm": (self.use_vllm, generates),
            "max_sampling_rounds": (rounds > 1, generates),
            "remove_unused_columns": (self.remove_unused_columns, "it would remove the completions"),
        }
        for name, (is_set, why) in excluded.items() if self.rollouts is not None else ():
            if is_set:
                raise ValueError(
                    f"{name}={getattr(self, name)} cannot be combined with rollouts={self.rollouts!r}: {why}. Remove "
                    f"`{name}`."
                )
        if self.enable_jit_checkpoint:
            raise ValueError(
                "enable_jit_checkpoint=True is not allowed: it saves in the middle of an optimizer step, which cannot "
                "be resumed exactly. Remove it. `opo-trl train` saves on SIGTERM; your own script does if it trains "
                "within `opo_trl.launch.signals.StopOnSignal(trainer)`."
            )
        if self.ignore_data_skip:
            raise ValueError(
                "ignore_data_skip=True is not allowed: Transformers then resumes without the random states of the "
                "checkpoint, and with them without its rollout and counts. Remove it: skipping reads no data here."
            )
        for name, value in (("scale_rewards", "batch"), ("multi_objective_aggregation", "normalize_then_sum")):
            if rounds > 1 and getattr(self, name) == value:
                raise ValueError(
                    f"{name}={value!r} cannot be combined with max_sampling_rounds={rounds}: it normalizes over "
                    f"groups that are replaced later. Set `max_sampling_rounds` to 1, or leave `{name}` out."
                )
        self.check_objective()
        budget = self.max_tokens_per_micro_batch
        if budget is not None and not self.plan_micro_batches:
            raise ValueError(
                f"max_tokens_per_micro_batch={budget} needs planned micro-batches. Set `plan_micro_batches` to True, "
                "or leave `max_tokens_per_micro_batch` out."
            )
        if budget is not None and updates_in_backward(self):
            raise ValueError(
                f"max_tokens_per_micro_batch={budget} divides an optimizer step, but optim={self.optim.value!r} takes "
                "one in every backward pass. Remove one of them."
            )

    def _check_values(self):
        """Check each field on its own, and pairs of bounds."""
        self.scale_rewards = ranges.SCALES.get(str(self.scale_rewards).lower(), self.scale_rewards)
        check_fields(self)
        for name in ("temperature", "repetition_penalty"):  # Transformers rejects integers for them
            value = getattr(self, name)
            setattr(self, name, value if value is None else float(value))
        for low, high in (
            ("entropy_coef_min", "entropy_coef_max"),
            ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
        ):
            least, most = getattr(self, low), getattr(self, high)
            wanted = f"a number below {high}={most}"
            require(None in (least, most) or least <= most, low, least, wanted)
        if self.sync_ref_model and self.beta == 0:
            raise ValueError(
                f"sync_ref_model=True with beta={self.beta} has no effect: without a KL term there is no reference "
                "model. Set `beta` to a positive number, or remove `sync_ref_model`."
            )
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        weights = self.reward_weights
        require(not weights or any(weights), "reward_weights", weights, "a list with at least one number other than 0")
        if self.vllm_server_base_url is not None:
            self.vllm_server_base_url = self.vllm_server_base_url.rstrip("/")

    def _check_in_parents(self):
        """Let TRL and Transformers check the rest, then what they would ignore."""
        of_schedule = self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        follows = self.load_best_model_at_end or self.save_strategy == "best" or of_schedule
        if follows and self.eval_strategy != "no" and self.metric_for_best_model is None:
            self.metric_for_best_model = "reward"  # Transformers takes the loss
            said = "True, or unset: the default of `metric_for_best_model` is the reward"
            require(self.greater_is_better is not False, "greater_is_better", False, said)
        metric = self.metric_for_best_model
        is_loss = follows and metric in ("loss", "eval_loss") and not self.beta
        require(not is_loss, "metric_for_best_model", metric, "reward: the loss does not say how good the policy is")
        super().__post_init__()
        if of_schedule:
            mode = {"mode": "max" if self.greater_is_better else "min"}
            self.lr_scheduler_kwargs = mode | cast(dict, self.lr_scheduler_kwargs or {})
        check_options(self)

    def _check_batches(self):
        group, processes = self.num_generations, int(os.environ.get("WORLD_SIZE", 1))
        batch, steps = self.generation_batch_size, self.steps_per_generation
        if batch is not None and steps is not None:
            raise ValueError(
                f"generation_batch_size={batch} and steps_per_generation={steps} are both set, but each determines "
                "the other. Remove one of them."
            )
        if batch is not None:
            unit = math.lcm(self.per_device_train_batch_size * processes, group)
            nearest = " or ".join(str(unit * n) for n in (batch // unit, batch // unit + 1) if n)
            wanted = f"a multiple of num_generations and of the samples per micro-step over all processes: {nearest}"
            require(batch % unit == 0, "generation_batch_size", batch, wanted)
            return
        passes = processes * (steps or self.gradient_accumulation_steps)
        completions = self.per_device_train_batch_size * passes
        if completions % group:
            divisors = ", ".join(str(n) for n in range(2, completions + 1) if completions % n == 0)
            raise ValueError(
                f"num_generations={group} does not divide the {completions} completions of a rollout. Set "
                + (f"`num_generations` to one of {divisors}, or " if divisors else "")
                + f"`per_device_train_batch_size` to a multiple of {group // math.gcd(passes, group)}."
            )

    @property
    def micro_steps_per_rollout(self) -> int:
        """Forward and backward passes per rollout."""
        return self.steps_per_generation * self.num_iterations

    @property
    def optimizer_steps_per_rollout(self) -> float:
        """Optimizer steps per rollout; below 1 when one step spans several rollouts."""
        return self.micro_steps_per_rollout / self.gradient_accumulation_steps

    @property
    def is_on_policy(self) -> bool:
        """Whether every rollout is generated for a single optimizer step, so that the log-ratio is always 0."""
        return self.rollouts is None and self.is_aligned

    @property
    def is_aligned(self) -> bool:
        """Whether every rollout serves a single optimizer step: TRL then scores no completion before its step."""
        return self.gradient_accumulation_steps % self.micro_steps_per_rollout == 0

    def _when_off_policy(self) -> str:
        if self.rollouts is not None:
            return "in every optimizer step, as completions are recorded"
        replayed = ", and in every pass that replays earlier rollouts" if self.max_staleness else ""
        return f"after the first optimizer step of a rollout{replayed}"

    @property
    def off_policy_fields(self) -> str:
        """What to set in a run without off-policy steps, as `docs/reuse.md` recommends."""
        fields = {"num_iterations": 4, "max_staleness": 8}
        if self.steps_per_generation < self.gradient_accumulation_steps:
            fields = {"steps_per_generation": self.gradient_accumulation_steps} | fields
        return ", ".join(f"`{name}: {value}`" for name, value in fields.items())

    def describe_policy(self) -> str:
        """Line of a run's plan: whether it takes off-policy steps, and what bounds them."""
        if self.mu is None and self.chi2_radius is None:
            if self.is_on_policy:
                return "on-policy: the ratio is 1 in every optimizer step"
            return f"off-policy {self._when_off_policy()}"
        term = f"chi2_radius = {self.chi2_radius:g}" if self.chi2_radius else f"mu = {self.mu:g}"
        if self.is_on_policy:
            return (
                f"on-policy: the log-ratio is 0 in every optimizer step, so the χ² term and {term} have no effect; "
                f"for off-policy steps, set {self.off_policy_fields}"
            )
        return f"off-policy {self._when_off_policy()}: there the χ² term acts, with {term}"

    def describe_objective(self) -> str:
        return super().describe_objective() + (f", beta = {self.beta:g}" if self.beta else "")


def updates_in_backward(args: Any) -> bool:
    """Whether the optimizer takes a step in every backward pass, which leaves no gradient."""
    return any(kind in args.optim for kind in ("layerwise", "lomo"))
