"""The runs of the regime map (see regime.py)."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .many_runs import options


RUNS = Path("runs/regime")

METHODS: dict[str, dict[str, Any]] = {
    "GRPO": {"trainer": "grpo", "loss_type": "grpo", "epsilon": 0.2},
    "GSPO": {
        "trainer": "grpo",
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "DAPO": {
        "trainer": "grpo",
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
        "max_sampling_rounds": 4,
    },
    # Sum, log form, alpha = 0.4, and `PAPERS_MU`. Zero-gradient samples are computed for their entropy.
    "OPO": {"trainer": "opo", "ratio_form": "log", "skip_inert_rows": False},
    "OPO mean": {  # the paper's experiments, as in the Qwen3 recipes
        "trainer": "opo",
        "ratio_form": "log",
        "skip_inert_rows": False,
        "log_ratio_reduction": "mean",
        "log_ratio_clamp": 5.0,
        "escort_temperature": 0.5,
        "adaptive_temperature": True,
    },
}
PAPERS_MU = 1.0
STEPS_PER_ROLLOUT = (1, 2, 4, 8, 16)
LEARNING_RATES = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
SEEDS = (1, 2, 3)
# Many off-policy steps at the rate that is best for all methods, on seeds that no choice was based on.
CONFIRMATION_SEEDS = tuple(range(11, 19))
CONFIRMED = (
    ("GRPO", ""),
    ("GRPO", "GRPO, epsilon = 0.4"),
    ("GSPO", ""),
    ("GSPO", "GSPO, epsilon = 0.02"),
    ("DAPO", ""),
    ("OPO", "mu = 0.3"),
    ("OPO", "mean, mu = 5"),
)
CONFIRMED_STEPS = (8, 16)

# OPO's fields one by one, at a learning rate that is too large for most methods: which ones help?
LARGE_RATE = 2e-4
_STIFFNESS: dict[str, dict[str, Any]] = {
    "mu = 1": {},
    **{f"mu = {mu:g}": {"mu": mu} for mu in (0.1, 0.3, 3.0)},
    **{f"chi2_radius = {radius:g}": {"chi2_radius": radius} for radius in (0.03, 0.3, 3.0)},
    **{f"mean, mu = {mu:g}": {"log_ratio_reduction": "mean", "mu": mu} for mu in (1.0, 5.0, 18.0)},
    # Momentum carries the pull towards one behaviour policy over to the next rollout, which has another.
    "no momentum": {"adam_beta1": 0.0},
    "no momentum, mean": {"adam_beta1": 0.0, "log_ratio_reduction": "mean"},
}
# At the rate that is best for GRPO and for mu = 1: do these choices cost or gain anything?
BEST_RATE = 1e-4
_RADII: dict[str, dict[str, Any]] = {
    **{f"mu = {mu:g}": {"mu": mu} for mu in (0.1, 0.3)},
    **{f"chi2_radius = {radius:g}": {"chi2_radius": radius} for radius in (1.0, 3.0, 10.0)},
    # Smaller escort weights have a nearer target: only at the same radius does alpha change nothing but the direction.
    **{f"alpha = {alpha:g}, chi2_radius = 3": {"alpha": alpha, "chi2_radius": 3.0} for alpha in (0.0, 0.8)},
    "drive group, chi2_radius = 3": {"drive_scaling": "group", "chi2_radius": 3.0},
    "mean, mu = 5": {"log_ratio_reduction": "mean", "mu": 5.0},
}
# Does the best radius depend on the completion length? On these levels it is 9, 18, 30 and 45 tokens.
_LENGTHS: dict[str, dict[str, Any]] = {
    f"{level}, chi2_radius = {radius:g}": {
        "levels": level,
        "report_levels": level,
        "max_completion_length": 60,
        "chi2_radius": radius,
    }
    for level in ("Level 2", "Level 3", "Level 4", "Level 5")
    for radius in (0.3, 3.0, 30.0)
}
# Clip ranges with many off-policy steps, tuned like OPO's mu. 100 is no clipping.
_CLIPPING = {
    **{f"GRPO, epsilon = {epsilon:g}": {"epsilon": epsilon} for epsilon in (0.05, 0.1, 0.4, 0.8, 100.0)},
    **{f"GSPO, epsilon = {e:g}": {"epsilon": e, "epsilon_high": e} for e in (0.005, 0.02, 0.2)},
}
# Optimizer steps per rollout and learning rate → OPO's fields, and GRPO's.
VARIANTS: dict[tuple[int, float], dict[str, dict[str, Any]]] = {
    (2, BEST_RATE): _RADII,
    (8, BEST_RATE): _RADII | _LENGTHS | _CLIPPING,
    (16, BEST_RATE): _RADII | _CLIPPING,
    (2, LARGE_RATE): _STIFFNESS,
    (8, LARGE_RATE): {
        **_STIFFNESS,
        **{f"alpha = {alpha:g}": {"alpha": alpha} for alpha in (0.0, 0.2, 0.6, 0.8, 0.95)},
        "anchor length_normalized": {"anchor_correction": "length_normalized"},
        "anchor sequence": {"anchor_correction": "sequence"},
        "drive group": {"drive_scaling": "group"},
        "drive batch": {"drive_scaling": "batch"},
        "exact": {"ratio_form": "exact"},
        "positivity stiffen, mu = 0.3": {"positivity": "stiffen", "mu": 0.3},
        "positivity project, mu = 0.3": {"positivity": "project", "mu": 0.3},
        "dynamic sampling": {"max_sampling_rounds": 4},
    },
}

COMMON: dict[str, Any] = {
    "model_name_or_path": "arithmetic",
    "dtype": "float32",
    "dataset_name": "arithmetic",
    "levels": "Level 3",
    "prompt_style": "plain",
    "reward_funcs": "arithmetic_reward",
    "beta": 0.0,
    "num_generations": 6,
    "max_completion_length": 32,
    "per_device_train_batch_size": 48,
    "gradient_accumulation_steps": 1,
    "max_steps": 64,
    "lr_scheduler_type": "constant",
    # Gradient norms are not comparable between losses. AdamW does not depend on them; clipping would.
    "max_grad_norm": 0.0,
    "report_levels": "Level 3",
    "report_size": 250,
    "report_samples": 2,
    "per_device_eval_batch_size": 1000,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def runs() -> Iterator[dict[str, Any]]:
    """All runs: OPO's fields, the confirmation, then the map, seed by seed."""
    for seed in SEEDS:
        for (k, rate), variants in VARIANTS.items():
            fields = {"steps_per_rollout": k, "learning_rate": rate, "seed": seed}
            for variant in variants:
                method = variant.split(",")[0] if variant in _CLIPPING else "OPO"
                yield {"method": method, "variant": variant, **fields}
    for seed, k, (method, variant) in itertools.product(CONFIRMATION_SEEDS, CONFIRMED_STEPS, CONFIRMED):
        fields = {"steps_per_rollout": k, "learning_rate": BEST_RATE, "seed": seed}
        yield {"method": method, "variant": variant, **fields}
    for seed in SEEDS:
        for k, rate, method in itertools.product(STEPS_PER_ROLLOUT, LEARNING_RATES, METHODS):
            yield {"method": method, "variant": "", "steps_per_rollout": k, "learning_rate": rate, "seed": seed}


def folder(run: dict[str, Any]) -> Path:
    """Folder of a run."""
    name = f"{run['method']} {run['variant']} k{run['steps_per_rollout']} lr{run['learning_rate']:g} seed{run['seed']}"
    return RUNS / name.replace(" ", "_").replace("=", "").replace(",", "")


def command_line(run: dict[str, Any]) -> list[str]:
    """Command line of a run for `opo_trl.train`."""
    variant = VARIANTS[run["steps_per_rollout"], run["learning_rate"]][run["variant"]] if run["variant"] else {}
    fields = {
        **COMMON,
        **METHODS[run["method"]],
        **variant,
        "steps_per_generation": run["steps_per_rollout"],
        "learning_rate": run["learning_rate"],
        "seed": run["seed"],
        "output_dir": folder(run),
    }
    if fields["trainer"] == "opo" and "chi2_radius" not in fields:
        fields.setdefault("mu", PAPERS_MU)
    return options(fields)
