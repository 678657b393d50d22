"""Completions of a model on a CPU, drawn from a generator of their own, with their log-probabilities."""

from typing import Any

import torch
from torch import Generator, Tensor


@torch.no_grad()
def sample(
    model: Any,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    temperature: float | Tensor,
    eos: Tensor,
    generator: Generator,
) -> tuple[Tensor, Tensor]:
    """Tokens of a completion of each prompt, and their log-probabilities, `[B, T]`; after `eos` they do not count."""
    width, pad = max(map(len, prompts)), int(eos[0])  # any: padding is masked
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    mask = (torch.arange(width) >= width - lengths.unsqueeze(1)).long()
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    done, cache = torch.zeros(len(prompts), dtype=torch.bool), None
    tokens: list[Tensor] = []
    logps: list[Tensor] = []
    while len(tokens) < max_tokens and not done.all():
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": position, "past_key_values": cache}
        out = model(**inputs, use_cache=True, logits_to_keep=1)
        full = (out.logits[:, -1].float() / temperature).log_softmax(dim=1)
        ids, cache = torch.multinomial(full.exp(), 1, generator=generator), out.past_key_values
        tokens.append(ids)
        logps.append(full.gather(1, ids))
        done = done | torch.isin(ids[:, 0], eos)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        position = position[:, -1:] + 1
    return torch.cat(tokens, dim=1), torch.cat(logps, dim=1)


def up_to_end(ids: list[int], *ends: int) -> list[int]:
    """The tokens up to the first that ends a completion, which is among them; all if there is none."""
    length = next((place for place, token in enumerate(ids, 1) if token in ends), len(ids))
    return ids[:length]
