"""`AsyncOPOConfig`: TRL's `AsyncGRPOConfig` with the fields of OPO's objective, validated."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from trl.experimental.async_grpo import AsyncGRPOConfig

from ..checks import devices
from ..checks.ranges import require
from ..checks.secrets import Masked
from ..config import ObjectiveConfig, check_fields
from ..fields import COUNT, OBJECTIVE, POSITIVE, RUN, deciding, given, setting


_ONE_GROUP = "is not possible in asynchronous training, which scores one group at a time"
_UNTRAINED = (
    "makes completions come from another distribution than the one that is trained, so that the log-ratio is wrong "
    "from the first step"
)
# Field → its possible values (the default if there are none), why others are not, and what to do.
_POSSIBLE: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "chi2_radius": ((), _ONE_GROUP, "Set `mu` instead"),
    "positivity": (("none", "clip", "project"), _ONE_GROUP, "Set `positivity` to 'clip' or 'project'"),
    "drive_scaling": (("none", "group"), _ONE_GROUP, "Set `drive_scaling` to 'group' or 'none'"),
    "adaptive_temperature": ((), _ONE_GROUP, "Set `escort_temperature` instead"),
    "temperature_range": ((), _ONE_GROUP, "Set `escort_temperature` instead"),
    "anchor_correction": ((), _ONE_GROUP, "Remove `anchor_correction`"),
    "top_p": ((1.0,), _UNTRAINED, "Set `top_p` to 1.0"),
    "top_k": ((0,), _UNTRAINED, "Set `top_k` to 0"),
    "min_p": ((0.0, None), _UNTRAINED, "Set `min_p` to 0.0"),
    "repetition_penalty": ((1.0,), _UNTRAINED, "Set `repetition_penalty` to 1.0"),
    "enable_jit_checkpoint": (
        (False,),
        "saves in the middle of an optimizer step, whose prompts a resumed run would leave out",
        "Remove it, and train within `opo_trl.launch.signals.StopOnSignal(trainer)`, as `opo-trl train` does",
    ),
}


@dataclass
class AsyncOPOConfig(ObjectiveConfig, Masked, AsyncGRPOConfig):
    r"""
    Configuration class for the [`AsyncOPOTrainer`].

    It adds the parameters of OPO's objective to those of [`~trl.experimental.async_grpo.AsyncGRPOConfig`] and
    [`~transformers.TrainingArguments`]: `alpha`, `escort_temperature`, `mu`, `positivity` (`"none"`, `"clip"` or
    `"project"`), `positivity_epsilon`, `drive_scaling` (`"none"` or `"group"`), `log_ratio_reduction`,
    `log_ratio_clamp` and `ratio_form`, with the meaning and the defaults that they have in [`OPOConfig`].

    A group is scored on its own, so what needs a whole rollout is rejected: `chi2_radius`, `positivity="stiffen"`,
    `drive_scaling="batch"`, `adaptive_temperature`, `temperature_range` and `anchor_correction`. So are filters of
    the next token (`top_p`, `top_k`, `min_p`, `repetition_penalty`): the server's log-probabilities are those of the
    behaviour policy only without them.
    `min_p` is sent as 0.0, so that the server does not take one from the model's `generation_config.json`.

    Parameters:
        num_iterations (`int`, *optional*, defaults to `1`):
            Optimizer steps over the same completions, at least 1. Set `weight_sync_steps` to the same number to send
            weights after the last one. A run that is resumed before it generates their prompts' completions anew.
        max_skipped_steps (`int`, *optional*, defaults to `10`):
            As in [`OPOConfig`]: number of consecutive optimizer steps with a non-finite gradient after which the
            run saves a checkpoint and ends, at least 1.

    Raises:
        `ValueError`: a value is out of its range, or a parameter that the trainer cannot follow is set. The message
        names the field, the value and what to do.
    """

    # Of TRL's losses, with the meaning and defaults that they have in `GRPOConfig`
    importance_sampling_level: Annotated[Literal["token", "sequence"], OBJECTIVE] = setting(
        "token", "Whether GRPO's ratio is that of a token or of the completion."
    )
    delta: Annotated[float | None, OBJECTIVE, POSITIVE] = setting(None, "GRPO's upper bound on the ratio.")
    sapo_temperature_pos: Annotated[float, OBJECTIVE, POSITIVE] = setting(1.0, "SAPO's temperature where A > 0.")
    sapo_temperature_neg: Annotated[float, OBJECTIVE, POSITIVE] = setting(1.05, "SAPO's temperature elsewhere.")
    vespo_k_pos: Annotated[float, OBJECTIVE, POSITIVE] = setting(2.0, "VESPO's power where A >= 0.")
    vespo_lambda_pos: Annotated[float, OBJECTIVE, POSITIVE] = setting(3.0, "VESPO's decay where A >= 0.")
    vespo_k_neg: Annotated[float, OBJECTIVE, POSITIVE] = setting(3.0, "VESPO's power elsewhere.")
    vespo_lambda_neg: Annotated[float, OBJECTIVE, POSITIVE] = setting(2.0, "VESPO's decay elsewhere.")
    num_iterations: Annotated[int, COUNT] = setting(1, "Optimizer steps over the same completions.")
    max_skipped_steps: Annotated[int, RUN, COUNT] = setting(
        10, "Consecutive optimizer steps with a non-finite gradient that end the run."
    )

    def __post_init__(self):
        check_fields(self)
        set_ = given(self)
        for name, (possible, why, fix) in _POSSIBLE.items():
            value = getattr(self, name)
            if value not in possible if possible else name in set_:
                raise ValueError(f"{name}={value!r} {why}. {fix}.")
        self.min_p = 0.0
        self.vllm_server_base_url = self.vllm_server_base_url.rstrip("/")
        super().__post_init__()
        devices.check_own(self.device)
        self._n_gpu = min(self.n_gpu, 1)  # a process that sees several trains on the first
        self.check_objective()
        self._reject_shares_of_unknown_steps()
        if self.token_budget and self.token_budget <= self.max_completion_length:
            raise ValueError(
                f"token_budget={self.token_budget} has no room for a prompt and max_completion_length="
                f"{self.max_completion_length} tokens, and what does not fit is dropped. Set `token_budget` to the "
                "length of the longest prompt with its completion or more, or to 0."
            )
        require(not self.auto_find_batch_size, "auto_find_batch_size", True, "false: the rollout worker starts once")

    def _reject_shares_of_unknown_steps(self):
        """How many optimizer steps an epoch has is known when it ends."""
        if self.max_steps > 0:
            return
        values = {name: getattr(self, name) for name in ("save_steps", "logging_steps", "eval_steps", "warmup_steps")}
        shares: dict[str, Any] = {name: value for name, value in values.items() if 0 < (value or 0) < 1}
        if self.lr_scheduler_type not in ("constant", "constant_with_warmup"):
            shares["lr_scheduler_type"] = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        for name, value in shares.items():
            raise ValueError(
                f"{name}={value!r} needs the number of optimizer steps, which num_train_epochs="
                f"{self.num_train_epochs:g} does not tell in asynchronous training. Set `max_steps`."
            )

    @property
    def objective_fields(self) -> SimpleNamespace:
        """The fields that decide the objective, which travel to the process that scores completions."""
        kind: Any = type(self)
        return SimpleNamespace(**{name: getattr(self, name) for name in deciding(kind, OBJECTIVE)})
