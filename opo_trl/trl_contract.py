"""
What OPOTrainer relies on inside TRL, checked in one place.

TRL's public API is `GRPOTrainer` and `GRPOConfig`; the methods below are private to it and change between releases. A
release in which one is missing or has lost a parameter would train something else, or fail hours into a run, so the
check runs once, when the trainer is imported, and fails with one message.
"""

import inspect
from collections.abc import Mapping

import trl
from packaging.specifiers import SpecifierSet


TESTED_VERSIONS = SpecifierSet(">=1.16,<1.17")

# Method of GRPOTrainer -> the parameters that we pass or override.
SEAMS: Mapping[str, tuple[str, ...]] = {
    "_generate_and_score_completions": ("inputs",),  # what it returns is the rollout that the drive joins
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),  # which rows are scorable
    "_generate": ("prompts",),
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_get_per_token_logps_and_entropies": (
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    ),
    "training_step": ("model", "inputs", "num_items_in_batch"),  # a micro-step is passed part by part
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "_compute_loss": ("model", "inputs"),
    "get_off_policy_mask": (
        "advantages",
        "per_token_logps",
        "sampling_per_token_logps",
        "mask",
        "off_policy_threshold",
    ),
    "get_high_entropy_mask": ("entropies", "mask", "threshold"),
    "log": ("logs", "start_time"),
    "_prepare_inputs": ("generation_batch",),  # the rollout becomes micro-batches
    "_get_train_sampler": ("dataset",),  # the order of the prompts
    # Transformers' part: what a checkpoint holds, and where a run goes on
    "_save_checkpoint": ("model", "trial"),
    "_save_rng_state": ("output_dir",),
    "_load_rng_state": ("checkpoint",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_run_epoch": ("epoch",),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),  # where an accumulation window begins
}

# What a rollout must hold for the drive and the loss.
ROLLOUT_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")


def check(trainer_class: type = trl.GRPOTrainer, version: str = trl.__version__) -> None:
    """
    Check the version of TRL and the seams of its trainer.

    Args:
        trainer_class (`type`, *optional*, defaults to `trl.GRPOTrainer`):
            Class whose methods are checked.
        version (`str`, *optional*, defaults to `trl.__version__`):
            Version of TRL.

    Raises:
        `ImportError`: names every seam that changed and the tested range.
    """
    problems = []
    if not TESTED_VERSIONS.contains(version, prereleases=True):
        problems.append(f"TRL {version} is outside the tested range")
    for name, parameters in SEAMS.items():
        method = getattr(trainer_class, name, None)
        if method is None:
            problems.append(f"{trainer_class.__name__}.{name} is missing")
            continue
        missing = [p for p in parameters if p not in inspect.signature(method).parameters]
        if missing:
            problems.append(f"{trainer_class.__name__}.{name} has no parameter {', '.join(missing)}")
    if problems:
        raise ImportError(
            f"opo_trl does not fit the installed TRL: {'; '.join(problems)}. Tested with TRL {TESTED_VERSIONS}: "
            f"install it with `pip install 'trl{TESTED_VERSIONS}'`."
        )


def check_rollout(rollout: Mapping) -> None:
    """
    Check that a rollout of TRL's holds what the drive and the loss read.

    Raises:
        `RuntimeError`: names the missing entries and the tested range.
    """
    missing = [key for key in ROLLOUT_KEYS if key not in rollout]
    if missing:
        raise RuntimeError(
            f"The rollout of TRL {trl.__version__} has no {', '.join(missing)}. Tested with TRL {TESTED_VERSIONS}."
        )
