"""Packed samples have the log-probabilities, entropies and gradients of padded ones."""

import logging
from functools import partial

import pytest
import torch
from helpers import make_trainer
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    MambaConfig,
    MambaForCausalLM,
    MptConfig,
    OPTConfig,
    Qwen3NextConfig,
    XGLMConfig,
)
from trl.trainer.utils import add_fused_lm_head

from opo_trl.rollout.packing import check, packed


PROMPT, COMPLETION = 5, 9
LENGTHS = [(2, 3), (5, 9), (4, 1), (1, 6)]  # of prompt and completion


def padded_rows() -> dict[str, torch.Tensor]:
    """Prompts padded on the left, completions on the right, and the labels that TRL passes with them."""
    torch.manual_seed(0)
    mask = torch.tensor([[0] * (PROMPT - p) + [1] * (p + c) + [0] * (COMPLETION - c) for p, c in LENGTHS])
    ids = torch.randint(3, 250, mask.shape) * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def values_and_gradient(model, call) -> tuple[list[torch.Tensor], torch.Tensor]:
    outputs = call(**padded_rows(), fused_lm_head=True)
    values = [outputs.log_probs, outputs.entropy]
    loss = sum((value * torch.linspace(1, 2, value.numel()).view_as(value)).sum() for value in values)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return values, torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_samples_have_the_values_and_the_gradient_of_padded_ones(tiny_model, attention):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager", dtype=torch.float32)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    expected, expected_gradient = values_and_gradient(model, model)
    model.set_attn_implementation(attention)
    values, gradient = values_and_gradient(model, partial(packed, model))
    for value, wanted in zip(values, expected, strict=True):
        assert value.shape == wanted.shape == (len(LENGTHS), PROMPT + COMPLETION - 1)
        assert torch.allclose(value, wanted, atol=1e-5)
    assert (gradient - expected_gradient).norm() < 1e-5 * expected_gradient.norm()


def test_no_padding_passes_through_the_model(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, padding_free=True, plan_micro_batches=False, max_steps=1)
    shapes = []
    trainer.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append((kwargs["input_ids"].shape, kwargs.get("attention_mask"))),
        with_kwargs=True,
    )
    trainer.train()
    unpadded = [shape for shape, mask in shapes if mask is None and shape[0] == 1]
    assert unpadded
    real = sum(batch["prompt_mask"].sum() + batch["completion_mask"].sum() for batch in trainer.steps[0].batches)
    assert sum(shape[1] for shape in unpadded[-len(trainer.steps[0].batches) :]) == real


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4),
        Qwen3NextConfig(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2),
    ],
    ids=["mamba", "hybrid"],
)
def test_models_with_a_state_are_rejected(config):
    with torch.device("meta"):
        model = MambaForCausalLM(config) if config.model_type == "mamba" else AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"padding_free=True .* which carry a state from sample to sample. Leave"):
        check(model)


@pytest.mark.parametrize("kind", [BloomConfig, FalconConfig, MptConfig, OPTConfig, XGLMConfig])
def test_models_that_do_not_separate_samples_by_their_positions_are_rejected(kind):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind())
    with pytest.raises(ValueError, match=rf"padding_free=True .*'{kind.model_type}' is a model without rotary"):
        check(model)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_are_rejected(tiny_model, kind):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), kind(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ValueError, match=r"padding_free=True .* virtual tokens"):
        check(model)


def test_attention_that_saves_nothing_is_reported(tiny_model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="opo_trl.rollout.packing"):
        make_trainer(tiny_model, tmp_path, padding_free=True)
    assert "attn_implementation='sdpa'" in caplog.text
