"""The plan works for any model, never ends a run, and is made once."""

import logging

import pytest
import torch
import transformers
from datasets import Dataset
from helpers import PROMPTS, USE_CPU
from tiny import make_tokenizer
from transformers import AutoConfig
from trl.chat_template_utils import qwen3_chat_template

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.forecast import plan


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
            "use_cpu": USE_CPU,
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


def test_unlimited_completions_in_an_unlimited_context(tmp_path):
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model("mamba", **UNLIMITED["mamba"], vocab_size=len(tokenizer))
    trainer = make(transformers.AutoModelForCausalLM.from_config(config), tmp_path, max_completion_length=None)
    assert plan._row_tokens(trainer)[1] == 0
    assert "of any length" in trainer.plan


def calculate(expression: str) -> str:
    """
    Compute an expression.

    Args:
        expression: What to compute.
    """
    return expression


@pytest.mark.parametrize("tools", [[], [calculate]], ids=["no tools", "a tool"])
def test_prompts_are_counted_as_the_model_gets_them(tiny_model, tmp_path, tools):
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    tokenizer = make_tokenizer()
    if tools:
        tokenizer.chat_template = qwen3_chat_template
    args = OPOConfig(str(tmp_path), use_cpu=USE_CPU, bf16=False, report_to="none", max_completion_length=3)
    data = Dataset.from_dict({"prompt": prompts})
    trainer = OPOTrainer(tiny_model, lambda **_: [0.0], args, data, processing_class=tokenizer, tools=tools or None)
    how = {"tools": tools or None, "add_generation_prompt": True, "return_dict": True}
    assert plan._row_tokens(trainer)[0] == max(map(len, tokenizer.apply_chat_template(prompts, **how)["input_ids"]))


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
    real = plan.training_plan
    monkeypatch.setattr(plan, "training_plan", lambda made_for: made.append(made_for) or real(made_for))
    trainer = make(tiny_model, tmp_path)
    text = trainer.plan
    trainer.train()
    assert len(made) == 1
    assert capsys.readouterr().out.count(text) == 1
    trainer.args.max_steps, trainer.args.mu = 2, 0.7
    trainer.train()
    assert len(made) == 2
    assert "mu = 0.7" in capsys.readouterr().out


# Four micro-batches of 4 per rollout, an optimizer step from every two.
REUSE = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "(processes × micro-batches × rows: 1 × 2 × 4)\n"),
        ({"num_iterations": 3}, "; 3 passes over a rollout: a completion serves 3 optimizer steps\n"),
        (
            {"num_iterations": 3, "max_staleness": 2},
            "; 3 passes per rollout: the first over the rollout, the others over groups of the latest 3 rollouts; a "
            "completion serves 3 optimizer steps on average\n",
        ),
        # One step accumulates both passes.
        (
            {"num_iterations": 2, "gradient_accumulation_steps": 8},
            "; 2 passes over a rollout: a completion serves 1 optimizer step\n",
        ),
        (
            {"num_iterations": 2, "gradient_accumulation_steps": 16},
            "; 2 passes over a rollout: a completion serves 1 optimizer step\n",
        ),
        ({"max_completions": 4000}, "; the run ends with the rollout that reaches 4,000 completions\n"),
    ],
)
def test_plan_says_how_often_completions_serve(tiny_model, tmp_path, options, says):
    text = make(tiny_model, tmp_path, **{**REUSE, **options}).plan
    assert says in text
    assert ("passes" in text) == ("num_iterations" in options)
    assert ("the run ends" in text) == ("max_completions" in options)


def test_plan_names_where_the_policy_is_off_policy(tiny_model, tmp_path):
    replay = {**REUSE, "num_iterations": 3, "max_staleness": 2}
    assert "step of a rollout: there the χ²" in make(tiny_model, tmp_path, **REUSE).plan
    assert "and in every pass that replays earlier rollouts: there the χ²" in make(tiny_model, tmp_path, **replay).plan
    baseline = OPOConfig(str(tmp_path), use_cpu=USE_CPU, bf16=False, num_generations=2, **replay)
    assert "and in every pass that replays" in baseline.describe_policy()


def test_plan_counts_the_kept_rollouts(tiny_model, tmp_path):
    """As many bytes as the buffer's columns per token hold, if every completion has the full length."""
    options = {**REUSE, "num_iterations": 2, "max_staleness": 2, "max_steps": 12, "beta": 0.1}
    trainer = make(tiny_model, tmp_path, **options)

    def kept(trainer) -> float:
        return plan.memory_plan(trainer)["generation"]["kept rollouts"]

    planned = kept(trainer)
    for short in ({"max_steps": 6}, {"max_completions": 20}):  # two rollouts
        assert kept(make(tiny_model, tmp_path, **{**options, **short})) == pytest.approx(planned * 2 / 3)
    assert all("kept rollouts" in components for components in plan.memory_plan(trainer).values())
    assert "kept rollouts" not in plan.memory_plan(make(tiny_model, tmp_path, **REUSE))["generation"]
    trainer.train()
    assert len(trainer._replay.rollouts) == 3
    columns = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    columns += ("old_per_token_logps", "ref_per_token_logps")
    held = sum(rows[name].nbytes for rows in trainer._replay.rollouts for name in columns)
    # Prompts are counted at their longest.
    assert held <= planned < 1.3 * held
