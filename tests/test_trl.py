"""
The names inside TRL, Transformers and Accelerate that the package overrides, sets or reads although they are private.

They change between releases: on another release, what is missing is listed first. A name that the package newly
relies on goes into `NAMES`.
"""

import configparser
import dis
import gzip
import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType
from typing import Any

import pytest
import trl
from helpers import make_trainer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from opo_trl.trl import MULTIMODAL_KEYS, TESTED, check


ROOT = Path(__file__).resolve().parents[1]

# Class or module → name → the parameters that we pass or override; `None` for an attribute, of the body of a class or
# assigned by a method.
NAMES: dict[str, dict[str, Collection[str] | None]] = {
    "trl.GRPOTrainer": {
        "__init__": (
            *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
            *("reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools"),
            *("rollout_func", "environment_factory"),
        ),
        **dict.fromkeys(("_name", "_paper", "_tag_names")),
        # A rollout
        "_generate_and_score_completions": ("inputs",),  # returns the rollout, to which we add targets
        "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),  # which samples are scored
        "_generate": ("prompts",),
        "_generate_single_turn": (),
        "_tokenize_prompts": ("prompts",),
        **dict.fromkeys(("_tokenizer", "rollout_func", "train_dataset")),  # of recorded rollouts
        "_get_per_token_logps_and_entropies": (
            *("model", "input_ids", "attention_mask", "logits_to_keep"),
            *("batch_size", "compute_entropy", "compute_aux_loss"),
        ),
        "_prepare_inputs": ("generation_batch",),
        "_get_train_sampler": ("dataset",),  # the order of the prompts
        "_buffered_inputs": None,
        "_tool_call_loop": (),
        "_sync_tool_dicts": None,  # of the current batch
        "_async_tool_dicts": None,
        "_environment_pool": None,  # evaluations have their own
        **dict.fromkeys(("_step", "generation_config", "eos_token_ids", "log_multimodal", "num_generations_eval")),
        "vllm_importance_sampling_correction": None,
        **dict.fromkeys(("_is_vlm", "chat_template", "chat_template_kwargs", "tools")),  # of the plan's longest prompt
        # The loss
        "training_step": ("model", "inputs", "num_items_in_batch"),  # called for each micro-batch
        "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
        "_compute_loss": ("model", "inputs"),
        "get_off_policy_mask": (
            *("advantages", "per_token_logps", "sampling_per_token_logps"),
            *("mask", "off_policy_threshold"),
        ),
        "get_high_entropy_mask": ("entropies", "mask", "threshold"),
        "_current_train_step_time": None,
        "_last_loaded_step": None,  # whose weights vLLM has
        **dict.fromkeys(("_entropy_bonus_enabled", "entropy_coef")),
        # The log
        **dict.fromkeys(("_logs", "_metrics", "_pending_extra_logs", "_pending_metrics")),
        # A checkpoint
        "_save_checkpoint": ("model", "trial"),
    },
    "transformers.Trainer": {
        "train": ("resume_from_checkpoint",),
        "get_batch_samples": ("epoch_iterator", "num_batches", "device"),  # called once per accumulation window
        "_run_epoch": ("epoch", "epochs_trained", "steps_trained_in_current_epoch"),
        "_get_grad_norm": ("model", "grad_norm"),  # skips a step with a non-finite gradient
        "_maybe_log_save_evaluate": (),
        "evaluation_loop": ("dataloader", "metric_key_prefix"),
        "log": ("logs", "start_time"),
        "get_optimizer_cls_and_kwargs": ("args",),  # which tells of a missing package
        # What a checkpoint holds, and how a run resumes
        "_get_output_dir": ("trial",),
        "_save_rng_state": ("output_dir",),
        "_load_rng_state": ("checkpoint",),
        "_load_optimizer_and_scheduler": ("checkpoint",),
        **dict.fromkeys(("_globalstep_last_logged", "_total_loss_scalar", "_tr_loss")),
    },
    "transformers.TrainerCallback": dict.fromkeys(
        ("on_train_begin", "on_step_begin", "on_optimizer_step", "on_step_end", "on_log", "on_save", "on_train_end"),
        ("args", "state", "control"),
    ),
    "transformers.trainer_callback.ProgressCallback": {"__init__": (), "on_log": ("args", "state", "control", "logs")},
    "transformers.GenerationConfig": {
        "update": ("defaults_only", "allow_custom_entries"),  # by which `generate` adds those of the model's own
        "_get_default_generation_params": (),
    },
    "transformers.PreTrainedModel": {"is_backend_compatible": ()},
    "transformers.PreTrainedConfig": {"_attn_implementation": None},
    "transformers.integrations.deepspeed": {"_hf_deepspeed_config_weak_ref": None},
    "transformers.utils.logging": {"_tqdm_active": None},
    "trl.GRPOConfig": {"__post_init__": (), "_VALID_DICT_FIELDS": None},
    "trl.TrlParser": {
        "error": ("message",),
        "_get_value": ("action", "arg_string"),
        "_get_values": ("action", "arg_strings"),
        "_actions": None,
    },
    "transformers.TrainingArguments": dict.fromkeys(("_n_gpu", "report_to", "save_total_limit")),
    "accelerate.commands.launch": dict.fromkeys(("simple_launcher", "multi_gpu_launcher"), ("args",)),
    "trl.data_utils": {"prepare_multimodal_messages": ("messages", "images")},
    "accelerate.PartialState": {"wait_for_everyone": ()},
    "transformers.integrations.WandbCallback": {"_initialized": None},
    "trl.trainer.utils.RepeatSampler": {"__iter__": ()},
    "trl.trainer.grpo_trainer": {"create_model_from_path": ("model_id",), "RepeatSampler": None},  # we replace these
    "trl.generation.vllm_generation.VLLMGeneration": {
        "generate": (),  # we wrap these two
        "sync_weights": (),
        "generation_kwargs": None,
        "temperature": None,
    },
    "accelerate.state.GradientState": {"_set_sync_gradients": ("sync_gradients",)},
}

# Function → entries that it must add to a rollout. Under another name they would be ignored silently.
KEYS: dict[str, Collection[str]] = {
    "trl.GRPOTrainer._generate_and_score_completions": (
        *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "tool_mask"),
        *("importance_sampling_ratio", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
        *MULTIMODAL_KEYS,
    ),
}


if version("transformers") >= "5.23":
    NAMES["transformers.Trainer"]["_defer_fsdp_gradient_reduction"] = ()


def assigned(code: CodeType) -> set[str]:
    """Attributes that a function assigns, to whatever object."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return own.union(*(assigned(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def set_by_methods(owner: Any) -> set[str]:
    """Attributes that the methods and properties of a class assign."""
    members = [
        member for base in (inspect.getmro(owner) if inspect.isclass(owner) else ()) for member in vars(base).values()
    ]
    members = [getattr(each, "fget", None) or getattr(each, "func", None) or each for each in members]
    functions = [inspect.unwrap(member) for member in members if callable(member)]
    return set().union(*(assigned(f.__code__) for f in functions if inspect.isfunction(f)))


def problems() -> Iterator[str]:
    for path, entries in NAMES.items():
        owner = resolve_name(path)
        known = set_by_methods(owner)
        for name, parameters in entries.items():
            method = getattr(owner, name, None)
            if not (hasattr(owner, name) or name in known):
                yield f"{path}.{name} is missing"
            elif parameters and (missing := {*parameters} - inspect.signature(method).parameters.keys()):
                yield f"{path}.{name} has no parameter {', '.join(sorted(missing))}"


def constants(code: CodeType) -> Iterator[Any]:
    for constant in code.co_consts:  # keys of a dictionary are in a tuple
        yield from constant if isinstance(constant, tuple) else (constant,)


def test_installed_libraries_have_every_name():
    assert list(problems()) == []


@pytest.mark.parametrize("path", KEYS)
def test_functions_add_every_entry(path):
    """Without one, OPO would train without a correction, or on the output of tools."""
    assert {*KEYS[path]} <= {*constants(inspect.unwrap(resolve_name(path)).__code__)}


@pytest.mark.parametrize(
    ("library", "release", "tested"),
    [("trl", "1.15.2", False), ("trl", "1.16.2.dev0", True), ("transformers", "5.25.0", False)],
)
def test_only_tested_versions_pass(library, release, tested, monkeypatch):
    monkeypatch.setattr("opo_trl.trl.version", {"trl": "1.16.0", "transformers": "5.23.0", library: release}.get)
    with nullcontext() if tested else pytest.raises(ImportError, match=f"installed {release}"):
        check()
    monkeypatch.setenv("OPO_TRL_UNTESTED", "1")
    with nullcontext() if tested else pytest.warns(UserWarning, match=f"installed {release}"):
        check()


def test_a_trainer_that_unsloth_has_replaced_is_not_made(tiny_model, tmp_path, monkeypatch):
    theirs = type("UnslothGRPOTrainer", (), {"__module__": "UnslothGRPOTrainer"})
    monkeypatch.setattr(trl, "GRPOTrainer", theirs)
    with pytest.raises(ImportError, match=r"trl\.GRPOTrainer has been replaced by UnslothGRPOTrainer"):
        make_trainer(tiny_model, tmp_path)


OTHER = """
import importlib.metadata
import trl.trainer.utils

importlib.metadata.version = lambda name: "1.14.2"
for name in ("is_async_callable", "strip_images_from_messages", "get_config_model_id"):
    delattr(trl.trainer.utils, name)
for module in ("config", "trainer", "evaluate", "train"):
    try:
        importlib.import_module("opo_trl." + module)
    except ImportError as error:
        print(error)
from opo_trl.launch.cli import main
assert main(["train", "recipes/arithmetic/opo.yaml"]) == 2
"""


def test_another_release_is_rejected_before_its_names_are_missed():
    done = subprocess.run([sys.executable, "-c", OTHER], capture_output=True, text=True, check=True, cwd=ROOT)
    first = f"opo_trl is tested with trl {TESTED['trl']}, not with the installed 1.14.2. `pip install "
    said = done.stdout.splitlines() + done.stderr.splitlines()[-1:]
    assert len(said) == 5
    assert all(first in line for line in said)


WITHOUT = """
import sys

sys.modules["trl"] = sys.modules["transformers"] = None
import opo_trl, opo_trl.objective, opo_trl.report.run_report
from opo_trl.launch.cli import main

assert main(["recipes"]) == main(["report", "{run}"]) == 0
assert main(["diagnose", "{run}"]) in (0, 1)
"""


def test_what_reads_runs_needs_no_trl(tmp_path):
    run = shutil.copytree(ROOT / "benchmarks" / "evidence" / "experiment1" / "grpo" / "seed-1", tmp_path / "run")
    (run / "log.jsonl").write_bytes(gzip.decompress((run / "log.jsonl.gz").read_bytes()))
    subprocess.run([sys.executable, "-c", WITHOUT.format(run=run)], check=True, cwd=ROOT)


def test_neighbours_were_resolved_with_the_declared_ranges():
    """After a change of ranges: `python tests/compatibility.py neighbours`."""
    record = json.loads((ROOT / "tests" / "neighbours.json").read_text(encoding="utf-8"))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert record["requirements"] == setup["options"]["install_requires"].split()
    ranges = {r.name.replace("_", "-"): r.specifier for r in map(Requirement, record["requirements"])}
    assert {name: str(r) for name, r in TESTED.items()} == {name: str(ranges[name]) for name in TESTED}
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    for package, versions in record["with"].items():
        assert all(version in ranges.get(name, SpecifierSet()) for name, version in (versions or {}).items())
        fits = versions["transformers"] if versions else "–"
        assert f"| {package} | {fits} |" in page
