"""
Forward passes that compute a prompt once for all its completions in a micro-batch.

A row then holds a prompt and, one after the other, its completions. Each completion attends to the prompt and to
itself, at the positions that it has in a row of its own, so its log-probabilities are the same up to rounding. It
begins with a copy of the prompt's last token, which predicts its first.

A prompt attends to itself causally, which takes no mask: only completions need one ([`attention`]). For this, they
begin in the same column of all rows.

An example: the prompt 8 9 with the completions 1 and 2 3. TRL computes the two rows of a table, 8 9 1 and 8 9 2 3.
Here the model computes one row, of which the last five columns are those of the completions:

>>> batch = {"prompt_ids": torch.tensor([[8, 9], [8, 9]]), "completion_ids": torch.tensor([[1, 0], [2, 3]])}
>>> table = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
>>> arranged = arrange(batch, lengths=np.array([[2, 1], [2, 2]]), prompts=np.array([5, 5]))
>>> table.flatten()[arranged["opo_source"]]
tensor([[8, 9, 1, 9, 2, 3]])
>>> arranged["opo_completion"]
tensor([[1, 1, 2, 2, 2]])
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..batch import Batch, to_device


# Gated MLP, rotary positions, no other layers. Experts are chosen for each token by itself.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")

_attention_of_transformers = ALL_ATTENTION_FUNCTIONS["sdpa"]


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """
    Transformers' attention by SDPA, of tensors `[rows, heads, width, width of a head]`. A mask may also have fewer
    rows than there are queries: it is then that of the last ones, those of completions, and the others, those of
    prompts, attend to themselves causally.
    """
    n_masked = query.size(2) if attention_mask is None else attention_mask.size(-2)
    n_prompt = query.size(2) - n_masked
    if n_prompt <= 0 or n_masked == 1:  # a mask of one row is that of all queries
        return _attention_of_transformers(module, query, key, value, attention_mask, **options)
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    attend = partial(scaled_dot_product_attention, dropout_p=options["dropout"], scale=options["scaling"])
    prompt, completions = slice(n_prompt), slice(n_prompt, None)
    of_prompts = attend(query[:, :, prompt], key[:, :, prompt], value[:, :, prompt], is_causal=True)
    of_completions = attend(query[:, :, completions], key, value, attn_mask=attention_mask)
    return torch.cat([of_prompts.transpose(1, 2), of_completions.transpose(1, 2)], dim=1), None


# Under this name, as Transformers makes masks for continuous batching by no other; and for good, as gradient
# checkpointing computes layers again in the backward pass.
ALL_ATTENTION_FUNCTIONS.register("sdpa", attention)


def break_even_width(model: PreTrainedModel) -> float | None:
    """
    Width of a row, in tokens, at which attention costs as much as the rest of a layer: attention costs more the wider
    the row. `None` for a model that may compute something else if a prompt is computed once for its completions:
    prompts must not be shared then.

    That needs full attention to whatever a mask allows, by [`attention`], at rotary positions that are given.
    """
    config = model.config
    # Models with a gated MLP, rotary positions and no other layers
    if config.model_type not in ARCHITECTURES or hasattr(config, "auto_map"):  # code from the Hub
        return None
    types_of_layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if types_of_layers != {"full_attention"} or getattr(config, "sliding_window", None) is not None:
        return None
    if config._attn_implementation not in (None, "sdpa") or ALL_ATTENTION_FUNCTIONS["sdpa"] is not attention:
        return None
    if getattr(config, "output_router_logits", False):  # of which TRL takes a mean by a mask of all tokens
        return None
    adapters = getattr(model, "peft_config", {}).values()
    if any(adapter.is_prompt_learning for adapter in adapters):
        return None
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width_of_queries = head_width * config.num_attention_heads
    width_of_keys = head_width * config.num_key_value_heads
    attention_width = 2 * (width_of_queries + width_of_keys)  # outputs are as wide as queries, and values as keys
    mlp_width = config.intermediate_size
    if config.model_type == "qwen3_moe":
        mlp_width = config.num_experts_per_tok * config.moe_intermediate_size
    # Of a layer, for a token: attention, and three matrices of the gated MLP
    weights_of_layer = config.hidden_size * (attention_width + 3 * mlp_width)
    return weights_of_layer / (2 * width_of_queries)  # of a token: one product with its key, one with its value


def hashes(batch: Batch) -> Tensor:
    """
    A number for each completion's prompt, `[B]`: equal for equal prompts, and for others with a probability of about
    2^-45 or less, whatever their padding.
    """
    ids = batch["prompt_ids"]
    mask = batch["prompt_mask"].bool()
    # A random factor and offset for each column. They are drawn from the right, as prompts are padded on the left: a
    # prompt has the same ones in a table of any width.
    random = np.random.default_rng(0)
    from_the_right = random.integers(-(2**63), 2**63, (ids.size(1), 2))
    of_columns = from_the_right[::-1].copy()
    factors, offsets = to_device(of_columns, ids.device).unbind(dim=1)
    terms = ids * factors + offsets
    return torch.where(mask, terms, 0).sum(dim=1)  # wraps around, so the number may be any of 64 bits


def arrange(batch: Batch, lengths: np.ndarray, prompts: np.ndarray) -> Batch:
    """
    Where the tokens of completions go that share their prompts; those of a prompt follow each other in the batch.

    `lengths` are tokens of prompts and of completions, `[B, 2]`, and `prompts` tells prompts apart, by any number,
    `[B]`. Returns, with a row for each prompt, and −1 where there is no token:

    - `opo_source`: the place of each token in the batch's table `[B, P + T]`, counted row by row;
    - `opo_completion`, of the last columns alone: the number of the token's completion, from 1 on;
    - `opo_shape`: the shape of the table.
    """
    shape = _shape(batch)
    n_completions, n_completion_columns, n_prompt_columns = shape
    width_of_table = n_prompt_columns + n_completion_columns
    first_places = np.arange(n_completions) * width_of_table + n_prompt_columns  # of the completions' first tokens
    begins_prompt = 1 + np.flatnonzero(np.diff(prompts))
    places_of_prompts = np.split(first_places, begins_prompt)
    lengths_of_prompts = np.split(lengths, begins_prompt)
    rows = [_row_of_prompt(*prompt) for prompt in zip(places_of_prompts, lengths_of_prompts, strict=True)]
    as_table = partial(pad_sequence, batch_first=True, padding_value=-1)
    of_prompts, of_completions, numbers = map(as_table, zip(*rows, strict=True))
    device = batch["completion_ids"].device
    return {
        "opo_source": to_device(torch.cat([of_prompts, of_completions], dim=1), device),
        "opo_completion": to_device(numbers, device),
        "opo_shape": shape,
    }


def _row_of_prompt(first_places: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """
    Places of the tokens of a prompt, and of those of its G completions with the number of each token's completion;
    from the places of the completions' first tokens, `[G]`, and the lengths of prompt and completions, `[G, 2]`.
    """
    # The prompt is taken from the row of its first completion. It is left without its last token, with which each
    # completion begins.
    prompt_length = max(lengths[0, 0], 1)
    end_of_prompt = first_places[0] - 1
    of_prompt = torch.arange(end_of_prompt + 1 - prompt_length, end_of_prompt)
    ends = first_places + lengths[:, 1]
    of_completions = [torch.arange(first - 1, end) for first, end in zip(first_places, ends, strict=True)]
    numbers = [torch.full_like(places, number) for number, places in enumerate(of_completions, 1)]
    return of_prompt, torch.cat(of_completions), torch.cat(numbers)


def model_for(model: Any, batch: Batch) -> Any:
    """How a model computes a batch: prompts once, where [`arrange`] has placed their tokens."""
    # An override may have cut completions or columns, to which these places do not apply.
    if batch.get("opo_shape") != _shape(batch):
        return model
    return partial(shared_pass, model, batch["opo_source"], batch["opo_completion"])


def _shape(batch: Batch) -> tuple[int, int, int]:
    """Number of completions, and of the columns for tokens of completions and of prompts."""
    n_completions, n_completion_columns = batch["completion_ids"].shape
    return n_completions, n_completion_columns, batch["prompt_ids"].size(1)


def shared_pass(
    model: Any,
    source: Tensor,
    completion: Tensor,
    *,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    position_ids: Tensor | None = None,
    **options: Any,
) -> Any:
    """
    Outputs of a model with TRL's fused head, called as TRL calls it for padded rows `[B, L]`, that computes
    completions as [`arrange`] has placed them: per token, `[B, L - 1]`, as without sharing.

    The model may have DDP's, DeepSpeed's or PEFT's wrapper around it.
    """
    n_prompt_columns = source.size(1) - completion.size(1)
    source = _masked_behind(source, attention_mask, n_prompt_columns)
    place = source.clamp(min=0)

    def placed(table: Tensor) -> Tensor:
        """Values of a table `[B, L]`, of each token in its place."""
        return table.flatten()[place]

    is_attended = (source >= 0) & placed(attention_mask).bool()
    # Only tokens of completions have a label, and each is in one place.
    placed_labels = placed(labels).masked_fill(~is_attended, -100)
    positions = place % input_ids.size(1) if position_ids is None else placed(position_ids)
    outputs = model(
        input_ids=placed(input_ids),
        attention_mask=_mask_of_completions(completion, is_attended).unsqueeze(1),
        position_ids=positions,
        labels=placed_labels,
        **options,
    )
    for name in {"log_probs", "entropy"} & outputs.keys():  # a reference model's head has no entropy
        outputs[name] = in_rows(outputs[name], place, placed_labels != -100, input_ids.shape)
    return outputs


def in_rows(values: Tensor, place: Tensor, has_label: Tensor, shape: torch.Size) -> Tensor:
    """
    What TRL's head has returned for placed tokens, in the rows of a table of this `shape`, `[B, L]`: `[B, L - 1]`, as
    the head returns one value fewer than there are tokens. Tokens without a label get 0.
    """
    of_tokens = pad(values, (1, 0))
    of_labels = torch.where(has_label, of_tokens, 0.0).flatten()
    empty = of_labels.new_zeros(shape.numel())
    # By sums, as a token of a prompt is in several places; but there it has no label, and adds 0.
    table = empty.scatter_add(0, place.flatten(), of_labels)
    return table.view(shape)[:, 1:]


def _masked_behind(source: Tensor, attention_mask: Tensor, n_prompt_columns: int) -> Tensor:
    """
    Places of tokens, `[rows, width]`, with those that are masked in a prompt behind its others: prompts have no mask,
    but no token attends causally to what follows it.
    """
    of_prompts, of_completions = source.tensor_split([n_prompt_columns], dim=1)
    mask = attention_mask.flatten()[of_prompts.clamp(min=0)]
    order = mask.argsort(dim=1, descending=True, stable=True)
    return torch.cat([of_prompts.gather(1, order), of_completions], dim=1)


def _mask_of_completions(completion: Tensor, is_attended: Tensor) -> Tensor:
    """
    Which tokens of a row each token of completions attends to, bool `[rows, columns of completions, width]`: the
    prompt, and its own completion so far.
    """
    n_prompt_columns = is_attended.size(1) - completion.size(1)
    own = completion.unsqueeze(2) == completion.unsqueeze(1)
    mask = pad(own.tril_(), (n_prompt_columns, 0), value=True)
    mask &= is_attended.unsqueeze(1)
    # Padding attends to itself: attention to nothing would be NaN.
    to_itself = mask.diagonal(offset=n_prompt_columns, dim1=1, dim2=2)
    to_itself |= ~mask.any(dim=2)
    return mask
