"""
The weight of a group by its number of right completions: OPO's escort weights and GRPO's advantages.

    python -m benchmarks.group_weights      # → results/group_weights.md, from the objective itself; a second

With two-valued rewards, a group's on-policy gradient is `W · (mean score function of the right completions − that of
the wrong ones)` for every method: the weights of its completions sum to 0, so methods differ only in W, the sum of the
weights of the right ones. AdamW cancels a common factor, which leaves W relative to other groups.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from opo_trl.objective import escort_weights, project


RESULT = Path(__file__).resolve().parent / "results" / "group_weights.md"
G = 6

Weights = Callable[[Tensor], Tensor]  # rewards of a group → weights of its completions


def grpo(rewards: Tensor) -> Tensor:
    """GRPO's advantages."""
    return (rewards - rewards.mean()) / rewards.std()


def opo(*, alpha: float = 0.4, temperature: float = 1.0, scaling: str = "none") -> Weights:
    """OPO's centred escort weights, the drive g."""

    def drive(rewards: Tensor) -> Tensor:
        omega = escort_weights(grpo(rewards), alpha=alpha, temperature=temperature, num_generations=G)
        return project(omega, num_generations=G, scaling=scaling)[0]

    return drive


METHODS: dict[str, Weights] = {
    "GRPO, GSPO, DAPO: z-scored advantages": grpo,
    "OPO, defaults: α = 0.4, τ = 1": opo(),
    "OPO, τ = 0.5, as the experiments begin": opo(temperature=0.5),
    "OPO, τ = 0.3, as they end": opo(temperature=0.3),
    "OPO, α = 0.9, τ = 1": opo(alpha=0.9),
    "OPO, any α < 1 and τ, `drive_scaling: group`": opo(scaling="group"),
}


def group_weight(weights: Weights, right: int) -> float:
    """W for a group with a number of right completions."""
    rewards = torch.tensor([1.0] * right + [0.0] * (G - right), dtype=torch.float64)
    return weights(rewards)[:right].sum().item()


def main() -> str:
    """The page."""
    lines = [
        "# How much a group counts",
        "",
        "`python -m benchmarks.group_weights` makes this page; its docstring defines W. Groups of 6 with rewards of",
        "0 and 1; W relative to a group with 3 right completions.",
        "",
        "| right of 6 | " + " | ".join(map(str, range(1, G))) + " |",
        "| --- |" + " ---: |" * (G - 1),
    ]
    for name, weights in METHODS.items():
        row = [group_weight(weights, right) / group_weight(weights, G // 2) for right in range(1, G)]
        lines.append(f"| {name} | " + " | ".join(f"{value:.2f}" for value in row) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    RESULT.write_text(main())
