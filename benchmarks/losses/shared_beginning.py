"""The beginning that the prompts of a batch have in common, computed once: of worked lines before every problem."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from opo_trl.updates import cutting, shared_prompts

from . import offline, sampling


def apply(*, in_one_pass: bool = False) -> None:
    """
    In this process, when training with shared prompts and in tasks of `offline`; for models with full attention.

    `in_one_pass`: whether an optimizer step has as few passes as its rows allow. The planner, which does not know that
    the beginning is computed once, would otherwise cut a step of short completions in two.
    """
    shared_prompts.shared_pass = shared_pass
    offline.sample = sample
    if in_one_pass:
        cutting.PASS_TOKENS["cpu"] = cutting.FEWEST_PASSES


def _common(prompts: list[list[int]]) -> int:
    """Tokens that several prompts begin with, at most all but their last."""
    most = min(map(len, prompts)) - 1
    return next((place for place in range(most) if len({prompt[place] for prompt in prompts}) > 1), most)


def shared_pass(
    model: Any,
    source: Tensor,
    completion: Tensor,
    *,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    position_ids: Tensor,
    **options: Any,
) -> Any:
    """As `shared_prompts.shared_pass`, with all prompts and completions in one row after the common beginning."""
    n_prompt_columns = source.size(1) - completion.size(1)
    segment = pad(completion, (n_prompt_columns, 0))  # 0 for a prompt
    is_prompt = (source >= 0) & (segment == 0)
    tokens = input_ids.flatten()
    prompts = [tokens[own[of_prompt]].tolist() for own, of_prompt in zip(source, is_prompt, strict=True)]
    n_common = _common(prompts) if len(prompts) > 1 else 0
    beginning = is_prompt & (torch.arange(source.size(1)) < n_common)
    kept = (source >= 0) & ~beginning
    kept[0] |= beginning[0]
    prompt = torch.arange(len(source)).unsqueeze(1).expand_as(source)[kept]
    source, segment, beginning = source[kept], segment[kept], beginning[kept]
    own_completion = (segment.unsqueeze(1) == segment) | (segment == 0)
    seen = beginning | ((prompt.unsqueeze(1) == prompt) & own_completion)
    mask = seen.tril()[None, None]
    wanted = labels.flatten()[source].unsqueeze(0)
    positions = position_ids.flatten()[source].unsqueeze(0)
    outputs = model(
        input_ids=tokens[source].unsqueeze(0),
        attention_mask=mask,
        position_ids=positions,
        labels=wanted,
        **options,
    )
    for name in {"log_probs", "entropy"} & outputs.keys():
        outputs[name] = shared_prompts.in_rows(outputs[name], source, wanted != -100, input_ids.shape)
    return outputs


@torch.no_grad()
def sample(model: Any, prompts: list[list[int]], *, temperature: float | Sequence[float], **options: Any) -> Any:
    """
    As `sampling.sample`; prompts that are equal to their predecessor are not computed again. Several temperatures are
    those of the completions in turn.
    """
    if isinstance(temperature, Sequence):
        repeated = [*temperature] * (len(prompts) // len(temperature))
        temperature = torch.tensor(repeated).unsqueeze(1)
    starts = [row for row, prompt in enumerate(prompts) if not row or prompt != prompts[row - 1]]
    # For each row, the place of its prompt among the starts.
    place = torch.bincount(torch.tensor(starts), minlength=len(prompts)).cumsum(0) - 1
    common = _common(prompts)
    first = torch.tensor([prompts[0][:common]])
    beginning = model(input_ids=first, use_cache=True, logits_to_keep=1).past_key_values
    beginning.batch_repeat_interleave(len(starts))

    def rest(*, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: Any, **kept: Any):
        is_first = past_key_values is None
        rows = starts if is_first else slice(None)
        out = model(
            input_ids=input_ids[rows],
            attention_mask=pad(attention_mask[rows], (common, 0), value=1),
            position_ids=position_ids[rows] + common,
            past_key_values=beginning if is_first else past_key_values,
            **kept,
        )
        if is_first:
            out.past_key_values.batch_select_indices(place)
            out.logits = out.logits[place]
        return out

    return sampling.sample(rest, [prompt[common:] for prompt in prompts], temperature=temperature, **options)
