"""Padding-free forward passes: the samples of a micro-batch follow one another in one row, without padding."""

from typing import Any

from accelerate.logging import get_logger
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.utils.generic import is_flash_attention_requested


logger = get_logger(__name__)

# Layers that separate samples by their position ids. Recurrent ones would carry their state into the next sample.
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def packed(model: Any, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **options: Any) -> Any:
    """
    Outputs of a model for padded rows `[B, L]`, per token `[B, L - 1]`, without computing padding. It is called as TRL
    calls a model with its fused head; DDP's, DeepSpeed's or PEFT's wrapper may be around it.

    Without an attention mask, Transformers separates packed samples by their position ids, which restart with each
    sample. Flash attention then computes every sample by itself; other implementations compute attention between all
    tokens, and mask it between samples.

    Rows whose mask has gaps stay padded: a gap in the position ids would separate what follows it from its sample.
    """
    real = attention_mask.bool()
    begins = real & ~pad(real, (1, 0))[:, :-1]
    if (begins.sum(dim=1) > 1).any():
        return model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **options)
    place = real.flatten().nonzero()[:, 0]
    tables = {"input_ids": input_ids, "labels": labels, "position_ids": attention_mask.cumsum(dim=1) - 1}
    outputs = model(**options | {name: rows.flatten()[place][None] for name, rows in tables.items()})
    for name in {"log_probs", "entropy"} & outputs.keys():  # a reference model's head has no entropy
        # The head returns one value fewer than there are tokens. A sample's first token, which follows the sample
        # before it, has no label.
        values = pad(outputs[name], (1, 0))
        outputs[name] = values.new_zeros(real.shape).masked_scatter(real, values)[:, 1:]
    return outputs


def check(model: PreTrainedModel) -> None:
    """Check that samples can be packed for a model, and warn where that saves nothing."""
    config = model.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    reason = None
    if config is not model.config:
        reason = "a model of images and text"
    elif others or getattr(model, "_is_stateful", False):
        reason = f"a model with {', '.join(others) or 'recurrent'} layers, which carry a state from sample to sample"
    elif any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
        reason = "a model with virtual tokens, which only the first sample of a row would see"
    elif not (model._supports_attention_backend and any("rotary_emb" in name for name, _ in model.named_modules())):
        reason = "a model without rotary positions or Transformers' own attention, which keep samples apart"
    if reason is not None:
        raise ValueError(
            f"padding_free=True is for attention over text, and {config.model_type!r} is {reason}. Leave "
            "`padding_free` out."
        )
    if not is_flash_attention_requested(config):
        logger.warning(
            f"padding_free=True saves nothing with attn_implementation={config._attn_implementation!r}, which also "
            "computes attention between samples. Set it to 'flash_attention_2', or leave `padding_free` out."
        )
