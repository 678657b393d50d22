"""Options that libraries would ignore, or sample otherwise with, without a word."""

import inspect
import re

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, trainer, trainer_optimizer, training_args

from opo_trl import OPOConfig
from opo_trl.checks.silent import FSDP_OPTIONS, OPTIM_ARGS, check_generation_config
from opo_trl.checks.weights import check_trainable


def config(folder, **fields) -> OPOConfig:
    return OPOConfig(str(folder), use_cpu=True, bf16=False, **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"optim_args": "lr=3"}, r"optim_args='lr=3': 'lr' has no effect on adamw_torch_fused\. Remove 'lr'"),
        ({"optim": "sgd", "optim_args": "momentum=0.9,eps=1"}, "'eps' has no effect on sgd"),
        (
            {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"min_lr": 0.1}},
            "no effect on the schedule 'constant'",
        ),
        ({"fsdp_config": {"fsdp_offload": True}}, "'fsdp_offload' has no effect"),
        ({"generation_kwargs": {"temprature": 2}}, "'temprature' has no effect: it is not an option"),
        ({"generation_kwargs": {"num_beams": 2}}, "'num_beams' must be 1: TRL samples one completion per row"),
        ({"generation_kwargs": {"do_sample": False}}, "'do_sample' must be True"),
        ({"generation_kwargs": {"temperature": 0.5}}, r"contradicts temperature=1\.0\. Set `temperature` to 0\.5"),
        ({"generation_kwargs": {"max_new_tokens": 9}}, "Set `max_completion_length` to 9"),
        ({"generation_kwargs": {"top_k": 5}, "top_k": 3}, "contradicts top_k=3"),
    ],
)
def test_what_would_be_ignored_is_named(tmp_path, fields, says):
    with pytest.raises(ValueError, match=says):
        config(tmp_path, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true"},
        {"generation_kwargs": {"top_k": 5, "typical_p": 0.9, "num_beams": 1, "temperature": 1.0}},
        {"generation_kwargs": {"eos_token_id": 3, "stop_strings": None}},
    ],
)
def test_what_acts_is_accepted(tmp_path, fields):
    config(tmp_path, **fields)


def test_table_of_optim_args_is_what_each_optimizer_reads():
    for name, handler in trainer_optimizer._OPTIMIZER_HANDLERS.items():
        if any(part in name for part in ("galore", "apollo", "lomo")) or name.value.startswith("rmsprop_"):
            continue
        source = inspect.getsource(handler)
        read = re.findall(r"""optim_args(?:\.get|\.pop)\(\s*"(\w+)"|"(\w+)" in ctx\.optim_args""", source)
        read = {one or other for one, other in read}
        for words in re.findall(r"for key in \((.*?)\)", source):
            read |= {*re.findall(r'"(\w+)"', words)}
        is_other = handler is trainer_optimizer._get_bitsandbytes_optimizer and "ademamix" not in name.value
        assert {*OPTIM_ARGS.get(name.value, ())} == (set() if is_other else read), name


def test_table_of_fsdp_options_is_what_transformers_reads():
    source = inspect.getsource(training_args) + inspect.getsource(trainer)
    read = re.findall(r"""fsdp_config(?:\[|\.get\(|\.setdefault\()\s*["'](\w+)["']""", source)
    assert {*read} == FSDP_OPTIONS


def test_adapter_on_a_misspelt_name_is_named(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "vproj"]))
    with pytest.warns(UserWarning, match="vproj matches nothing in the model"):
        check_trainable(adapted, None)


def test_model_whose_file_asks_for_beams_is_named():
    of_model = {"num_beams": 4}
    with pytest.raises(ValueError, match=r"generation_config.json of the model sets num_beams=4.*num_beams: 1"):
        check_generation_config({}, of_model)
    check_generation_config({"num_beams": 1}, of_model)


def test_adapter_on_the_head_is_named(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match="An adapter is on the LM head, which TRL does not train"):
        check_trainable(adapted, None)
