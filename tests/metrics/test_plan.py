"""The plan works for any model, never ends a run, and is made once."""

import logging

import pytest
import torch
import transformers
from datasets import Dataset
from helpers import PROMPTS
from tiny import make_tokenizer
from transformers import AutoConfig
from trl import ModelConfig

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.checks.model import dry_run_model
from opo_trl.metrics import plan
from opo_trl.rollout import trainer as rollout


# Families without `max_position_embeddings`; GRPOTrainer trains all of them.
UNLIMITED = {
    "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 2},
    "mpt": {"d_model": 32, "n_layers": 1, "n_heads": 2, "expansion_ratio": 2, "max_seq_len": 64},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "state_size": 4,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
    },
    "falcon_mamba": {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4},
    "recurrent_gemma": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "lru_width": 32,
        "attention_window_size": 16,
    },
}


def make(model, tmp_path, **options) -> OPOTrainer:
    args = OPOConfig(
        str(tmp_path),
        **{
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 3,
            "max_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            **options,
        },
    )
    return OPOTrainer(
        model=model,
        reward_funcs=lambda completions, **columns: [float(len(text)) for text in completions],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=make_tokenizer(),
    )


@pytest.mark.parametrize("model_type", UNLIMITED)
def test_model_without_a_longest_context_is_planned_and_trained(model_type, tmp_path, capsys, caplog):
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(
        model_type,
        **UNLIMITED[model_type],
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    assert not hasattr(config, "max_position_embeddings")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    trainer = make(model, tmp_path / "run")
    with caplog.at_level(logging.WARNING, "opo_trl"):
        trainer.train()
    assert trainer.state.global_step == 1
    printed = capsys.readouterr().out
    assert "+ 3) tokens)" in printed
    assert f"unknown for {model_type}" in printed
    assert "The plan has no line" not in caplog.text
    dry_run_model(trainer.args, ModelConfig(), str(tmp_path / "model"))


def test_unlimited_completions_in_an_unlimited_context(tmp_path):
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model("mamba", **UNLIMITED["mamba"], vocab_size=len(tokenizer))
    trainer = make(transformers.AutoModelForCausalLM.from_config(config), tmp_path, max_completion_length=None)
    assert plan._row_tokens(trainer)[1] == 0
    assert "of any length" in trainer.plan


def test_what_cannot_be_planned_is_left_out_with_a_warning(tiny_model, tmp_path, monkeypatch, capsys, caplog):
    trainer = make(tiny_model, tmp_path)
    monkeypatch.setattr(plan, "memory_plan", lambda trainer: {}["layers"])
    with caplog.at_level(logging.WARNING, "opo_trl"):
        trainer.train()
    assert "memory     unknown" in capsys.readouterr().out
    assert "The plan has no line for memory: KeyError: 'layers'" in caplog.text
    assert trainer.state.global_step == 1


def test_plan_is_made_once_for_the_folder_and_the_print(tiny_model, tmp_path, monkeypatch, capsys):
    made = []
    real = rollout.training_plan
    monkeypatch.setattr(rollout, "training_plan", lambda made_for: made.append(made_for) or real(made_for))
    trainer = make(tiny_model, tmp_path)
    text = trainer.plan
    trainer.train()
    assert len(made) == 1
    assert capsys.readouterr().out.count(text) == 1
    trainer.args.max_steps, trainer.args.mu = 2, 0.7
    trainer.train()
    assert len(made) == 2
    assert "mu = 0.7" in capsys.readouterr().out
