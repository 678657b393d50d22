"""
The diagnostics of a run: healthy bounds, what it means to exceed one, and what to try.

The bounds separate runs that learn from runs that were broken on purpose; none is a law. Bounds and sentences refer to
facts about a metric: [`report.verdicts.facts`].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bound:
    """A limit, what a run beyond it looks like (with facts in braces), and what to try."""

    limit: float
    says: str
    remedy: str


@dataclass(frozen=True)
class Diagnostic:
    """One line of the table below. Both bounds are inclusive."""

    name: str  # what is judged: the subject of the sentence
    metrics: tuple[str, ...]  # of the log; the first one that was logged is read
    fact: str  # that is compared with the bounds
    says: str  # rest of the sentence within the bounds, with facts in braces
    low: Bound | None = None
    high: Bound | None = None
    off_policy: bool = False  # whether only off-policy steps count: before them, the policy is the behaviour policy


_SLOWER = "Lower `learning_rate`, or use a rollout for fewer optimizer steps (`steps_per_generation`)."
_TIGHTER = f"Raise `mu`, or set `chi2_radius`, to keep the policy near the behaviour policy. {_SLOWER}"
_FIX_REWARD = "Fix the reward function; the run's warnings say what failed."

# Does the policy learn, and from what?
_LEARNING = (
    Diagnostic(
        "Reward",
        ("reward",),
        "rise",
        "rose from {first:.3g} to {last:.3g} (linear trend {change:+.2g} ± {margin:.2g})",
        low=Bound(
            1,
            "went from {first:.3g} to {last:.3g} (linear trend {change:+.2g} ± {margin:.2g}): no rise beyond the "
            "noise",
            "First check the zero-variance groups and the truncated completions. If both are healthy, train "
            "longer, with more prompts per rollout (less noise) or a higher `learning_rate`; lower it if the "
            "reward fell.",
        ),
    ),
    Diagnostic(
        "Zero-variance groups",
        ("opo/frac_zero_drive", "frac_reward_zero_std"),
        "last",
        "held {last:.0%} of completions at the end",
        high=Bound(
            0.75,
            "held {last:.0%} of completions at the end, which carry no learning signal",
            "If rewards are high, the problems are solved: use harder ones (`levels`). If they are low, use "
            "easier ones, or more completions per prompt (`num_generations`). `max_sampling_rounds` replaces "
            "such groups.",
        ),
    ),
    Diagnostic(
        "Truncated completions",
        ("completions/clipped_ratio",),
        "last",
        "were {last:.0%} at the end",
        high=Bound(
            0.2,
            "were {last:.0%} at the end: their answers are cut off",
            "Raise `max_completion_length`, or reward short answers (`soft_overlong_punishment`).",
        ),
    ),
    Diagnostic(
        "Entropy per token",
        ("entropy",),
        "ratio",
        "went from {first:.2g} to {last:.2g} nats",
        low=Bound(
            0.1,
            "fell from {first:.2g} to {last:.2g} nats: the policy barely explores",
            "If validation rises, this is learning. If not, the policy collapses: lower `learning_rate`, set "
            "`entropy_coef` or `beta`, and check the completions for a trick that earns reward.",
        ),
        high=Bound(3, "rose from {first:.2g} to {last:.2g} nats: the policy becomes random", _SLOWER),
    ),
    Diagnostic(
        "Gradient norm",
        ("grad_norm",),
        "ratio",
        "went from {first:.3g} to {last:.3g}",
        low=Bound(
            0.01,
            "vanished, from {first:.3g} to {last:.3g}",
            "Check the zero-variance groups: no completion carries a learning signal any more.",
        ),
        high=Bound(10, "grew from {first:.3g} to {last:.3g}", _SLOWER),
    ),
)


# Which completions and steps are lost?
_LEFT_OUT = (
    Diagnostic(
        "Masked completions",
        ("opo/frac_masked",),
        "mean",
        "were {mean:.0%}",
        high=Bound(
            0.2,
            "were {mean:.0%}, which are excluded from training",
            "They are truncated (`mask_truncated_completions`), unscored, too far off-policy "
            "(`off_policy_mask_threshold`), or vLLM and the trainer disagree about their probabilities "
            "(`vllm_importance_sampling_mode`).",
        ),
    ),
    Diagnostic(
        "Optimizer steps skipped for a non-finite gradient",
        ("opo/skipped_steps",),
        "most",
        "were {most:.0f}",
        high=Bound(
            0,
            "were {most:.0f}",
            "Look at the samples in `skipped_step_*.pt`. Often bfloat16 instead of float16, or a lower "
            "`learning_rate`, helps.",
        ),
    ),
    Diagnostic(
        "Completions whose scoring timed out",
        ("reward/timeouts",),
        "share",
        "were {total:.0f} ({share:.1%})",
        high=Bound(
            0.01, "were {total:.0f} ({share:.1%})", f"Raise `reward_timeout` or `reward_workers`. {_FIX_REWARD}"
        ),
    ),
    Diagnostic(
        "Completions whose scoring failed",
        ("reward/errors",),
        "share",
        "were {total:.0f} ({share:.1%})",
        high=Bound(0.01, "were {total:.0f} ({share:.1%})", _FIX_REWARD),
    ),
)


def diagnostics(settings: Mapping[str, Any]) -> list[Diagnostic]:
    """The table for a run with these settings."""
    group = settings.get("num_generations") or 8
    radius = settings.get("chi2_radius") or 0.7
    return [
        *_LEARNING,
        # Where do completions pull the policy that has moved since they were written, and how far is it from theirs?
        Diagnostic(
            "Gradient norm of off-policy steps",
            ("grad_norm",),
            "over_on_policy",
            "was {over_on_policy:.2g} times that of on-policy steps",
            high=Bound(
                10,
                "was {over_on_policy:.0f} times that of on-policy steps: every step pulls back to the behaviour "
                "policy and overshoots",
                "Lower `mu`, or `learning_rate`.",
            ),
            off_policy=True,
        ),
        Diagnostic(
            "Escort effective sample size",
            ("opo/escort/ess",),
            "median",
            f"stayed at {{median:.1f}} of {group}",
            low=Bound(
                min(2.0, 0.6 * group),
                f"was {{median:.1f}} of {group}: one completion has nearly all the weight of its group",
                "Raise `alpha` or `escort_temperature`, or keep `anchor_correction: absorbed`.",
            ),
        ),
        Diagnostic(
            "χ² to the behaviour policy in off-policy steps",
            ("opo/chi2",),
            "median",
            f"was {{median:.2g}}, with a bound of {radius:g}",
            high=Bound(radius, f"was {{median:.2g}}, above its bound of {radius:g}: the policy drifts off", _TIGHTER),
            off_policy=True,
        ),
        Diagnostic(
            "Probability kept by the completions trained on",
            ("opo/conservation_residual",),
            "median",
            "changed by {median:+z.0%} in off-policy steps",
            low=Bound(
                -0.5,
                "changed by {median:+z.0%} in off-policy steps: the policy is far from the behaviour policy",
                _TIGHTER,
            ),
            off_policy=True,
        ),
        Diagnostic(
            "Effective sample size of the ratios to the behaviour policy",
            ("opo/ratio/ess",),
            "low",
            "was at least {low:.0%} of the completions in nine of ten optimizer steps",
            low=Bound(
                # Replay bounds the weights of old completions, and healthy runs have 0.2 to 0.5.
                0.1 if settings.get("max_staleness") else 0.5,
                "was below {low:.0%} of the completions in a tenth of the optimizer steps: a few completions dominate "
                "because the policy is far from the one that wrote them",
                "Use completions for fewer passes (`num_iterations`), less old ones (`max_staleness`), or a lower "
                "`learning_rate`. In OPO, raise `mu`, too.",
            ),
        ),
        Diagnostic(
            "Target fit",
            ("opo/target_fit",),
            "median",
            "was {median:.2g} in off-policy steps: that share of the change that the target asks for has happened",
            low=Bound(
                0,
                "was {median:.2g} in off-policy steps: adrift, the policy is further from the target than the "
                "behaviour policy is",
                "Lower `learning_rate`. If gradient norms of off-policy steps are large, lower `mu`, too.",
            ),
            off_policy=True,
        ),
        Diagnostic(
            "Completions at the clamp of the log-ratio",
            ("opo/frac_clamped",),
            "most",
            "were {most:.0%} at most",
            high=Bound(0.1, "were {most:.0%} at most: the clamp cuts off their gradient", _TIGHTER),
        ),
        *_LEFT_OUT,
    ]
