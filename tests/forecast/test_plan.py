"""The plan is right, works for any model, never ends a run, and is made once."""

import json
import logging
import shutil

import pytest
import torch
from datasets import Dataset
from device_fields import SMALL, USE_CPU
from guessing_game import guess
from PIL import Image
from recording_trainers import make_trainer
from scripted_rollouts import PROMPTS
from tiny import make_tokenizer
from tiny_image_model import vision_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl.chat_template_utils import qwen3_chat_template

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.command.train import main
from opo_trl.forecast import plan


UNLIMITED = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}  # of mamba, without a longest context


def make(model, tmp_path, prompts=PROMPTS, tokenizer=None, **options) -> OPOTrainer:
    args = OPOConfig(str(tmp_path), **SMALL, num_generations=2, max_completion_length=3, max_steps=1)
    data = Dataset.from_dict({"prompt": prompts})
    return OPOTrainer(model, reward, args, data, processing_class=tokenizer or make_tokenizer(), **options)


def reward(completions, **columns):
    return [float(len(text)) for text in completions]


def test_model_without_a_longest_context_is_planned_and_trained(tmp_path, capsys, caplog):
    tokenizer = make_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model("mamba", **UNLIMITED, **ends, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    trainer = make(AutoModelForCausalLM.from_config(config), tmp_path / "run")
    with caplog.at_level(logging.WARNING, "opo_trl"):
        trainer.train()
    assert trainer.state.global_step == 1
    printed = capsys.readouterr().out
    assert "(one process; 8 × (" in printed
    assert "+ 3) tokens)" in printed
    assert "unknown for mamba" in printed
    assert "The plan has no line" not in caplog.text


def test_prompts_are_counted_as_the_model_gets_them(tiny_model, tmp_path):
    """With the schemas of tools."""
    prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    trainer = make(tiny_model, tmp_path, prompts, tokenizer, tools=[guess])
    how = {"tools": [guess], "add_generation_prompt": True, "return_dict": True}
    ids = tokenizer.apply_chat_template(prompts, **how)["input_ids"]
    longest_prompt, _ = plan._longest_tokens(trainer)
    assert longest_prompt == max(map(len, ids))


def test_recorded_rollouts_are_counted_as_they_are(tiny_model, tmp_path):
    """Not by the longest completion that could be generated."""
    texts = ["2", "2", "22", "22", "3", "3", "4", "4" * 30]
    rows = [{"prompt": "1+1=", "completion": text, "reward": 1.0} for text in texts]
    lines = [json.dumps(row) + "\n" for row in rows]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(lines))
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        rollouts=str(file),
        rollouts_model=tiny_model,
        max_completion_length=400,
        steps_per_generation=2,
        trainer_arguments=dict.fromkeys(("train_dataset", "reward_funcs", "rollout_func")),
    )
    assert plan._longest_tokens(trainer) == (4, 31)  # with the token that ends a turn
    assert "× (4 + 31) tokens" in trainer.plan
    without_paths = trainer.plan.replace(str(tmp_path), "")
    assert "400" not in without_paths
    assert "rows.jsonl, with rewards\n" in trainer.plan
    assert "KV cache" not in plan.memory_plan(trainer)["generation"]


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_are_counted_with_their_prompts(tmp_path, caplog, column):
    ask = [{"role": "user", "content": "Which colour?"}]
    images = [Image.new("RGB", size, "red") for size in ((28, 28), (84, 112), (56, 56), (28, 56))]
    rows = [{"prompt": ask, column: [image] if column == "images" else image} for image in images]
    model, processor = vision_model()
    args = OPOConfig(str(tmp_path), **SMALL, num_generations=2, max_completion_length=3, max_steps=1)
    trainer = OPOTrainer(model, reward, args, Dataset.from_list(rows), processing_class=processor)
    generate = trainer._generate
    widths = []

    def generate_and_measure(*inputs):
        prompts, *others = generate(*inputs)
        widths.extend(map(len, prompts))
        return prompts, *others

    trainer._generate = generate_and_measure
    trainer.evaluate(trainer.train_dataset)
    with caplog.at_level(logging.WARNING, "opo_trl"):
        assert f"× ({max(widths)} + 3) tokens" in trainer.plan
    assert "The plan has no line" not in caplog.text


def test_what_cannot_be_planned_is_left_out_with_a_warning(tiny_model, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(plan, "memory_plan", lambda trainer, place: {}["layers"])
    with caplog.at_level(logging.WARNING, "opo_trl"):
        assert "  memory" not in make_trainer(tiny_model, tmp_path).plan
    assert "The plan has no line for memory: KeyError: 'layers'" in caplog.text


def test_plan_is_made_again_only_for_another_training(tiny_model, tmp_path, capsys):
    trainer = make_trainer(tiny_model, tmp_path)
    text = trainer.plan
    trainer.train()
    assert capsys.readouterr().out.count(text) == 1
    trainer.args.max_steps = 2
    trainer.args.mu = 0.7
    trainer.train()
    assert "mu = 0.7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"beta": 0.1, "alpha": 0.2},
            ["on-policy", "1 optimizer steps per", "beta = 0.1", "alpha = 0.2", "reference"],
        ),
        ({"steps_per_generation": 4, "mu": 0.5}, ["2 optimizer steps per rollout", "off-policy after", "mu = 0.5"]),
        ({"num_iterations": 3, "max_staleness": 2}, ["after the first over groups of the latest 3 rollouts\n"]),
    ],
)
def test_plan_says_what_is_trained(tiny_model, tmp_path, options, said):
    trainer = make_trainer(tiny_model, tmp_path, **options)
    for text in said:
        assert text in trainer.plan, trainer.plan


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, None),
        ({"top_p": 1.0, "top_k": 0, "min_p": 0.0}, None),
        ({"top_p": 0.9, "vllm_importance_sampling_correction": False}, None),
        ({"top_p": 0.9, "use_vllm": False}, None),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 20, "generation_kwargs": {"min_p": 0.1}}, "top_k=20, min_p=0.1"),
    ],
)
def test_plan_says_that_a_cut_off_biases_the_correction(options, fields, tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, **options)
    trainer.args.use_vllm = options.get("use_vllm", True)  # there is none here
    lines = [line.strip() for line in trainer.plan.splitlines()]
    of_sampling = [line for line in lines if line.startswith("sampling ")]
    if fields is None:
        assert of_sampling == []
    else:
        (line,) = of_sampling
        assert line.startswith(f"sampling   {fields} with vLLM's correction: a completion's weight is")


def test_a_folder_without_weights_is_planned_as_with_them(tiny_model, tmp_path, capsys, monkeypatch):
    weightless = tmp_path / "weightless"
    shutil.copytree(tiny_model, weightless, ignore=shutil.ignore_patterns("*.safetensors"))
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"problem": f"{i} + 1?", "answer": f"{i + 1}"}) + "\n" for i in range(99)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plans = []
    for folder in (weightless, tiny_model):
        words = ["--model_name_or_path", str(folder), "--dataset_name", str(problems), "--dtype", "bfloat16"]
        words += ["--output_dir", str(tmp_path / "run"), "--bf16", "false", "--use_cpu", str(USE_CPU)]
        assert main([*words, "--plan"]) == 0
        printed = capsys.readouterr().out
        plans.append(printed[printed.index("OPO training plan") :])
    assert plans[0] == plans[1]
    assert "weights" in plans[0]
    assert main([words[0], str(weightless), *words[2:]]) == 2  # a run needs them
    assert "no file named model.safetensors" in capsys.readouterr().err
