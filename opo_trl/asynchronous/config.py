"""`AsyncOPOConfig`: TRL's `AsyncGRPOConfig` with the fields of OPO's objective, validated."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from trl.experimental.async_grpo import AsyncGRPOConfig

from ..checks.secrets import Masked
from ..config import ObjectiveConfig, check_optim_args
from ..fields import COUNT, POSITIVE, check_fields, require, setting


# Field → its possible values: a group is scored on its own, and the server's log-probabilities are the policy's only
# without filters of the next token.
_POSSIBLE: dict[str, tuple[Any, ...]] = {
    "chi2_radius": (None,),
    "positivity": ("none", "clip", "project"),
    "drive_scaling": ("none", "group"),
    "adaptive_temperature": (False,),
    "anchor_correction": ("absorbed",),
    "top_p": (1.0,),
    "top_k": (0,),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
}


@dataclass
class AsyncOPOConfig(ObjectiveConfig, Masked, AsyncGRPOConfig):
    r"""
    Configuration class for the [`AsyncOPOTrainer`].

    It adds the parameters of OPO's objective to those of [`~trl.experimental.async_grpo.AsyncGRPOConfig`] and
    [`~transformers.TrainingArguments`], with the meaning and the defaults that they have in [`OPOConfig`].

    A group is scored on its own, so what needs a whole rollout is rejected: `chi2_radius`, `positivity="stiffen"`,
    `drive_scaling="batch"`, `adaptive_temperature` and `anchor_correction`. So are filters of the next token, as
    `top_p`. `min_p` is sent as 0.0, so that the server takes none from the model's `generation_config.json`.

    Raises:
        `ValueError`: a value is out of its range, or a parameter that the trainer cannot follow is set.
    """

    # Of TRL's losses, with the meaning and defaults that they have in `GRPOConfig`
    importance_sampling_level: Literal["token", "sequence"] = setting("token", "What GRPO's ratio is that of.")
    delta: Annotated[float | None, POSITIVE] = setting(None, "GRPO's upper bound on the ratio.")
    sapo_temperature_pos: Annotated[float, POSITIVE] = setting(1.0, "SAPO's temperature where A > 0.")
    sapo_temperature_neg: Annotated[float, POSITIVE] = setting(1.05, "SAPO's temperature elsewhere.")
    vespo_k_pos: Annotated[float, POSITIVE] = setting(2.0, "VESPO's power where A >= 0.")
    vespo_lambda_pos: Annotated[float, POSITIVE] = setting(3.0, "VESPO's decay where A >= 0.")
    vespo_k_neg: Annotated[float, POSITIVE] = setting(3.0, "VESPO's power elsewhere.")
    vespo_lambda_neg: Annotated[float, POSITIVE] = setting(2.0, "VESPO's decay elsewhere.")
    num_iterations: Annotated[int, COUNT] = setting(
        1, "Optimizer steps over the same completions; set `weight_sync_steps` to as many."
    )
    max_skipped_steps: Annotated[int, COUNT] = setting(
        10, "Consecutive optimizer steps with a non-finite gradient that end the run."
    )

    def __post_init__(self):
        check_fields(self)
        for name, possible in _POSSIBLE.items():
            wanted = f"{possible[-1]!r}: asynchronous training scores one group at a time, and samples from the policy"
            require((value := getattr(self, name)) in possible, name, value, wanted)
        self.min_p = 0.0
        super().__post_init__()
        self._n_gpu = min(self.n_gpu, 1)  # a process that sees several trains on the first
        self.check_objective()
        check_optim_args(self)
        # How many optimizer steps an epoch has is known when it ends; TRL sets a bound that no run reaches.
        is_constant = self.lr_scheduler_type in ("constant", "constant_with_warmup")
        wanted = f"a number of optimizer steps: lr_scheduler_type={self.lr_scheduler_type!r} needs it"
        require(self.max_steps > 0 or is_constant, "max_steps", self.max_steps, wanted)
