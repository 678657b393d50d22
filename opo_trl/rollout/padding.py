"""
Whether padding changes the log-probabilities of a model: a few passes over a completion, before the first are used.

Micro-batches have other widths than the pass over a rollout. There, a model that scales its positions by the width of
the batch (`longrope`, `dynamic`), or does not mask padding in a recurrence, has other log-probabilities, and the
log-ratio of a policy that has not moved is not 0. GPT-2, which counts left padding as positions, is told others.
"""

import inspect
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.nn.functional import pad
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from . import shared_prompts


logger = get_logger(__name__)


@dataclass(frozen=True)
class Padding:
    """Whether log-probabilities are the same …"""

    harmless: bool = True  # … in micro-batches of any width
    shared: bool = True  # … in a row with another completion of the prompt


def takes_positions(model: Any) -> bool:
    """Whether a model of text takes the positions of its tokens; PEFT drops them where it puts tokens before them."""
    if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
        return False
    base = model.get_base_model() if is_peft_model(model) else model
    text = base.config.get_text_config() is base.config  # those of images are other positions
    return text and "position_ids" in inspect.signature(base.forward).parameters


def with_positions(model: Any, *, attention_mask: Tensor, **inputs: Any) -> Any:
    """A pass in which padding on the left does not count as positions, as in generation."""
    left = (attention_mask.cumsum(dim=1) == 0).sum(dim=1, keepdim=True)
    positions = torch.arange(attention_mask.size(1), device=left.device) - left
    return model(attention_mask=attention_mask, position_ids=positions.clamp(min=0), **inputs)


@torch.no_grad()
def find(trainer: Any, input_ids: Tensor, attention_mask: Tensor, width: int) -> tuple[Padding, str]:
    """
    Find it for the trainer's model, by the longest completion of this process's rows, `[B, P + T]` with T = `width`:
    alone, padded on the left, padded on the right up to the widest micro-batch of the run, and twice in a row. Also
    returns a line that says it. All processes make the same passes, and agree.

    Log-probabilities count as the same if their root mean square difference is at most 0.0007 nats in float32, 0.06 in
    float16 and 0.5 in bfloat16. Rounding is 5e-6 and 0.09 in SmolLM2-135M in float32 and bfloat16. (Passes of equal
    shape are equal to the bit, and tell nothing.)
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

    def scored(ids: Tensor, mask: Tensor, width: int, call: Any = model) -> Tensor:
        call = partial(with_positions, call) if trainer._takes_positions else call
        return GRPOTrainer._get_per_token_logps_and_entropies(trainer, call, ids, mask, width)[0]

    def logps(left: int = 0, right: int = 0) -> Tensor:
        padded, mask = pad(ids, (left, right)), pad(torch.ones_like(ids), (left, right))
        if right:  # beside a row of this width, by which a model may scale the positions of both
            padded = torch.cat([padded, ids.repeat(1, 1 + longest)[:, : padded.size(1)]])
            mask = torch.cat([mask, torch.ones_like(mask)])
        return scored(padded, mask, length + right)[:1, :length]

    def shared() -> Tensor:
        both = ids.expand(2, -1)
        rows = {"prompt_ids": both[:, :-length], "completion_ids": both[:, -length:]}
        lengths = np.tile([ids.size(1) - length, length], (2, 1))
        in_rows = shared_prompts.model_for(model, rows | shared_prompts.arrange(rows, lengths, np.zeros(2)))
        return scored(both, torch.ones_like(both), length, in_rows)

    def same(*passes: Any) -> bool:
        distances = []
        for one in passes:
            try:
                distances.append((one() - alone).square().mean().sqrt())
            except Exception:  # whatever a model raises that does not take such a mask
                distances.append(alone.new_tensor(torch.inf))
        found: Tensor = trainer.accelerator.gather(torch.stack(distances).max()[None].to(device))
        precision = torch.finfo(_dtype(trainer)).eps
        return bool((found <= max(2 * precision**0.5, 64 * precision)).all())

    training = model.training
    model.eval()
    checkpointing: Any = trainer.args.gradient_checkpointing_kwargs
    with disable_gradient_checkpointing(model, checkpointing):
        alone = logps()
        harmless = same(partial(logps, 8), partial(logps, 0, longest))
        balance = harmless and shared_prompts.balance(trainer.accelerator.unwrap_model(model))
        share = bool(balance) and same(shared)
    model.train(training)
    said = "do not depend" if harmless else "depend"
    seconds = time.perf_counter() - began
    return Padding(harmless, share), f"Log-probabilities {said} on padding (checked in {seconds:.1f} s)"


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
