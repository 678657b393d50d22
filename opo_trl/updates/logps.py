"""
`LogpsTrainer`: TRL's `GRPOTrainer` with log-probabilities of tokens that do not depend on how completions are arranged
in batches, by TRL's pass and its fused language-model head.

- Padding on the left does not count as positions, and a model whose log-probabilities depend on padding all the same
  is recognized before the first ones are used (`updates.padding`).
- A prompt is computed once for its completions, where the model allows it (`updates.shared_prompts`).
- A whole rollout is computed in micro-batches such as those of training ([`Planner`]).
- TRL gets zeros where nothing reads what it asks for.
"""

from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from ..batch import Batch, image_entries, model_inputs
from ..config import OPOConfig
from ..metrics.step_clock import StepClock
from ..models import reference
from . import padding, shared_prompts
from .planner import Planner, is_sharded


class LogpsTrainer(GRPOTrainer):
    """GRPOTrainer that computes log-probabilities of tokens in the micro-batches of its [`Planner`]."""

    args: OPOConfig
    model: Any  # a PreTrainedModel, or PEFT's wrapper around one

    # Whether TRL gets zeros when it asks for log-probabilities next: a derived class sets it where nothing reads them.
    _leaves_out_logps = False
    _any_width: bool | None = None  # whether log-probabilities do not depend on padding; `None`: none computed yet

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._clock = StepClock(self.accelerator.device)
        self.add_callback(self._clock)

    @property
    def _loss_is_a_sum(self) -> bool:
        """
        Whether the loss is a sum over completions, which can be cut into any micro-batches. TRL's may be a mean over a
        micro-batch, and count on as many of them as TRL makes.
        """
        return False

    @cached_property
    def _takes_positions(self) -> bool:
        """Whether the policy gets the positions of tokens, counted without padding."""
        return padding.takes_positions(self.accelerator.unwrap_model(self.model))

    @cached_property
    def planner(self) -> Planner:
        """What cuts this run's optimizer steps into micro-batches."""
        policy = self.accelerator.unwrap_model(self.model)
        return Planner(
            self.args,
            self.accelerator,
            communicates=is_sharded(self),
            # `None`: prompts are not computed once for their completions, as the model, or the router's loss over all
            # tokens that a pass computes, may need each completion with a prompt of its own.
            break_even_width=None if self.aux_loss_enabled else shared_prompts.break_even_width(policy),
            # With `pad_to_multiple_of`, micro-batches are as wide as TRL has made the rollout. So they are where
            # log-probabilities depend on padding (`_any_width` is false; `None` if that is not known yet).
            plans=(
                self.args.plan_micro_batches
                and self._loss_is_a_sum
                and self.pad_to_multiple_of is None
                and self._any_width is not False
            ),
        )

    @torch.no_grad()
    def _policy_logps(self, rows: Batch, **options: Any) -> tuple[Tensor, Tensor]:
        """
        Log-probabilities and entropies `[B, T]` of the completions' tokens under the policy as it is now: where it has
        not moved yet, the behaviour policy's. `options` are those of TRL's method, such as `batch_size`.
        """
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with disable_gradient_checkpointing(self.model, checkpointing):
            logps, entropies, _ = self._token_logps(self.model, rows, compute_entropy=True, **options)
        return logps, entropies

    @torch.no_grad()
    def _reference_logps(self, rows: Batch) -> Tensor:
        """Log-probabilities `[B, T]` of the completions' tokens under TRL's reference policy."""
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with reference.active(self) as model, disable_gradient_checkpointing(self.model, checkpointing):
            logps, _, _ = self._token_logps(model, rows)
        return logps

    def _token_logps(self, model, inputs: Batch, **options):
        """
        Log-probabilities and entropies of the completions' tokens, `[B, T]`, and the router's auxiliary loss, by TRL's
        fused language-model head. What `options` do not ask for is `None`.
        """
        # A checkpoint's micro-batches may be arranged to compute prompts once, which this run's attention may not be
        # able to do: then their arrangement is not used.
        if self.planner.shares_prompts:
            model = shared_prompts.model_for(model, inputs)
        ids, mask, width = model_inputs(inputs)
        return self._get_per_token_logps_and_entropies(model, ids, mask, width, **options, **image_entries(inputs))

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **options
    ):
        """
        Overrides TRL's computation of log-probabilities, entropies and auxiliary loss. `batch_size` is given for a
        whole rollout, which is then computed in micro-batches as in training.
        """
        if self._leaves_out_logps:
            self._leaves_out_logps = False  # for a single call, TRL's first one after it has generated
            zeros = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
            return zeros, zeros, None
        self._check_padding(input_ids, attention_mask, logits_to_keep)
        logps = self._logps_of_trl
        if batch_size is not None and self.planner.plans:
            logps = partial(self.planner.score, logps)
        return logps(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **options)

    def _logps_of_trl(self, model, *inputs, **options):
        """
        Log-probabilities, entropies and auxiliary loss by TRL's own pass. Without a gradient, it is timed as the phase
        `anchor`; with one, it is part of the loss.
        """
        if self._takes_positions:  # the model gets the positions of tokens, counted without padding
            model = partial(padding.with_positions, model)
        with nullcontext() if torch.is_grad_enabled() else self._clock.phase("anchor"):
            return super()._get_per_token_logps_and_entropies(model, *inputs, **options)

    def _check_padding(self, input_ids: Tensor, attention_mask: Tensor, width: int) -> None:
        """
        Before the first log-probabilities, find whether they depend on the width of a batch `[B, P + T]`, with T =
        `width`, and note it in `_any_width`: false if they do. A model with images is taken as it is.
        """
        config = self.model.config
        takes_images = config.get_text_config() is not config
        if self._any_width is not None or takes_images:
            return
        self._any_width = padding.is_harmless(self, input_ids, attention_mask, width)
        if not self._any_width:
            # Positions without padding do not help, and such a model may scale them by the largest one in a batch.
            self._takes_positions = False
            padding.reject_other_widths(self.args)
        vars(self).pop("planner", None)  # the cached one: what it plans depends on what has been found now
