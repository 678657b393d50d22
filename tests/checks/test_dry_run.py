"""Options that a library would reject later or ignore are reported by field when the configuration is constructed."""

import inspect
import re
import sys

import pytest
from transformers import trainer, trainer_optimizer, training_args
from trl import ModelConfig

from opo_trl import OPOConfig
from opo_trl.checks.arguments import FSDP_OPTIONS, OPTIM_ARGS
from opo_trl.checks.blame import blamed
from opo_trl.checks.model import dry_run_model


def config(**given) -> OPOConfig:
    return OPOConfig("…", use_cpu=True, bf16=False, **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        # Enumerations of Transformers
        ({"optim": "adam"}, ["optim='adam'", "OptimizerNames"]),
        ({"lr_scheduler_type": "cosinus"}, ["lr_scheduler_type='cosinus'", "SchedulerType"]),
        ({"save_strategy": "never"}, ["save_strategy='never'"]),
        ({"hub_strategy": "never"}, ["hub_strategy='never'"]),
        ({"debug": "everything"}, ["debug='everything'"]),
        ({"pad_to_multiple_of": "many"}, ["pad_to_multiple_of='many'"]),
        ({"cache_implementation": "fast"}, ["cache_implementation='fast'", "dynamic"]),
        ({"torch_compile": True, "torch_compile_backend": "gcc"}, ["torch_compile_backend='gcc'", "cudagraphs"]),
        # Missing packages
        ({"optim": "schedule_free_adamw"}, ["optim='schedule_free_adamw'", "schedulefree"]),
        ({"optim": "galore_adamw", "optim_target_modules": "all-linear"}, ["optim='galore_adamw'", "galore"]),
        ({"report_to": "mlfow"}, ["report_to='mlfow'", "mlflow"]),
        (
            {"report_to": ["tensorboard", "swanlab"]},
            ["report_to='swanlab'", "pip install swanlab", "to none"],
        ),
        # Options without effect
        ({"optim_args": "momentum=0.9"}, ["optim_args='momentum=0.9'", "no effect on adamw_torch_fused"]),
        ({"optim": "sgd", "optim_args": "momentum=0.9,nestrov=true"}, ["'nestrov' has no effect on sgd"]),
        ({"generation_kwargs": {"top_pp": 0.9}}, ["generation_kwargs={'top_pp': 0.9}", "'top_pp' has no effect"]),
        ({"generation_kwargs": {"max_length": 99}}, ["'max_length' has no effect"]),
        ({"generation_kwargs": {"stop_strings": ["\n"]}}, ["'stop_strings' needs a tokenizer", "Remove"]),
        ({"generation_kwargs": {"num_assistant_tokens": 5}}, ["'num_assistant_tokens' belongs to assisted", "Remove"]),
        ({"fsdp": True, "fsdp_config": {"foo": 1}}, ["fsdp_config=", "'foo' has no effect", "cpu_offload"]),
        (
            {"lr_scheduler_type": "constant_with_warmup", "lr_scheduler_kwargs": {"num_cycles": 2}},
            ["lr_scheduler_kwargs={'num_cycles': 2}", "no effect", "constant_with_warmup"],
        ),
        # Options that fail later
        ({"optim_args": "momentum"}, ["optim_args='momentum'"]),
        ({"optim": "sgd", "optim_args": "momentum=much"}, ["optim_args='momentum=much'"]),
        ({"optim": "sgd", "optim_args": "momentum=-1"}, ["optim_args='momentum=-1'", "Invalid momentum"]),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, ["lr_scheduler_kwargs={'num_cycles': 2}", "unexpected"]),
        (
            {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": float("inf")}},
            ["lr_scheduler_kwargs=", "'num_cycles' must be finite"],
        ),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}},
            ["lr_scheduler_kwargs={'lr_end': 1.0} cannot be used", "lr_end"],
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": -1.0}},
            ["lr_scheduler_kwargs={'min_lr': -1.0}", "'min_lr' is below 0"],
        ),
        ({"gradient_checkpointing_kwargs": {"reentrant": False}}, ["gradient_checkpointing_kwargs=", "reentrant"]),
        ({"accelerator_config": {"split": True}}, ["accelerator_config={'split': True}"]),
        (
            {
                "use_transformers_continuous_batching": True,
                "transformers_continuous_batching_config": {"pages": 3},
            },
            ["transformers_continuous_batching_config={'pages': 3}"],
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1.0}},
            ["lr_scheduler_kwargs={'min_lr': 1.0}", "learning_rate=1e-06", "[0, 1]"],
        ),
        ({"optim": "sgd", "optim_args": "momentum=nan"}, ["optim_args='momentum=nan'", "'momentum' must be finite"]),
        ({"generation_kwargs": {"sequence_bias": [[[1], float("nan")]]}}, ["'sequence_bias' must be finite"]),
        ({"generation_kwargs": {"suppress_tokens": [1, "x"]}}, ["'suppress_tokens' contains 'x'", "integers"]),
        ({"generation_kwargs": {"use_cache": "false"}}, ["'use_cache' is text", "without quotes"]),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": "no"}}, ["'use_reentrant' is text"]),
        (
            {"dataloader_persistent_workers": True},
            ["dataloader_persistent_workers=True", "`dataloader_num_workers`"],
        ),
        ({"hub_model_id": "a/b/c"}, ["hub_model_id='a/b/c'", "namespace/repo_name"]),
        ({"report_to": ["tensorboard", "none"]}, ["report_to='none' cannot be used", "to none alone"]),
        # Options that contradict a field or are out of range
        ({"generation_kwargs": {"temperature": 0.5}}, ["contradicts temperature=1.0", "Set `temperature` to 0.5"]),
        ({"generation_kwargs": {"max_new_tokens": 9}}, ["contradicts max_completion_length=512"]),
        ({"generation_kwargs": {"top_p": 0.9}, "top_p": 0.5}, ["contradicts top_p=0.5"]),
        ({"generation_kwargs": {"num_beams": 3}}, ["'num_beams' must be 1"]),
        ({"generation_kwargs": {"guidance_scale": 2.0}}, ["'guidance_scale' must be 1"]),
        ({"generation_kwargs": {"min_new_tokens": 600}}, ["'min_new_tokens' exceeds max_completion_length=512"]),
        ({"generation_kwargs": {"do_sample": False}}, ["'do_sample' must be True"]),
        ({"generation_kwargs": {"num_return_sequences": 2}}, ["'num_return_sequences' must be 1"]),
        ({"generation_kwargs": {"top_k": -3}}, ["generation_kwargs={'top_k': -3}", "'top_k' is out of range"]),
        ({"generation_kwargs": {"typical_p": 2.0}}, ["generation_kwargs=", "'typical_p' is out of range"]),
        ({"generation_kwargs": {"length_penalty": float("nan")}}, ["'length_penalty' must be finite"]),
        # Values that are not mappings, and missing files
        ({"generation_kwargs": "top_p=0.9"}, ["generation_kwargs='top_p=0.9'", "a mapping"]),
        ({"model_init_kwargs": [1]}, ["model_init_kwargs=[1]", "a mapping"]),
        ({"lr_scheduler_kwargs": "{num_cycles: 2}"}, ["lr_scheduler_kwargs='{num_cycles: 2}'"]),
        ({"accelerator_config": "no.json"}, ["accelerator_config='no.json'", "does not exist"]),
        ({"fsdp": True, "fsdp_config": "no.json"}, ["fsdp_config='no.json'", "does not exist"]),
        ({"deepspeed": "no.json"}, ["deepspeed='no.json'", "does not exist"]),
    ],
    ids=str,
)
def test_what_a_library_rejects_or_ignores_is_reported_by_field(given, says):
    with pytest.raises(ValueError, match="=") as error:
        config(**given)
    for text in says:
        assert text in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"},
        {"optim": "sgd", "optim_args": "momentum=0.0"},  # the default
        {"optim": "adafactor"},
        {"lr_scheduler_type": "constant"},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}, "max_steps": 1},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 10}},
        {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 500, "max_steps": 10},
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": '{"num_cycles": 0.5}'},
        {"generation_kwargs": {"num_beams": 1, "suppress_tokens": [1], "output_scores": False, "stop_strings": None}},
        {"generation_kwargs": {"sequence_bias": [[[1], -2.0]], "eos_token_id": [1, 2]}},
        {"hub_model_id": "me/model"},
        {"generation_kwargs": {"top_p": 0.9, "min_new_tokens": 3, "renormalize_logits": True}},
        {"generation_kwargs": {"temperature": 0.7}, "temperature": 0.7},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2}},
        {"report_to": "tensorboard"},
        {"report_to": "all"},
        {"accelerator_config": {"split_batches": False}},
    ],
    ids=str,
)
def test_what_the_libraries_accept_is_accepted(given):
    config(**given)


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


def test_missing_tracker_is_named_once():
    with pytest.raises(ValueError, match="report_to='swanlab'") as error:
        config(report_to="swanlab")
    assert str(error.value).count("report_to=") == 1


def test_modules_of_another_architecture_raise_a_warning(tiny_model: str):
    wanted = ModelConfig(tiny_model, use_peft=True, lora_target_modules=["q_proj", "c_attn"])
    with pytest.warns(UserWarning, match="'c_attn' matches nothing"):
        dry_run_model(config(), wanted, tiny_model)


def test_generation_options_of_vllm_are_its_sampling_parameters(monkeypatch):
    class SamplingParams:
        def __init__(self, n=1, temperature=1.0, logit_bias=None, max_tokens=16, stop=None): ...

    monkeypatch.setitem(sys.modules, "vllm", type(sys)("vllm"))
    sys.modules["vllm"].SamplingParams = SamplingParams
    config(use_vllm=True, generation_kwargs={"logit_bias": {1: 2.0}})
    with pytest.raises(ValueError, match=r"generation_kwargs={'use_cache': False} cannot be used: .* 'use_cache'"):
        config(use_vllm=True, generation_kwargs={"use_cache": False})
    with pytest.raises(ValueError, match=r"contradicts max_completion_length=512"):
        config(use_vllm=True, generation_kwargs={"max_tokens": 2})
    with pytest.raises(ValueError, match=r"'stop' ends completions by text.*Remove `mask_truncated_completions`"):
        config(use_vllm=True, generation_kwargs={"stop": ["\n"]}, mask_truncated_completions=True)
    config(use_vllm=True, generation_kwargs={"stop": ["\n"]})


def test_error_is_attributed_to_the_fields_that_it_mentions():
    def said(error: Exception, **fields) -> str:
        try:
            with blamed(fields):
                raise error
        except ValueError as named:
            return str(named)

    fields = {"a": 1, "b": "two", "c": {"key": 3}, "d": 4}
    assert said(KeyError("a"), **fields).startswith("a=1 cannot be used: 'a'. Set `a` to something else")
    assert said(ValueError("two and key"), **fields).startswith(
        "b='two' and c={'key': 3} cannot be used: two and key."
    )
    assert said(TypeError("whatever"), a=1).startswith("a=1 cannot be used: whatever.")
    assert said(TypeError("whatever"), **fields) == "TypeError: whatever."
    assert said(ValueError("whatever"), **fields) == "whatever"
    assert said(ValueError("a=1 is odd. Set `a` to 2."), **fields) == "a=1 is odd. Set `a` to 2."
