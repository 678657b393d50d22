"""A model whose files do not hold exactly its tensors is rejected by their names, before any weight is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import PROMPTS, RecordingBaseline, RecordingOPO, make_trainer
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import loading_report

from opo_trl.checks.weights import check_weights
from opo_trl.data.models import EMBEDDED_MODELS


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.1.mlp.experts.3."


def three_layers(config: dict) -> dict:
    return {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}


def one_layer(config: dict) -> dict:
    return {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


def tied(config: dict) -> dict:
    return {"tie_word_embeddings": True}


@pytest.fixture(scope="module")
def models(tiny_model: str, tmp_path_factory) -> dict[str, Path]:
    """Complete models by kind: one file, shards, merged experts, packed 4-bit weights, a prefix less in the names."""
    folder = tmp_path_factory.mktemp("models")
    dense = Qwen3ForCausalLM.from_pretrained(tiny_model)
    dense.save_pretrained(folder / "sharded", max_shard_size="50KB")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).save_pretrained(folder / "experts")
    packing = BitsAndBytesConfig(load_in_4bit=True)
    packed = Qwen3ForCausalLM.from_pretrained(tiny_model, quantization_config=packing, device_map="cpu")
    packed.save_pretrained(folder / "packed")
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64)).save_pretrained(folder / "gpt2")
    kinds = {name: folder / name for name in ("sharded", "experts", "packed", "gpt2")}
    return {"dense": Path(tiny_model), **kinds}


def damage(
    source: Path,
    folder: Path,
    drop: Callable[[str], bool] = lambda name: False,
    configure: Callable[[dict], dict] = lambda config: {},
) -> str:
    """A copy of a model with other entries in its configuration, and without the tensors that `drop` names."""
    shutil.copytree(source, folder)
    for file in folder.glob("*.safetensors"):
        tensors = {name: tensor for name, tensor in load_file(file).items() if not drop(name)}
        save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | configure(config)))
    return str(folder)


@pytest.mark.parametrize("kind", ["dense", "sharded", "experts", "packed", "gpt2", *EMBEDDED_MODELS])
def test_complete_model_is_accepted(models, kind, capfd):
    path = EMBEDDED_MODELS[kind] if kind in EMBEDDED_MODELS else str(models[kind])
    model = check_weights("model", path, {"dtype": "float32", "device_map": "cpu"})
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("drop", "configure", "options"),
    [
        (lambda name: name == "lm_head.weight", tied, {}),
        (lambda name: name == "model.embed_tokens.weight", tied, {}),
        (lambda name: False, one_layer, {"num_hidden_layers": 1}),
        (lambda name: False, lambda config: {"vocab_size": 5}, {"ignore_mismatched_sizes": True}),
    ],
    ids=["tied head", "tied embedding", "layers left out on purpose", "shapes changed on purpose"],
)
def test_what_may_be_missing(models, tmp_path, drop, configure, options):
    check_weights("model", damage(models["dense"], tmp_path / "model", drop, configure), options)


@pytest.mark.parametrize(
    ("kind", "drop", "configure", "says"),
    [
        ("dense", lambda name: name == UP, lambda config: {}, [f"lack {UP}, "]),
        ("sharded", lambda name: name == UP, lambda config: {}, [f"lack {UP}, "]),
        ("gpt2", lambda name: name.endswith("h.1.ln_1.weight"), lambda config: {}, ["h.1.ln_1.weight, "]),
        ("dense", lambda name: False, three_layers, ["lack model.layers.2.input_layernorm.weight, ", "and 8 more"]),
        ("dense", lambda name: False, one_layer, ["leaves out layers", "model.layers.1.", "num_hidden_layers"]),
        ("dense", lambda name: name == "lm_head.weight", lambda config: {}, ["lack lm_head.weight"]),
        ("dense", lambda name: "embed" in name or "head" in name, tied, ["lack model.embed_tokens.weight"]),
        ("dense", lambda name: False, lambda config: {"intermediate_size": 32}, ["(32, 64)", "(32, 32)", "mlp."]),
        ("experts", lambda name: name.startswith(EXPERT), lambda config: {}, ["layers.1.mlp.experts", "(3, ", "(4, "]),
        ("experts", lambda name: name == f"{EXPERT}up_proj.weight", lambda config: {}, ["layers.1.mlp.experts.gate"]),
        ("experts", lambda name: "experts" in name and "up" in name, lambda config: {}, ["mlp.experts.gate_up_proj"]),
        ("packed", lambda name: name == UP, lambda config: {}, [f"lack {UP}, "]),
        ("packed", lambda name: name.startswith(UP), lambda config: {}, [f"lack {UP}, "]),
        ("packed", lambda name: name == NORM, lambda config: {}, [f"lack {NORM}, "]),
        ("packed", lambda name: False, one_layer, ["leaves out layers"]),
    ],
)
def test_incomplete_model_is_rejected_by_the_names_of_its_tensors(
    models, tmp_path, capfd, kind, drop, configure, says
):
    path = damage(models[kind], tmp_path / "model", drop, configure)
    with pytest.raises(ValueError, match="=") as error:
        check_weights("model_name_or_path", path, {})
    for text in (f"model_name_or_path='{path}'", *says):
        assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""  # neither a table nor a progress bar


def test_merged_tensors_are_named_in_a_terminal_too(models, tmp_path, monkeypatch):
    monkeypatch.setattr(loading_report, "_style", lambda text, color: f"\x1b[35m{text}\x1b[0m")
    path = damage(models["experts"], tmp_path / "model", lambda name: name == f"{EXPERT}up_proj.weight")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.gate_up_proj\. Restore"):
        check_weights("model", path, {})


def test_merged_scales_of_packed_weights_have_names_of_their_own(models, tmp_path):
    """As GPTQ's: the tensor of a layer has another name than the plain one."""
    folder = Path(damage(models["dense"], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    packed = {name.replace("proj.weight", "proj.qweight"): tensor for name, tensor in tensors.items()}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack .*proj.weight"):
        check_weights("model", str(folder), {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    check_weights("model", str(folder), {})


def without(tensor: str, source: str, folder: Path) -> str:
    return damage(Path(source), folder, lambda name: name == tensor)


def test_trainer_rejects_policy_and_reward_model(tiny_model, tmp_path):
    broken = without(UP, tiny_model, tmp_path / "broken")
    with pytest.raises(ValueError, match=rf"model='{broken}': its files lack {UP}"):
        make_trainer(broken, tmp_path / "run")
    with pytest.raises(ValueError, match=rf"reward_funcs='{tiny_model}': its files lack score.weight"):
        make_trainer(tiny_model, tmp_path / "run", trainer_arguments={"reward_funcs": tiny_model})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_rejected(tiny_model, tmp_path, value):
    data = {"train_dataset": Dataset.from_dict({"prompt": PROMPTS})}
    for kind, field in ((AutoModelForCausalLM, "model"), (AutoModelForSequenceClassification, "reward_funcs")):
        model = kind.from_pretrained(tiny_model, num_labels=1)
        model.get_parameter(UP).data[3, 4] = value
        model.save_pretrained(tmp_path / field)
        shutil.copy(f"{tiny_model}/tokenizer.json", tmp_path / field)
        shutil.copy(f"{tiny_model}/tokenizer_config.json", tmp_path / field)
        policy = str(tmp_path / "model") if field == "model" else tiny_model
        rewards = {} if field == "model" else {"reward_funcs": str(tmp_path / field)}
        with pytest.raises(ValueError, match=rf"{field}='{tmp_path / field}': {UP} has NaN or infinite values"):
            make_trainer(policy, tmp_path / "run", trainer_arguments=data | rewards)


def test_a_model_that_would_not_be_trained_is_rejected_before_it_trains(tiny_model, tmp_path, capsys):
    def loaded(**options):
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), adapter, **options)

    adapter = tmp_path / "adapter"
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(r=2)).save_pretrained(adapter)
    frozen = AutoModelForCausalLM.from_pretrained(tiny_model).requires_grad_(False)
    for model, beta in ((loaded(), 0.0), (loaded(), 0.1), (loaded().merge_and_unload(), 0.0), (frozen, 0.0)):
        trainer = make_trainer(model, tmp_path / "run", beta=beta)
        with pytest.raises(ValueError, match=r"model='.*' would not be trained: .*is_trainable=True.*requires_grad_"):
            trainer.train()
    assert "training plan" not in capsys.readouterr().out
    trainer.model.requires_grad_(True)  # also what is changed after the trainer is made counts
    trainer.train()
    make_trainer(loaded(is_trainable=True), tmp_path / "run", beta=0.1).train()


@pytest.mark.parametrize("trainer_class", [RecordingOPO, RecordingBaseline])
def test_an_optimizer_of_other_weights_is_rejected(tiny_model, tmp_path, trainer_class):
    model, another = (AutoModelForCausalLM.from_pretrained(tiny_model) for _ in range(2))

    def trainer(optimized, **arguments):
        arguments["optimizers"] = (torch.optim.SGD(optimized.parameters(), lr=0.1), None)
        return make_trainer(model, tmp_path, trainer_class=trainer_class, trainer_arguments=arguments)

    own = trainer(model)
    own.train()
    own.train()  # by then, Accelerate has wrapped it
    for made in (trainer(another), trainer(model, peft_config=LoraConfig(r=2))):
        with pytest.raises(ValueError, match=r"optimizers=\('SGD', '…'\) would not train the model"):
            made.train()
