"""
Gradients of GRPO, GSPO, DAPO and OPO on the same rollouts, as a policy becomes confident.

    python -m benchmarks.gradients            measure (one CPU core, about 20 minutes), and write what follows
    python -m benchmarks.gradients --write    results/gradients.png and the tables of gradients.md, from gradients.json

OPO trains the embedded model with `recipes/arithmetic/opo.yaml`. At some steps of that run (`STAGES`), the policy is
the behaviour policy of `ROLLOUTS` rollouts of `PROMPTS` problems × `GENERATIONS` completions. On each, the
`compute_loss` of TRL's GRPOTrainer or of OPOTrainer gives every method's gradient with respect to all parameters,

- on-policy: at the behaviour policy;
- off-policy: at policies reached from it on the same rollout by `WALK` steps of length `STEP_LENGTH` in parameter
  space, along the gradient of GRPO without clipping or of OPO.

Needs the extra `figures`.
"""

import argparse
import itertools
import json
import os
import random
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread slows down so small a model

import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.data.arithmetic import arithmetic_reward, base_model_path
from opo_trl.launch.data import load_data
from opo_trl.launch.recipe import parse
from opo_trl.metrics.opo import gradient_response_efficiency
from opo_trl.train import make_trainer

from .intervals import estimate
from .pages import fill, table
from .record import origin


ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "arithmetic" / "opo.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "gradients.json"
PAGE = RESULTS.with_suffix(".md")

STAGES = (0, 20, 40, 80, 160)  # optimizer steps of the run
ROLLOUTS, PROMPTS, GENERATIONS = 5, 64, 8
WALK, STEP_LENGTH = (2, 8), 0.005

METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "GRPO": (GRPOTrainer, {"loss_type": "grpo", "epsilon": 0.2}),
    "GSPO": (
        GRPOTrainer,
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "DAPO": (GRPOTrainer, {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}),
    "OPO": (OPOTrainer, {"mu": 1.0, "ratio_form": "log"}),
    "OPO, mean": (OPOTrainer, {"mu": 1.0, "ratio_form": "log", "log_ratio_reduction": "mean"}),
}
# Whose gradient leads away from the behaviour policy.
WALKERS: dict[str, tuple[type, dict[str, Any]]] = {
    "GRPO without clipping": (GRPOTrainer, {"loss_type": "grpo", "epsilon": 1e6}),
    "OPO": METHODS["OPO"],
}
POLICIES = ["on-policy", *(f"{steps} steps of {walker}" for walker in WALKERS for steps in WALK)]
SHOWN_PAIRS = ("GRPO / GSPO", "GRPO / DAPO", "GRPO / OPO", "GSPO / OPO", "GRPO / OPO, mean", "OPO / OPO, mean")
COLORS = {"GRPO": "#0072b2", "GSPO": "#b03a86", "DAPO": "#56b4e9", "OPO": "#d55e00", "OPO, mean": "#009e73"}


# The policies and the trainers


class Snapshots(TrainerCallback):
    """Parameters at `STAGES`; the run ends with the last."""

    def __init__(self, model: torch.nn.Module):
        self.policies = {0: parameters(model)}

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step in STAGES:
            self.policies[state.global_step] = parameters(model)
        control.should_training_stop = state.global_step == STAGES[-1]


def parameters(model: torch.nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def load_policy(model: torch.nn.Module, policy: Tensor):
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(policy, model.parameters())


def train(folder: str) -> tuple[dict[int, Tensor], Dataset]:
    """Train with the recipe; policies by step, and the training problems."""
    options = ["--output_dir", folder, "--save_strategy", "no", "--ratio_form", "log"]
    script, args, model_config, _ = parse(["--config", str(RECIPE), *options])
    model_config.model_name_or_path = base_model_path()
    data = load_data(script, args, AutoTokenizer.from_pretrained(base_model_path()))
    data, problems = replace(data, validation=None, report={}), data.training
    trainer = make_trainer(script, args, model_config, data, [arithmetic_reward])
    snapshots = Snapshots(trainer.model)
    trainer.add_callback(snapshots)
    trainer.train()
    return snapshots.policies, problems


def build(trainer_class: type, options: dict[str, Any], problems: Dataset, folder: str) -> Any:
    """A trainer for one optimizer step on a complete rollout, outside of a training run."""
    config_class = OPOConfig if trainer_class is OPOTrainer else GRPOConfig
    args = config_class(
        output_dir=folder,
        num_generations=GENERATIONS,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=2,
        max_completion_length=32,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        **options,
    )
    model = AutoModelForCausalLM.from_pretrained(base_model_path(), dtype=torch.float32)
    trainer = trainer_class(model=model, reward_funcs=arithmetic_reward, args=args, train_dataset=problems)
    trainer.current_gradient_accumulation_steps = 1  # Transformers sets it when training starts
    trainer.model.train()
    return trainer


# Measurements


def gradient(trainer: Any, policy: Tensor, rollout: dict[str, Any]) -> Tensor:
    """Gradient of a trainer's loss on the complete rollout, `[number of parameters]`."""
    load_policy(trainer.model, policy)
    trainer._metrics["train"].clear()
    loss = trainer.compute_loss(trainer.model, rollout)
    return torch.nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(trainer.model.parameters())))


def roll_out(trainer: OPOTrainer, policy: Tensor, problems: Dataset, seed: int) -> dict[str, Any]:
    """A rollout of a policy on problems drawn with `seed`, for every method."""
    load_policy(trainer.model, policy)
    chosen = random.Random(seed).sample(range(len(problems)), PROMPTS)
    set_seed(seed)
    rows = [problems[i] for i in chosen for _ in range(GENERATIONS)]
    rollout = trainer._finish_rollout(trainer._generate_and_score_completions(rows))
    rollout["old_per_token_logps"], _ = trainer._anchor_pass(rollout)
    return rollout


def walk(trainer: Any, policy: Tensor, rollout: dict[str, Any]) -> Iterator[Tensor]:
    """The policies after each number of steps in `WALK`."""
    for step in range(1, max(WALK) + 1):
        direction = gradient(trainer, policy, rollout)
        policy = policy - STEP_LENGTH * direction / direction.norm()
        if step in WALK:
            yield policy


def measure_policy(trainers: dict[str, Any], policy: Tensor, rollout: dict[str, Any]) -> dict[str, Any]:
    """Norm and fraction of clipped completions or tokens of each method, and the cosine of each pair."""
    gradients = {name: gradient(trainer, policy, rollout).double() for name, trainer in trainers.items()}
    return {
        "norm": {name: g.norm().item() for name, g in gradients.items()},
        "cosine": {
            f"{a} / {b}": torch.cosine_similarity(gradients[a], gradients[b], dim=0).item()
            for a, b in itertools.combinations(gradients, 2)
        },
        # OPO clips Δ.
        "clipped": {
            name: trainer._metrics["train"][
                "opo/frac_clamped" if isinstance(trainer, OPOTrainer) else "clip_ratio/region_mean"
            ][0]
            for name, trainer in trainers.items()
        },
        "chi2": trainers["OPO"]._metrics["train"]["opo/chi2"][0],
        "log_ratio": trainers["OPO"]._metrics["train"]["opo/log_ratio/absmax"][0],
        "entropy": trainers["OPO"]._metrics["train"]["entropy"][0],
    }


def measure_rollout(trainers: dict, walkers: dict, policy: Tensor, problems: Dataset, seed: int) -> dict[str, Any]:
    rollout = roll_out(trainers["OPO"], policy, problems, seed)
    result: dict[str, Any] = {
        "success": rollout["rewards_per_func"].mean().item(),
        "advantage_range": (rollout["advantages"].max() - rollout["advantages"].min()).item(),
        "zero_drive": trainers["OPO"]._drive_metrics["train"]["frac_zero_drive"],
    }
    policies = [policy, *(p for walker in walkers.values() for p in walk(walker, policy, rollout))]
    return result | {
        name: measure_policy(trainers, moved, rollout) for name, moved in zip(POLICIES, policies, strict=True)
    }


def measure():
    """Measure, and write the results after each stage: step → one entry per rollout."""
    made, stages = origin(), {}
    with tempfile.TemporaryDirectory() as folder:
        policies, problems = train(folder)
        trainers = {name: build(*method, problems, folder) for name, method in METHODS.items()}
        walkers = {name: trainers.get(name) or build(*method, problems, folder) for name, method in WALKERS.items()}
        for step, policy in policies.items():
            print(f"measuring after {step} optimizer steps", flush=True)
            stages[step] = [measure_rollout(trainers, walkers, policy, problems, seed) for seed in range(ROLLOUTS)]
            RESULTS.write_text(json.dumps({**made, "stages": stages}, indent=1) + "\n")


# Tables and figure


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % t interval."""
    found = estimate(values)
    return found.mean, (found.interval[1] - found.interval[0]) / 2


def numbers(rollout: dict[str, Any], first: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Numbers of a rollout: table → row → number. `first` is that of the first stage on the same problems."""
    result: dict[str, dict[str, float]] = defaultdict(dict)
    result["stages"] = {
        "success rate": rollout["success"],
        "entropy per token (nats)": rollout["on-policy"]["entropy"],
        "completions in zero-variance groups": rollout["zero_drive"],
        "½·(max A − min A)": rollout["advantage_range"] / 2,
    }
    for policy in POLICIES:
        measured = rollout[policy]
        for method, norm in measured["norm"].items():
            row = f"{policy}: {method}"
            result["norm"][row] = norm
            result["efficiency"][row] = gradient_response_efficiency(norm, rollout["advantage_range"])
            result["ratio"][row] = norm / first[policy]["norm"][method]
        result["cosine"] |= {f"{policy}: {pair}": measured["cosine"][pair] for pair in SHOWN_PAIRS}
        if policy != "on-policy":
            on_policy = rollout["on-policy"]["norm"]
            result["kept"] |= {f"{policy}: {m}": norm / on_policy[m] for m, norm in measured["norm"].items()}
            result["drift"] |= {
                f"{policy}: χ²": measured["chi2"],
                f"{policy}: largest absolute Δ": measured["log_ratio"],
            }
            result["drift"] |= {f"{policy}: {m}, clipped": measured["clipped"][m] for m in ("GRPO", "GSPO", "DAPO")}
    return result


def summarize(stages: dict[str, list[dict]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Table → row → mean and half of the interval at each stage."""
    summary: dict[str, dict[str, list]] = {}
    for rollouts in stages.values():
        several = [numbers(rollout, first) for rollout, first in zip(rollouts, stages["0"], strict=True)]
        for name, rows in several[0].items():
            for row in rows:
                values = [one[name][row] for one in several]
                summary.setdefault(name, {}).setdefault(row, []).append(interval(values))
    return summary


def write_tables(results: dict[str, Any]):
    """Update the tables of the page."""
    stages = results["stages"]
    blocks = {"versions": ", ".join(f"{name} {version}" for name, version in results["versions"].items())}
    for name, rows in summarize(stages).items():
        cells = ([row, *(f"{mean:.3g} ± {half:.2g}" for mean, half in values)] for row, values in rows.items())
        blocks[name] = table(["optimizer steps", *stages], cells)
    PAGE.write_text(fill(PAGE.read_text(), blocks))


def draw(stages: dict[str, list[dict]]):
    """Norm relative to the range of advantages, and to its first value, at each stage."""
    summary = summarize(stages)
    success = (mean for mean, _ in summary["stages"]["success rate"])
    labels = [f"{step}\n{mean:.0%}" for step, mean in zip(stages, success, strict=True)]
    shown = ["on-policy", *(f"{WALK[-1]} steps of {walker}" for walker in WALKERS)]
    figure, axes = plt.subplots(2, len(shown), figsize=(10.5, 6.4), sharex=True, sharey="row", layout="constrained")
    for column, policy in zip(axes.T, shown, strict=True):
        column[0].set_title(policy if policy == "on-policy" else f"off-policy: {policy}")
        for name, axis in zip(("efficiency", "ratio"), column, strict=True):
            for i, method in enumerate(METHODS):
                mean, half = zip(*summary[name][f"{policy}: {method}"], strict=True)
                x = [0.06 * (i - 2) + place for place in range(len(stages))]  # side by side: some are equal
                axis.errorbar(x, mean, half, label=method, color=COLORS[method], marker="o", markersize=3, capsize=2)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
        column[1].axhline(1, color="#8a8a8a", linewidth=0.8)
        column[1].set_xticks(range(len(stages)), labels)
        column[1].set_xlabel("optimizer steps, success rate")
    # An interval that includes 0 would stretch a logarithmic axis endlessly.
    axes[0, 0].set(ylabel="gradient norm ÷ ½·(max A − min A)", ylim=(2e-3, 40))
    axes[1, 0].set(ylabel="gradient norm ÷ its own at step 0", ylim=(0.03, 20))
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(RESULTS.with_suffix(".png"), dpi=115)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="from the results, without measuring")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if not args.write:
        measure()
    results = json.loads(RESULTS.read_text())
    write_tables(results)
    plt.switch_backend("Agg")  # no display is needed
    draw(results["stages"])


if __name__ == "__main__":
    main()
