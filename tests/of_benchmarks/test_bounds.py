"""The confirmation of bounds: the hinge, and the rule."""

import numpy as np

from benchmarks.losses import bounds
from benchmarks.losses.bounds import REFERENCES, REGIMES


def accuracies_of_arms(**behind: float) -> dict:
    """Accuracies of a form at 80 everywhere, and of references so many points behind in one regime each."""
    random = np.random.default_rng(1)
    accuracies = {}
    for arm in ("form", *REFERENCES):
        for regime in REGIMES:
            accuracies[arm, regime] = 80 + random.normal(0, 1, 24)
    regimes = dict(zip(REFERENCES, ("few", "lag", "many"), strict=True))
    for arm, points in behind.items():
        name = arm.replace("_", " ")
        accuracies[name, regimes[name]] -= points
    return accuracies


def test_a_form_passes_that_is_nowhere_behind_and_somewhere_ahead_of_each():
    ahead = {"TOPR": 4.0, "truncated_REINFORCE": 4.0, "OPO": 4.0}
    accuracies = accuracies_of_arms(**ahead)
    assert bounds.passes(accuracies, "form") == (True, True)
    accuracies["form", "fresh"] -= 6
    assert bounds.passes(accuracies, "form") == (False, True)
    level_with_opo = accuracies_of_arms(**ahead | {"OPO": 0.0})
    assert bounds.passes(level_with_opo, "form") == (True, False)
