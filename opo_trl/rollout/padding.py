"""
Whether padding changes the log-probabilities of a model: a few passes over a completion, before the first are used.

Micro-batches have other widths than the pass over a rollout. There, a model that takes left padding for positions
(GPT-2), scales its positions by the width of the batch (`longrope`, `dynamic`), or does not mask padding in a
recurrence has other log-probabilities, and the log-ratio of a policy that has not moved is not 0.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import Tensor
from torch.nn.functional import pad
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from . import shared_prompts


logger = get_logger(__name__)


@dataclass(frozen=True)
class Padding:
    """What log-probabilities depend on; how they are computed follows from it."""

    positions: bool = False  # whether the model needs positions that do not count padding
    harmless: bool = True  # whether they are then the same in micro-batches of any width
    shared: bool = True  # and in a row with another completion of the prompt


def with_positions(model: Any, *, attention_mask: Tensor, **inputs: Any) -> Any:
    """A pass in which padding does not count as positions."""
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    return model(attention_mask=attention_mask, position_ids=positions, **inputs)


@torch.no_grad()
def find(trainer: Any, input_ids: Tensor, attention_mask: Tensor, width: int) -> tuple[Padding, str]:
    """
    Find it for the trainer's model, by the longest completion of this process's rows, `[B, P + T]` with T = `width`:
    alone, padded on the left, padded on the right up to the widest micro-batch of the run, and twice in a row. Also
    returns a line that says it. All processes make the same passes, and agree.

    Log-probabilities count as the same if their root mean square difference is at most twice the square root of the
    dtype's precision: 0.0007 nats in float32, 0.18 in bfloat16. Rounding is 5e-6 and 0.09 in SmolLM2-135M. (Passes of
    equal shape are equal to the bit, and tell nothing.)
    """
    began, model, device = time.perf_counter(), trainer.model, trainer.accelerator.device
    split = partial(torch.tensor_split, indices=(-width,), dim=-1)
    row = int(attention_mask[:, -width:].sum(dim=1).argmax())
    real = attention_mask[row].bool()
    real[-width - 1 : 1 - width or None] = True  # a token of each, also if all is masked
    prompt, completion = (part[chosen] for part, chosen in zip(split(input_ids[row]), split(real), strict=True))
    # Short, so that it lies alone within the context of which a scaling of positions begins.
    ids, length = torch.cat([prompt[-8:], completion[:8]])[None], min(len(completion), 8)
    longest = input_ids.size(1) - width + max(trainer.args.max_completion_length or 0, width)

    def logps(left: int = 0, right: int = 0, call: Any = model) -> Tensor:
        padded, mask = pad(ids, (left, right)), pad(torch.ones_like(ids), (left, right))
        if right:  # beside a row of this width, by which a model may scale the positions of both
            padded = torch.cat([padded, ids.repeat(1, 1 + longest)[:, : padded.size(1)]])
            mask = torch.cat([mask, torch.ones_like(mask)])
        found = GRPOTrainer._get_per_token_logps_and_entropies(trainer, call, padded, mask, length + right)
        return found[0][:1, :length]

    def shared(positions: bool) -> Tensor:
        both = ids.expand(2, -1)
        rows = {"prompt_ids": both[:, :-length], "completion_ids": both[:, -length:]}
        lengths = np.tile([ids.size(1) - length, length], (2, 1))
        call = shared_prompts.model_for(model, rows | shared_prompts.arrange(rows, lengths, np.zeros(2)))
        call = partial(with_positions, call) if positions else call
        return GRPOTrainer._get_per_token_logps_and_entropies(trainer, call, both, torch.ones_like(both), length)[0]

    def same(*passes: Any) -> bool:
        distances = []
        for one in passes:
            try:
                distances.append((one() - alone).square().mean().sqrt())
            except Exception:  # whatever a model raises that does not take a mask or positions
                distances.append(alone.new_tensor(torch.inf))
        found: Tensor = trainer.accelerator.gather(torch.stack(distances).max()[None].to(device))
        return bool((found <= 2 * torch.finfo(_dtype(trainer)).eps ** 0.5).all())

    training = model.training
    model.eval()
    checkpointing: Any = trainer.args.gradient_checkpointing_kwargs
    with disable_gradient_checkpointing(model, checkpointing):
        alone = logps()
        harmless, positions = same(partial(logps, 8), partial(logps, 0, longest)), False
        if not harmless:
            call = partial(with_positions, model)
            harmless = positions = same(partial(logps, 8, 0, call), partial(logps, 0, longest, call))
        balance = harmless and shared_prompts.balance(trainer.accelerator.unwrap_model(model))
        share = bool(balance) and same(partial(shared, positions))
    model.train(training)
    said = "do not depend on padding" if harmless else "depend on padding"
    said += ", once positions do not count it" if positions else ""
    return Padding(positions, harmless, share), f"Log-probabilities {said} ({time.perf_counter() - began:.1f} s)"


def _dtype(trainer: Any) -> torch.dtype:
    """The coarsest type in which a pass computes."""
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
    return mixed or next(each.dtype for each in trainer.model.parameters() if each.is_floating_point())


def reject_other_widths(args: Any) -> None:
    """Reject fields by which a completion is scored in batches of several widths, for a model that depends on them."""
    fields = {"max_staleness": 0, "rollouts": None, "max_tokens_per_micro_batch": None}
    for name in (name for name, default in fields.items() if getattr(args, name, default) != default):
        raise ValueError(
            f"{name}={getattr(args, name)!r} needs a model whose log-probabilities do not depend on padding: this "
            f"one's do, so that a completion has others in each micro-batch. Remove `{name}`, or train a model with "
            "attention to what a mask allows, at positions that it is given."
        )
    logger.warning(
        "The log-probabilities of this model depend on padding, so `plan_micro_batches` has no effect: all "
        "micro-batches are as wide as their rollout."
    )
