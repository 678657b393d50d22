"""What tables and figures call the methods that runs were trained with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


BASELINE = "grpo"  # of a comparison, by default


@dataclass(frozen=True)
class Method:
    """A method in reports: its label, the colour of its curves, and the settings that tell its runs from others."""

    name: str
    label: str
    color: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_PUBLISHED: dict[str, Any] = {"objective": "topr", "positive_bounds": [1, 1], "negative_bounds": [0, 1]}
_TRUNCATED: dict[str, Any] = {**_PUBLISHED, "push": "reward", "positive_bounds": [0, 2], "negative_bounds": [0, 2]}

_GSPO = {"objective": "grpo", "importance_sampling_level": "sequence"}

# Colours of Okabe and Ito, which people with colour blindness can tell apart, and for GSPO a darker one.
METHODS = (
    Method("opo", "OPO", "#d55e00", {"trainer": "opo", "objective": "opo"}),
    Method("truncated_reinforce", "Truncated REINFORCE", "#e69f00", {"trainer": "opo", **_TRUNCATED}),
    Method("topr", "TOPR", "#f0e442", {"trainer": "opo", **_PUBLISHED}),
    Method("gspo", "GSPO", "#b03a86", {"trainer": "opo", "objective": "gspo"}),
    Method("gspo", "GSPO", "#b03a86", {"trainer": "opo", **_GSPO}),
    Method("grpo", "GRPO", "#0072b2", {"trainer": "opo", "objective": "grpo"}),
    Method("dapo", "DAPO", "#56b4e9", {"trainer": "opo", "objective": "dapo", "mask_truncated_completions": True}),
)


def method_of(settings: Mapping[str, Any]) -> Method | None:
    """The method of a run, by its settings; `None` if they match no method."""
    settings = {"objective": "opo", **settings}  # which runs of earlier releases do not name
    if settings.get("trainer") == "grpo":  # of an earlier release
        settings |= {"trainer": "opo", "objective": settings.get("loss_type")}
    for method in METHODS:
        if all(settings.get(name) == value for name, value in method.settings.items()):
            return method
    return None
