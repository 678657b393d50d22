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

MOST_TOKENS = 24  # tokens of a prompt, and of a completion, that are passed through the model with and without padding


def takes_positions(model: Any) -> bool:
    """
    Whether a model takes the positions of its tokens as `position_ids`. Not with images, and not with PEFT's prompt
    learning, which puts tokens of its own before them and drops the positions.
    """
    if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
        return False
    base = model.get_base_model() if is_peft_model(model) else model
    if base.config.get_text_config() is not base.config:  # with images, positions are not places in the text
        return False
    return "position_ids" in inspect.signature(base.forward).parameters


def with_positions(model: Any, *, attention_mask: Tensor, first: int = 0, **inputs: Any) -> Any:
    """A pass in which padding on the left does not count as positions, as in generation: they begin with `first`."""
    left_of_tokens = attention_mask.cumsum(dim=1) == 0
    n_left = left_of_tokens.sum(dim=1, keepdim=True)
    positions = torch.arange(attention_mask.size(1), device=n_left.device) - n_left + first
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
    prompt, completion = _longest(input_ids, attention_mask, width)
    # The tokens where they meet
    padded_left, padded_right, noise = _distances(trainer, prompt[-MOST_TOKENS:], completion[:MOST_TOKENS])
    n_prompt_columns = input_ids.size(1) - width
    widest = n_prompt_columns + (trainer.args.max_completion_length or width)
    # A model that may scale its positions by the width of the batch counts as infinitely far away.
    may_scale = widest > _widest_unscaled(trainer.model.config)
    scaled = noise.new_tensor(torch.inf if may_scale else 0.0)
    numbers = torch.stack([padded_left, padded_right, scaled, noise]).unsqueeze(0)
    of_processes = trainer.accelerator.gather(numbers.to(trainer.accelerator.device))
    distances, noises = of_processes.tensor_split([3], dim=1)
    # The bounds in the docstring; `eps` is 2⁻²³, 2⁻¹⁰ and 2⁻⁷.
    least_bound = 2 * _rounding_unit(trainer) ** 0.5
    bounds = (4 * noises).clamp(min=least_bound)
    return bool((distances <= bounds).all())


def _distances(trainer: Any, prompt: Tensor, completion: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """
    How far the log-probabilities of a completion's tokens are from those without padding, as a root mean square: with
    padding on the left, with padding on the right, and by the rounding of other positions alone.
    """
    model = trainer.model
    ids = torch.cat([prompt, completion]).unsqueeze(0)
    n_scored = len(completion)

    def logps(left: int = 0, right: int = 0, first: int = 0) -> Tensor:
        """Log-probabilities with this padding on both sides, and positions that begin with `first`."""
        padded_ids = pad(ids, (left, right))
        mask = pad(torch.ones_like(ids), (left, right))
        policy = partial(with_positions, model, first=first) if trainer._takes_positions else model
        pass_of_trl = GRPOTrainer._get_per_token_logps_and_entropies
        logps_of_tokens, _, _ = pass_of_trl(trainer, policy, padded_ids, mask, n_scored + right)
        return logps_of_tokens[:, :n_scored]

    def distance(one: Tensor, other: Tensor) -> Tensor:
        return (one - other).square().mean().sqrt()

    checkpointing: Any = trainer.args.gradient_checkpointing_kwargs
    with evaluating(model), disable_gradient_checkpointing(model, checkpointing):
        alone = logps()
        noise = distance(logps(first=2), logps(first=1))  # some models reset themselves at position 0
        padded_left = distance(logps(left=8), alone)
        padded_right = distance(logps(right=8), alone)
    return padded_left, padded_right, noise


def _longest(input_ids: Tensor, attention_mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Tokens of the longest completion in rows `[B, P + width]`, and before it of its prompt: at least one of each."""
    first = input_ids.size(1) - width  # column of the completions' first tokens
    lengths = attention_mask[:, first:].sum(dim=1)
    row = int(lengths.argmax())
    is_token = attention_mask[row].bool()
    is_token[first - 1 : first + 1] = True  # also if all of a prompt or completion is masked
    prompt, completion = input_ids[row].tensor_split([first])
    is_prompt_token, is_completion_token = is_token.tensor_split([first])
    return prompt[is_prompt_token], completion[is_completion_token]


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Within this context the model has no dropout; afterwards it is in the mode in which it was."""
    training = model.training
    # In place of `model.eval()`: on some CPUs, evaluation rounds bitsandbytes' 4-bit weights anew, for good.
    for module in model.modules():
        module.training = type(module).__name__ == "Linear4bit"
    yield
    model.train(training)


def _widest_unscaled(config: Any) -> float:
    """
    Widest batch, in tokens, of which a model does not scale positions by the width; infinite for a model that never
    does.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    ropes_of_layer_types = [entry for entry in rope.values() if isinstance(entry, dict)]
    for parameters in (rope, *ropes_of_layer_types):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            return parameters.get("original_max_position_embeddings") or text.max_position_embeddings
    return math.inf


def _rounding_unit(trainer: Any) -> float:
    """
    Rounding unit (`eps`) of the coarsest type in which a pass computes: that of mixed precision, or of a weight.
    """
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision, torch.float32)
    types = {mixed}
    for parameter in trainer.model.parameters():
        if parameter.is_floating_point():
            types.add(parameter.dtype)
    return max(torch.finfo(dtype).eps for dtype in types)


def rounding_of_logps(trainer: Any) -> float:
    """Root mean square difference up to which log-probabilities of tokens are the same but for rounding, in nats."""
    precision = _rounding_unit(trainer)
    # The bound of `is_harmless`, but in float32, where a small step of the policy would be within it, a lower one.
    return min(2 * precision**0.5, 1000 * precision)


def reject_other_widths(args: Any) -> None:
    """
    Reject fields by which a completion is scored in batches of several widths, for a model that depends on them, with
    a `ValueError`.
    """
    for name in ("max_staleness", "rollouts", "max_tokens_per_micro_batch"):
        value = getattr(args, name)
        if value:
            raise ValueError(
                f"{name}={value!r} needs a model whose log-probabilities do not depend on padding, as this one's do. "
                f"Remove `{name}`, or train a model such as Llama or Qwen."
            )
    if args.plan_micro_batches:
        logger.warning("The model's log-probabilities depend on padding, so `plan_micro_batches` has no effect.")
