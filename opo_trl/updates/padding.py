"""
Whether padding changes the log-probabilities of a model: a few passes over a completion, before the first are used.

Micro-batches have other widths than the pass over a rollout. There, a model that does not mask padding in a
recurrence, or scales its positions by the width of the batch (`longrope`, `dynamic`), has other log-probabilities, and
the log-ratio of a policy that has not moved is not 0. Models with learned positions, such as GPT-2, would count left
padding; they get the positions of generation.
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.nn.functional import pad
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing


logger = get_logger(__name__)


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
def is_harmless(trainer: Any, input_ids: Tensor, attention_mask: Tensor, width: int) -> bool:
    """
    Whether the trainer's model has the same log-probabilities in micro-batches of any width: found by the longest
    completion of this process's rows, `[B, P + T]` with T = `width`, alone, padded on the left and on the right. All
    processes make the same passes, and agree.

    Log-probabilities count as the same if their root mean square difference is at most four times what it is when all
    positions are shifted by one, which only rounding notices where positions are relative; or 0.0007 nats in float32,
    0.06 in float16 and 0.18 in bfloat16. Two equal passes would be equal to the bit.
    """
    model, most = trainer.model, 24
    split = partial(torch.tensor_split, indices=(-width,), dim=-1)
    row = int(attention_mask[:, -width:].sum(dim=1).argmax())
    real = attention_mask[row].bool()
    real[-width - 1 : 1 - width or None] = True  # a token of each, also if all is masked
    prompt, completion = (part[chosen] for part, chosen in zip(split(input_ids[row]), split(real), strict=True))
    ids, length = torch.cat([prompt[-most:], completion[:most]])[None], min(len(completion), most)

    def logps(left: int = 0, right: int = 0, first: int = 0) -> Tensor:
        padded, mask = pad(ids, (left, right)), pad(torch.ones_like(ids), (left, right))
        call = partial(with_positions, model, first=first) if trainer._takes_positions else model
        of_trl = GRPOTrainer._get_per_token_logps_and_entropies
        return of_trl(trainer, call, padded, mask, length + right)[0][:, :length]

    def distance(one: Tensor, other: Tensor) -> Tensor:
        return (one - other).square().mean().sqrt()

    checkpointing: Any = trainer.args.gradient_checkpointing_kwargs
    with evaluating(model), disable_gradient_checkpointing(model, checkpointing):
        alone = logps()
        noise = distance(logps(first=2), logps(first=1))  # some models reset themselves at position 0
        found = [distance(logps(left=8), alone), distance(logps(right=8), alone)]
    longest = input_ids.size(1) - width + (trainer.args.max_completion_length or width)
    scales = alone.new_tensor(torch.inf if longest > _context(model.config) else 0.0)
    table = trainer.accelerator.gather(torch.stack([*found, scales, noise])[None].to(trainer.accelerator.device))
    return bool((table[:, :-1] <= (4 * table[:, -1:]).clamp(min=2 * _precision(trainer) ** 0.5)).all())


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Within this context the model has no dropout."""
    training = model.training
    for module in model.modules():  # on some CPUs, evaluation rounds bitsandbytes' weights anew, for good
        module.training = type(module).__name__ == "Linear4bit"
    yield
    model.train(training)


def _context(config: Any) -> float:
    """Tokens beyond which a model scales its positions by the length of the batch."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # of each type of layers, perhaps
        if kind.get("rope_type") in ("dynamic", "longrope"):
            return kind.get("original_max_position_embeddings") or text.max_position_embeddings
    return math.inf


def _precision(trainer: Any) -> float:
    """Of the coarsest type in which a pass computes."""
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision)
    kinds = {each.dtype for each in trainer.model.parameters() if each.is_floating_point()} | {mixed or torch.float32}
    return max(torch.finfo(kind).eps for kind in kinds)


def rounding_of_logps(trainer: Any) -> float:
    """Root mean square difference up to which log-probabilities of tokens are the same but for rounding, in nats."""
    precision = _precision(trainer)
    # The bound of `is_harmless`, but in float32, where a small step of the policy would be within it, a lower one.
    return min(2 * precision**0.5, 1000 * precision)


def reject_other_widths(args: Any) -> None:
    """Reject fields by which a completion is scored in batches of several widths, for a model that depends on them."""
    for name in ("max_staleness", "rollouts", "max_tokens_per_micro_batch"):
        if value := getattr(args, name):
            said = f"{name}={value!r} needs a model whose log-probabilities do not depend on padding, as this one's do"
            raise ValueError(f"{said}. Remove `{name}`, or train a model such as Llama or Qwen.")
    if args.plan_micro_batches:
        logger.warning("The model's log-probabilities depend on padding, so `plan_micro_batches` has no effect.")
