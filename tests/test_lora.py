"""LoRA and QLoRA: the saved adapter is the trained one, and the base has not changed."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command.test_train import arguments
from device_fields import PRETEND, RECIPES
from named_tensors import same_weights
from peft import LoraConfig, PeftModel, get_peft_model
from recording_trainers import changed_weights, make_trainer, metric, trained
from safetensors.torch import load_file, save_file
from scripted_rollouts import Script, even_tokens
from started_programs import free_port
from torch import distributed
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl.generation.vllm_generation import VLLMGeneration

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.command.train import main
from opo_trl.data.arithmetic import base_model_path
from opo_trl.models.frozen_base import FrozenBase


OPTIONS = {"max_steps": 3, "num_iterations": 2, "beta": 0.1}


def lora(target_modules="all-linear") -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=target_modules, task_type="CAUSAL_LM")


def base_of(model) -> dict[str, torch.Tensor]:
    """A copy of the weights that are not trained."""
    frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    return copies(frozen)


def copies(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def changed(model, before: dict[str, torch.Tensor]) -> list[str]:
    """Of the weights that have been copied before, the names of those that are others now."""
    now = dict(model.named_parameters())
    return [name for name, weight in before.items() if not torch.equal(now[name], weight)]


def logits(model) -> torch.Tensor:
    tokens = torch.arange(3, 40, device=model.device)
    with torch.no_grad():
        return model.eval()(input_ids=tokens[None]).logits.cpu()


def test_saved_adapter_on_the_base_model_is_the_trained_model(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, trainer_arguments={"peft_config": lora()}, **OPTIONS)
    base, before = base_of(trainer.model), logits(trainer.model)
    trainer.model.train()
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    after = logits(trainer.model)
    assert (after - before).abs().max() > 0.1
    base_model = AutoModelForCausalLM.from_pretrained(tiny_model)
    loaded = PeftModel.from_pretrained(base_model, tmp_path / "adapter")
    assert torch.equal(logits(loaded.to(trainer.model.device)), after)
    assert len(base) > 20
    assert changed(trainer.model, base) == []


@pytest.fixture(scope="module")
def adapter(tiny_model, tmp_path_factory) -> str:
    """Folder of an adapter that has been trained, and has a chat template of its own."""
    folder = tmp_path_factory.mktemp("adapter")
    trainer = make_trainer(tiny_model, folder / "run", trainer_arguments={"peft_config": lora()}, **OPTIONS)
    trainer.train()
    trainer.processing_class.chat_template = "{{ messages[0]['content'] }}"
    trainer.save_model(str(folder))
    return str(folder)


def damaged(adapter: str, folder: Path, drop: str = "-", **config) -> str:
    """A copy of an adapter without some of its tensors, and with other entries in its configuration."""
    shutil.copytree(adapter, folder)
    weights = folder / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(weights).items() if drop not in name}, weights)
    file = folder / "adapter_config.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | config))
    return str(folder)


def test_training_goes_on_from_an_adapter(adapter, tiny_model, tmp_path):
    """Its KL term is to the adapter at the start, and a resumed run has the same reference."""
    samples = {"trainer_arguments": {"rollout_func": None, "reward_funcs": even_tokens}}
    options = {**OPTIONS, **samples, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(adapter, tmp_path / "run", **options)
    base_model = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = logits(PeftModel.from_pretrained(base_model, adapter))
    assert torch.equal(logits(trainer.model), before)
    assert trainer.processing_class.chat_template == "{{ messages[0]['content'] }}"
    trained_weights = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    assert {name.split(".")[-2] for name in trained_weights} == {"default"}
    base = base_of(trainer.model)
    trainer.model.train()
    trainer.train()
    assert changed(trainer.model, base) == []
    assert (logits(trainer.model) - before).abs().max() > 0.01
    kl = metric(trainer, "kl")
    assert kl[0] == 0.0 < min(kl[1:])
    again = make_trainer(adapter, tmp_path / "run", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert torch.equal(logits(again.model), logits(trainer.model))
    assert metric(again, "kl") == kl


def test_recipe_goes_on_from_an_adapter(tmp_path, capsys):
    """One without a tokenizer has its base's."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base_model_path()), lora(["q_proj", "v_proj"]))
    folder = tmp_path / "adapter"
    model.save_pretrained(folder)
    short = {"max_steps": 1, "report_size": 6, "validation_size": 6, "warmup_steps": 0, "model_name_or_path": folder}
    recipe = RECIPES / "arithmetic" / "opo.yaml"
    assert main(arguments(recipe, **short, use_peft=True, output_dir=tmp_path / "twice")) == 2
    error = capsys.readouterr().err
    assert "is an adapter already. To go on training it, remove `peft_config` (in a recipe: `use_peft`)" in error
    assert not (tmp_path / "twice").exists()
    assert main(arguments(recipe, **short, output_dir=tmp_path / "run")) == 0
    start = load_file(folder / "adapter_model.safetensors")
    end = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert start.keys() == end.keys()
    assert not same_weights(start, end)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_name_or_path": "/absent/base"}, "base_model_name_or_path='/absent/base', which does not exist"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path=None, which does not exist"),
        ({"drop": "layers.1.mlp.up_proj.lora_B"}, "layers.1.mlp.up_proj.lora_B.weight, of 1 tensors, do not fit"),
        ({"target_modules": ["q_proj"]}, "tensors, do not fit base_model_name_or_path="),
    ],
)
def test_adapter_that_cannot_be_loaded_is_rejected(adapter, tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer(damaged(adapter, tmp_path / "adapter", **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_an_adapter_is_named(adapter, tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"reward_funcs='.*' is an adapter, which cannot score. Merge it"):
        make_trainer(tiny_model, tmp_path, trainer_arguments={"reward_funcs": adapter})
    both = shutil.copytree(tiny_model, tmp_path / "both")
    shutil.copytree(adapter, both, dirs_exist_ok=True)
    with pytest.raises(ValueError, match="is an adapter and a complete model in one folder"):
        make_trainer(str(both), tmp_path)


def test_weights_are_sent_to_a_server_and_the_base_stays_as_it_is(tiny_model, tmp_path, monkeypatch):
    """TRL's own merging and sending, twice; only the server is not there."""
    sent = []

    def update_named_params(names, weights):
        sent.append({name: weight.clone() for name, weight in weights})

    server = SimpleNamespace(
        base_url="http://127.0.0.1:9", update_named_params=update_named_params, reset_prefix_cache=lambda: None
    )
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda engine: setattr(engine, "vllm_client", server))
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        trainer_arguments={"peft_config": lora()},
        use_vllm=True,
        vllm_mode="server",
        vllm_importance_sampling_correction=False,
        model_init_kwargs={"dtype": "bfloat16"},
    )
    base = base_of(trainer.model)
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        trainer.vllm_generation.sync_weights()
        assert changed(trainer.model, base) == []
    layer = "model.layers.0.self_attn.q_proj"
    first, second = (weights[f"{layer}.weight"] for weights in sent)
    trainer.model.merge_adapter()
    merged = trainer.model.base_model.model.get_submodule(layer)
    assert torch.equal(second, merged.base_layer.weight)
    assert not torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_base_that_is_tied_to_embeddings_without_an_adapter_is_restored():
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base_model_path()), lora(["lm_head"]))
    embeddings = model.get_input_embeddings().weight
    assert embeddings is model.get_output_embeddings().base_layer.weight
    before = embeddings.clone()
    with torch.no_grad(), FrozenBase(model):
        embeddings.add_(1)  # as a merge does
    assert torch.equal(embeddings, before)


@pytest.mark.skipif(PRETEND, reason="bitsandbytes has no kernels for the pretend device")
def test_qlora_trains_the_adapter_on_a_base_of_four_bits(tiny_model, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'opo_trl[quantization]'")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    trainer = make_trainer(
        tiny_model, tmp_path, trainer_arguments={"peft_config": lora(), "quantization_config": four_bits}, **OPTIONS
    )
    base = base_of(trainer.model)
    assert sum(p.dtype == torch.uint8 for p in base.values()) == 14
    # Only B: A starts at random values, next to which these steps are small in bfloat16.
    adapter = copies({name: weight for name, weight in trainer.model.named_parameters() if "lora_B" in name})
    trainer.train()
    assert changed(trainer.model, base) == []
    assert changed(trainer.model, adapter) == list(adapter)


def test_quantized_base_with_vllm_is_rejected(tiny_model, tmp_path):
    args = OPOConfig(output_dir=str(tmp_path), use_vllm=True, use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="use_vllm=True cannot be combined with a quantized base model"):
        OPOTrainer(
            tiny_model, Script().reward_functions(), args, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
        )


def test_gathered_weights_are_sharded_again_before_they_are_sent():
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model[1], mesh=mesh, reshard_after_forward=False)  # as Accelerate does with a model's last layers
        fully_shard(model, mesh=mesh)
        with torch.no_grad():
            model(torch.ones(1, 2))  # an evaluation
        assert not isinstance(model[1].weight, DTensor)
        with FrozenBase(model):
            assert isinstance(model[1].weight, DTensor)
    finally:
        distributed.destroy_process_group()


# A rollout without a signal


def continued(folder: str, dropout: float = 0.0) -> PeftModel:
    """A model with an adapter that has been trained before: it changes the model's outputs."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)


ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3}


@pytest.mark.parametrize("kind", ["new", "continued"])
def test_kl_of_an_adapter_that_is_its_reference_moves_nothing(tiny_model, tmp_path, kind):
    model, peft_config = (tiny_model, lora()) if kind == "new" else (continued(tiny_model), None)
    arguments = {"trainer_arguments": {"peft_config": peft_config}, "script": Script([1.0] * 8, seed=3)}
    steps = {"steps_per_generation": 4, "gradient_accumulation_steps": 1}
    trainer = trained(model, tmp_path, **arguments, **OPTIONS, **steps, **ADAMW)
    assert not changed_weights(trainer)


@pytest.mark.parametrize(("dropout", "off_policy"), [(0.5, True), (0.5, False), (0.0, True)])
def test_dropout_in_the_log_ratio_is_warned_of(tiny_model, tmp_path, caplog, dropout, off_policy):
    steps = {"steps_per_generation": 4 if off_policy else 2, "gradient_accumulation_steps": 2}
    make_trainer(continued(tiny_model, dropout), tmp_path, **steps)
    assert ("Dropout of 0.5 becomes part of every log-ratio" in caplog.text) == (dropout > 0 and off_policy)


def test_own_completions_of_an_adapter_with_dropout_are_recognized(tiny_model, tmp_path):
    script = Script([1.0] * 8)
    several = {"steps_per_generation": 4, "max_steps": 2}
    trained(continued(tiny_model), tmp_path, script=script, save_rollouts=True, **several)
    replay = {"rollouts": str(tmp_path / "rollouts")}
    arguments = dict.fromkeys(("train_dataset", "reward_funcs", "rollout_func"))
    run = trained(
        continued(tiny_model, 0.5), tmp_path / "again", trainer_arguments=arguments, **replay, **several, **ADAMW
    )
    assert not changed_weights(run)
