"""
The diagnostics of a run: what is healthy, what it means not to be, and what to try then.

One table. The bounds tell a run that learns from runs that were broken on purpose; none is a law. Bounds and sentences
refer to facts of a metric, the attributes of [`verdicts.Facts`].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bound:
    """A limit, what the run is like beyond it (with facts in braces), and what to try."""

    limit: float
    says: str
    remedy: str


@dataclass(frozen=True)
class Diagnostic:
    """
    One line of the table below.

    Args:
        name (`str`):
            What is judged, as the beginning of a sentence.
        metrics (`tuple[str, ...]`):
            Metrics of the log, the first of which that was logged is read.
        fact (`str`):
            Name of the fact that is held against the bounds.
        says (`str`):
            Rest of the sentence within the bounds, with facts in braces.
        low ([`Bound`], *optional*), high ([`Bound`], *optional*):
            The bounds; the fact may be as small or large as they are.
        reused (`bool`, *optional*, defaults to `False`):
            Whether only optimizer steps on reused rollouts count: in a rollout's first the policy is its anchor.
    """

    name: str
    metrics: tuple[str, ...]
    fact: str
    says: str
    low: Bound | None = None
    high: Bound | None = None
    reused: bool = False


def diagnostics(settings: Mapping[str, Any]) -> list[Diagnostic]:
    """The table, for a run of these settings."""
    group = settings.get("num_generations") or 8
    radius = settings.get("chi2_radius") or 0.7
    slower = "Lower `learning_rate`, or let a rollout serve fewer optimizer steps (`steps_per_generation`)."
    tighter = f"Raise `mu`, or set `chi2_radius`, so that the policy stays near its anchor. {slower}"
    failed = "Mend the reward function; the warnings of the run say what failed."
    return [
        Diagnostic(
            "Reward",
            ("reward",),
            "rise",
            "rose from {first:.3g} to {last:.3g} (linear trend {change:+.2g} ± {margin:.2g})",
            low=Bound(
                1,
                "went from {first:.3g} to {last:.3g} (linear trend {change:+.2g} ± {margin:.2g}): no rise that can be "
                "told from noise",
                "See first whether groups have a spread of rewards and completions end in time. If so, train longer, "
                "with more prompts per rollout (less noise) or a higher `learning_rate`; lower it if the reward fell.",
            ),
        ),
        Diagnostic(
            "Groups without a spread of rewards",
            ("opo/frac_zero_drive", "frac_reward_zero_std"),
            "last",
            "held {last:.0%} of completions at the end",
            high=Bound(
                0.9,
                "held {last:.0%} of completions at the end, which teach nothing",
                "Where the reward is high, the problems are solved: take harder ones (`levels`). Where it is low, "
                "take easier ones, or more completions per prompt (`num_generations`). `max_sampling_rounds` replaces "
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
                "fell from {first:.2g} to {last:.2g} nats: the policy hardly explores any more",
                "If validation rises, this is learning. If not, the policy collapses: lower `learning_rate`, set "
                "`entropy_coef` or `beta`, and look at the completions for a trick that earns reward.",
            ),
            high=Bound(3, "rose from {first:.2g} to {last:.2g} nats: the policy gets lost", slower),
        ),
        Diagnostic(
            "Gradient norm",
            ("grad_norm",),
            "ratio",
            "went from {first:.3g} to {last:.3g}",
            low=Bound(
                0.01,
                "vanished, from {first:.3g} to {last:.3g}",
                "See groups without a spread of rewards: no completion has anything left to say.",
            ),
            high=Bound(10, "grew from {first:.3g} to {last:.3g}", slower),
        ),
        Diagnostic(
            "Gradient norm on reused rollouts",
            ("grad_norm",),
            "over_fresh",
            "was {over_fresh:.2g} times that on fresh ones",
            high=Bound(
                10,
                "was {over_fresh:.0f} times that on fresh ones: every step pulls back to the anchor and overshoots",
                "Lower `mu`, or `learning_rate`.",
            ),
            reused=True,
        ),
        Diagnostic(
            "Escort effective sample size",
            ("opo/escort/ess",),
            "median",
            f"stayed at {{median:.1f}} of {group}",
            low=Bound(
                min(2.0, 0.6 * group),
                f"was {{median:.1f}} of {group}: one completion of a group has nearly all the weight",
                "Raise `alpha` or `escort_temperature`, or leave `anchor_correction` at 'absorbed'.",
            ),
        ),
        Diagnostic(
            "χ² to the anchor on reused rollouts",
            ("opo/chi2",),
            "median",
            f"was {{median:.2g}}, with a bound of {radius:g}",
            high=Bound(radius, f"was {{median:.2g}}, above its bound of {radius:g}: the policy runs away", tighter),
            reused=True,
        ),
        Diagnostic(
            "Probability kept by the completions trained on",
            ("opo/conservation_residual",),
            "median",
            "changed by {median:+z.0%} on reused rollouts",
            low=Bound(-0.5, "changed by {median:+z.0%} on reused rollouts: the policy has left its anchor", tighter),
            reused=True,
        ),
        Diagnostic(
            "Completions at the clamp of the log-ratio",
            ("opo/frac_clamped",),
            "most",
            "were {most:.0%} at most",
            high=Bound(0.1, "were {most:.0%} at most: there the gradient is cut off", tighter),
        ),
        Diagnostic(
            "Masked completions",
            ("opo/frac_masked",),
            "mean",
            "were {mean:.0%}",
            high=Bound(
                0.2,
                "were {mean:.0%}: they take no part in training",
                "They are truncated (`mask_truncated_completions`), unscorable, too far off-policy "
                "(`off_policy_mask_threshold`), or vLLM and the trainer disagree about them "
                "(`vllm_importance_sampling_mode`).",
            ),
        ),
        Diagnostic(
            "Skipped optimizer steps",
            ("opo/skipped_steps",),
            "most",
            "were {most:.0f}",
            high=Bound(
                0,
                "were {most:.0f}: their gradient was not finite",
                "Look at the rows in `skipped_step_*.pt`. Often bfloat16 in place of float16, or a lower "
                "`learning_rate`, helps.",
            ),
        ),
        Diagnostic(
            "Completions that ran out of time while being scored",
            ("reward/timeouts",),
            "share",
            "were {total:.0f} ({share:.1%})",
            high=Bound(
                0.01, "were {total:.0f} ({share:.1%})", f"Raise `reward_timeout` or `reward_workers`. {failed}"
            ),
        ),
        Diagnostic(
            "Completions on which scoring failed",
            ("reward/errors",),
            "share",
            "were {total:.0f} ({share:.1%})",
            high=Bound(0.01, "were {total:.0f} ({share:.1%})", failed),
        ),
    ]
