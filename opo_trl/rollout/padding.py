"""
Whether padding changes the log-probabilities of a model: a few passes over a completion, before the first are used.

Micro-batches have other widths than the pass over a rollout. There, a model that scales its positions by the width of
the batch (`longrope`, `dynamic`), or does not mask padding in a recurrence, has other log-probabilities, and the
log-ratio of a policy that has not moved is not 0. Models with learned positions, such as GPT-2, would count left
padding; they get the positions of generation.
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
    """What padding, and a row that is shared, do to log-probabilities."""

    harmless: bool = True  # whether they are the same in micro-batches of any width
    shared: bool = True  # whether they are the same in a row with another completion of the prompt


def takes_positions(model: Any) -> bool:
    """Whether a model of text takes the positions of its tokens; PEFT drops them where it puts tokens before them."""
    if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
        return False
    base = model.get_base_model() if is_peft_model(model) else model
    text = base.config.get_text_config() is base.config  # those of images are other positions
    return text and "position_ids" in inspect.signature(base.forward).parameters


def with_positions(model: Any, *, attention_mask: Tensor, first: int = 0, **inputs: Any) -> Any:
    """A pass in which padding on the left does not count as positions, as in generation: they begin with `first`."""
    left = (attention_mask.cumsum(dim=1) == 0).sum(dim=1, keepdim=True)
    positions = torch.arange(attention_mask.size(1), device=left.device) - left + first
    return model(attention_mask=attention_mask, position_ids=positions.clamp(min=0), **inputs)


@torch.no_grad()
def find(trainer: Any, input_ids: Tensor, attention_mask: Tensor, width: int) -> tuple[Padding, str]:
    """
    Find it for the trainer's model, by the longest completion of this process's rows, `[B, P + T]` with T = `width`:
    alone, padded on the left, padded on the right, and twice in a row. Also returns a line that says it. All processes
    make the same passes, and agree.

    Log-probabilities count as the same if their root mean square difference is at most four times what it is when all
    positions are shifted by one, which only rounding notices where positions are relative; or 0.0007 nats in float32,
    0.06 in float16 and 0.18 in bfloat16. Two equal passes would be equal to the bit.
    """
    began, model, device = time.perf_counter(), trainer.model, trainer.accelerator.device
    split = partial(torch.tensor_split, indices=(-width,), dim=-1)
    row = int(attention_mask[:, -width:].sum(dim=1).argmax())
    real = attention_mask[row].bool()
    real[-width - 1 : 1 - width or None] = True  # a token of each, also if all is masked
    prompt, completion = (part[chosen] for part, chosen in zip(split(input_ids[row]), split(real), strict=True))
    most, widest = 24, input_ids.size(1)
    if context := _context(model.config):  # the sample alone is to lie within it, and a padded one beyond
        longest = widest - width + (trainer.args.max_completion_length or width)
        most, widest = min(most, max(context // 4, 1)), max(widest, min(longest, 2 * context))
    ids, length = torch.cat([prompt[-most:], completion[:most]])[None], min(len(completion), most)

    def scored(ids: Tensor, mask: Tensor, width: int, call: Any = model, first: int = 0) -> Tensor:
        call = partial(with_positions, call, first=first) if trainer._takes_positions else call
        return GRPOTrainer._get_per_token_logps_and_entropies(trainer, call, ids, mask, width)[0]

    def logps(left: int = 0, right: int = 0, first: int = 0) -> Tensor:
        padded, mask = pad(ids, (left, right)), pad(torch.ones_like(ids), (left, right))
        return scored(padded, mask, length + right, first=first)[:, :length]

    def shared() -> Tensor:
        both = ids.expand(2, -1)
        rows = {"prompt_ids": both[:, :-length], "completion_ids": both[:, -length:]}
        lengths = np.tile([ids.size(1) - length, length], (2, 1))
        in_rows = shared_prompts.model_for(model, rows | shared_prompts.arrange(rows, lengths, np.zeros(2)))
        return scored(both, torch.ones_like(both), length, in_rows)

    def distance(one: Any, other: Any = None) -> Tensor:
        try:
            return (one() - (other() if other else alone)).square().mean().sqrt()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a model raises that does not take such a mask
            return alone.new_tensor(torch.inf)

    def same(*passes: Any) -> bool:
        distances: Tensor = trainer.accelerator.gather(torch.stack([*map(distance, passes), noise])[None].to(device))
        return bool((distances[:, :-1] <= (4 * distances[:, -1:]).clamp(min=2 * _precision(trainer) ** 0.5)).all())

    training = model.training
    for module in model.modules():  # on some CPUs, evaluation rounds bitsandbytes' weights anew, for good
        module.training = type(module).__name__ == "Linear4bit"
    checkpointing: Any = trainer.args.gradient_checkpointing_kwargs
    with disable_gradient_checkpointing(model, checkpointing):
        alone = logps()
        # Some models reset themselves at position 0. An error is no rounding.
        noise = distance(partial(logps, first=2), partial(logps, first=1)).nan_to_num(posinf=0.0)
        harmless = same(partial(logps, left=8), partial(logps, right=max(widest - ids.size(1), 8)))
        balance = harmless and shared_prompts.balance(trainer.accelerator.unwrap_model(model))
        share = bool(balance) and same(shared)
        logps()  # dynamic scaling remembers a wide pass until a short one
    model.train(training)
    said = "do not depend" if harmless else "depend"
    seconds = time.perf_counter() - began
    return Padding(harmless, share), f"Log-probabilities {said} on padding (checked in {seconds:.1f} s)"


def _context(config: Any) -> int | None:
    """Tokens beyond which a model scales its positions by the length of the batch; `None` if it does not."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # of each type of layers, perhaps
        if kind.get("rope_type") in ("dynamic", "longrope"):
            return kind.get("original_max_position_embeddings") or text.max_position_embeddings
    return None


def _precision(trainer: Any) -> float:
    """Of the coarsest type in which a pass computes."""
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
    kinds = {each.dtype for each in trainer.model.parameters() if each.is_floating_point()} | {mixed or torch.float32}
    return max(torch.finfo(kind).eps for kind in kinds)


def reject_other_widths(args: Any) -> None:
    """Reject fields by which a completion is scored in batches of several widths, for a model that depends on them."""
    fields = {"max_staleness": 0, "rollouts": None, "max_tokens_per_micro_batch": None}
    for name in (name for name, default in fields.items() if getattr(args, name, default) != default):
        raise ValueError(
            f"{name}={getattr(args, name)!r} needs a model whose log-probabilities do not depend on padding, but this "
            f"one's do: a completion has others in each micro-batch. Remove `{name}`, or train a model such as Llama "
            "or Qwen, with neither `longrope` nor `dynamic` RoPE and without virtual tokens."
        )
    if getattr(args, "plan_micro_batches", False):
        logger.warning(
            "The log-probabilities of this model depend on padding, so `plan_micro_batches` has no effect: all "
            "micro-batches are as wide as their rollout."
        )
