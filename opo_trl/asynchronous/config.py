"""`AsyncOPOConfig`: TRL's `AsyncGRPOConfig` with the fields of OPO's objective, validated."""

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from trl.experimental.async_grpo import AsyncGRPOConfig

from ..checks import devices
from ..checks.secrets import Masked
from ..config import ObjectiveConfig, check_fields
from ..fields import COUNT, OBJECTIVE, POSITIVE, setting


# Field → its possible values.
_OF_A_GROUP: dict[str, tuple[Any, ...]] = {
    "chi2_radius": (None,),
    "positivity": ("none", "clip", "project"),
    "drive_scaling": ("none", "group"),
    "adaptive_temperature": (False,),
    "anchor_correction": ("absorbed",),
}
_OF_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0,),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
}
_POSSIBLE = (
    (_OF_A_GROUP, "is not possible in asynchronous training, which scores one group at a time"),
    (_OF_SAMPLING, "makes completions come from another distribution than the one that is trained"),
)


@dataclass
class AsyncOPOConfig(ObjectiveConfig, Masked, AsyncGRPOConfig):
    r"""
    Configuration class for the [`AsyncOPOTrainer`].

    It adds the parameters of OPO's objective to those of [`~trl.experimental.async_grpo.AsyncGRPOConfig`] and
    [`~transformers.TrainingArguments`], with the meaning and the defaults that they have in [`OPOConfig`].

    A group is scored on its own, so what needs a whole rollout is rejected: `chi2_radius`, `positivity="stiffen"`,
    `drive_scaling="batch"`, `adaptive_temperature` and `anchor_correction`. So are filters of the next token (`top_p`,
    `top_k`, `min_p`, `repetition_penalty`): the server's log-probabilities are those of the behaviour policy only
    without them. `min_p` is sent as 0.0, so that the server takes none from the model's `generation_config.json`.

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
    max_skipped_steps: Annotated[int, COUNT] = setting(
        10, "Consecutive optimizer steps with a non-finite gradient that end the run."
    )

    def __post_init__(self):
        check_fields(self)
        for fields_, why in _POSSIBLE:
            for name, possible in fields_.items():
                if (value := getattr(self, name)) not in possible:
                    raise ValueError(f"{name}={value!r} {why}. Remove it, or set it to {possible[-1]!r}.")
        self.min_p = 0.0
        self.vllm_server_base_url = self.vllm_server_base_url.rstrip("/")
        super().__post_init__()
        devices.check_own(self.device)
        self._n_gpu = min(self.n_gpu, 1)  # a process that sees several trains on the first
        self.check_objective()
        if self.max_steps <= 0:
            self._check_without_max_steps()

    def _check_without_max_steps(self):
        """How many optimizer steps an epoch has is known when it ends; TRL sets a bound that no run reaches."""
        steps = ("save_steps", "logging_steps", "eval_steps", "warmup_steps")
        unknown: dict[str, Any] = {name: value for name in steps if 0 < (value := getattr(self, name) or 0) < 1}
        if self.lr_scheduler_type not in ("constant", "constant_with_warmup"):
            unknown["lr_scheduler_type"] = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        for name, value in unknown.items():
            raise ValueError(
                f"{name}={value!r} needs the number of optimizer steps, which num_train_epochs="
                f"{self.num_train_epochs:g} does not tell in asynchronous training. Set `max_steps`."
            )

    @property
    def objective_fields(self) -> SimpleNamespace:
        """All fields, for the objective in the process that scores completions."""
        return SimpleNamespace(**{field.name: getattr(self, field.name) for field in fields(self)})
