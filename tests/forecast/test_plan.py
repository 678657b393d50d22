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


UNLIMITED = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}  # of mamba, without a longest context


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


def test_model_without_a_longest_context_is_planned_and_trained(tmp_path, capsys, caplog):
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(
        "mamba",
        **UNLIMITED,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    assert not hasattr(config, "max_position_embeddings")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    unlimited = make(str(tmp_path / "model"), tmp_path / "run", max_completion_length=None)
    assert plan._row_tokens(unlimited)[1] == 0
    assert "of any length" in unlimited.plan
    trainer = make(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "run")
    with caplog.at_level(logging.WARNING, "opo_trl"):
        trainer.train()
    assert trainer.state.global_step == 1
    printed = capsys.readouterr().out
    assert "+ 3) tokens)" in printed
    assert "unknown for mamba" in printed
    assert "The plan has no line" not in caplog.text


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
    assert "  memory" not in capsys.readouterr().out
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
        (
            {"num_iterations": 3},
            "; 3 passes per rollout, after the first over the rollout again: a completion serves 3 ",
        ),
        (
            {"num_iterations": 3, "max_staleness": 2},
            "; 3 passes per rollout, after the first over groups of the latest 3 rollouts: a completion serves 3 ",
        ),
        # One step accumulates both passes.
        ({"num_iterations": 2, "gradient_accumulation_steps": 8}, ": a completion serves 1 "),
    ],
)
def test_plan_says_how_often_completions_serve(tiny_model, tmp_path, options, says):
    text = make(tiny_model, tmp_path, **{**REUSE, **options}).plan
    assert says in text
    assert ("passes" in text) == ("num_iterations" in options)


def test_plan_names_where_the_policy_is_off_policy(tiny_model, tmp_path):
    replay = {**REUSE, "num_iterations": 3, "max_staleness": 2}
    assert "step of a rollout: there the χ²" in make(tiny_model, tmp_path, **REUSE).plan
    assert "and in every pass that replays earlier rollouts: there the χ²" in make(tiny_model, tmp_path, **replay).plan
