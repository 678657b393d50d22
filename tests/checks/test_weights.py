"""A model whose files lack tensors, or of which nothing would be trained, is rejected before any weight is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from recording_trainers import make_trainer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from opo_trl.checks.weights import check_weights


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def models(tiny_model: str, tmp_path_factory) -> dict[str, Path]:
    """Complete models by kind: one file, shards, merged experts, packed 4-bit weights, a prefix less in the names."""
    folder = tmp_path_factory.mktemp("models")
    dense = Qwen3ForCausalLM.from_pretrained(tiny_model)
    dense.save_pretrained(folder / "sharded", max_shard_size="50KB")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, **heads, **experts)
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "experts")
    packing = BitsAndBytesConfig(load_in_4bit=True)
    packed = Qwen3ForCausalLM.from_pretrained(tiny_model, quantization_config=packing, device_map="cpu")
    packed.save_pretrained(folder / "packed")
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64)
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    kinds = {name: folder / name for name in ("sharded", "experts", "packed", "gpt2")}
    return {"dense": Path(tiny_model), **kinds}


def damage(source: Path, folder: Path, drop: Callable[[str], bool], **config) -> str:
    """A copy of a model with other entries in its configuration, and without the tensors that `drop` names."""
    shutil.copytree(source, folder)
    for file in folder.glob("*.safetensors"):
        complete = load_file(file)
        tensors = {name: tensor for name, tensor in complete.items() if not drop(name)}
        save_file(tensors, file, metadata={"format": "pt"})
    config_file = folder / "config.json"
    fields = json.loads(config_file.read_text())
    fields.update(config)
    config_file.write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize("kind", ["sharded", "experts", "packed", "gpt2"])
def test_complete_model_is_accepted(models, kind):
    check_weights("model", str(models[kind]), {"dtype": "float32", "device_map": "cpu"})


@pytest.mark.parametrize("tensor", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_tensor_may_be_missing(models, tmp_path, tensor):
    path = damage(models["dense"], tmp_path / "model", lambda name: name == tensor, tie_word_embeddings=True)
    check_weights("model", path, {})


@pytest.mark.parametrize(("kind", "missing"), [("sharded", UP), ("gpt2", "h.1.ln_1.weight")])
def test_incomplete_model_is_rejected_by_the_names_of_its_tensors(models, tmp_path, kind, missing):
    path = damage(models[kind], tmp_path / "model", lambda name: name.endswith(missing))
    with pytest.raises(ValueError, match=f"model_name_or_path='{path}': its files .*{missing}, "):
        check_weights("model_name_or_path", path, {})


def test_a_missing_part_of_a_merged_tensor_raises_too(models, tmp_path):
    missing = "model.layers.1.mlp.experts.3.up_proj.weight"
    path = damage(models["experts"], tmp_path / "model", lambda name: name == missing)
    with pytest.raises((ValueError, RuntimeError)):
        check_weights("model", path, {})


def test_trainer_rejects_a_reward_model(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=rf"reward_funcs='{tiny_model}': its files lack score.weight"):
        make_trainer(tiny_model, tmp_path / "run", trainer_arguments={"reward_funcs": tiny_model})
    assert not (tmp_path / "run").exists()


def test_a_model_that_would_not_be_trained_is_rejected_before_it_trains(tiny_model, tmp_path, capsys):
    def load_adapter(**options):
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        return PeftModel.from_pretrained(base, adapter, **options)

    adapter = tmp_path / "adapter"
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    get_peft_model(base, LoraConfig(r=2)).save_pretrained(adapter)
    frozen = AutoModelForCausalLM.from_pretrained(tiny_model).requires_grad_(False)
    merged = load_adapter().merge_and_unload()
    for model, beta in ((load_adapter(), 0.0), (load_adapter(), 0.1), (merged, 0.0), (frozen, 0.0)):
        trainer = make_trainer(model, tmp_path / "run", beta=beta)
        with pytest.raises(ValueError, match=r"model='.*' would not be trained: .*is_trainable=True.*requires_grad_"):
            trainer.train()
    assert "training plan" not in capsys.readouterr().out
    trainer.model.requires_grad_(True)  # also what is changed after the trainer is made counts
    trainer.train()
    trainable = load_adapter(is_trainable=True)
    make_trainer(trainable, tmp_path / "run", beta=0.1).train()


def test_an_optimizer_of_other_weights_is_rejected(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)

    def trainer(**arguments):
        arguments["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.1), None)
        return make_trainer(model, tmp_path, trainer_arguments=arguments)

    trainer_of_model = trainer()
    trainer_of_model.train()
    trainer_of_model.train()  # by then, Accelerate has wrapped the optimizer
    with pytest.raises(ValueError, match="`optimizers` would not train the model"):
        trainer(peft_config=LoraConfig(r=2)).train()


@pytest.mark.parametrize(
    ("names", "trained"), [(["sft"], "sft"), (["default", "new"], "new"), (["default", "ref"], "default")]
)
def test_adapter_of_which_another_would_be_the_reference_is_rejected(tiny_model, tmp_path, names, trained):
    first, *others = names
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    model = get_peft_model(base, LoraConfig(r=2), adapter_name=first)
    for name in others:
        model.add_adapter(name, LoraConfig(r=2))
    model.set_adapter(trained)
    with pytest.raises(ValueError, match=rf"beta=0\.1: .* '{trained}' is trained"):
        make_trainer(model, tmp_path, beta=0.1)


def test_adapter_on_the_head_is_named(tiny_model, tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match=r"adapter to `lm_head` is not supported.*would never be trained"):
        make_trainer(tiny_model, tmp_path, trainer_arguments={"peft_config": adapter})
