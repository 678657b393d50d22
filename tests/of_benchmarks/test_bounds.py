"""The confirmation of bounds: the hinge, and the rule."""

import numpy as np

from benchmarks import bounds
from benchmarks.bounds import REFERENCES, REGIMES


def reached(**behind: float) -> dict:
    """Accuracies of a form at 80 everywhere, and of references so many points behind in one regime each."""
    random = np.random.default_rng(1)
    regimes = dict(zip(REFERENCES, ("few", "lag", "many"), strict=True))
    found = {(arm, regime): 80 + random.normal(0, 1, 24) for arm in ("form", *REFERENCES) for regime in REGIMES}
    for arm, points in behind.items():
        name = arm.replace("_", " ")
        found[name, regimes[name]] -= points
    return found


def test_a_form_passes_that_is_nowhere_behind_and_somewhere_ahead_of_each():
    ahead = {"TOPR": 4.0, "truncated_REINFORCE": 4.0, "OPO": 4.0}
    assert bounds.passes(reached(**ahead), "form") == (True, True)
    assert bounds.passes(reached(**ahead | {"OPO": 0.0}), "form") == (True, False)
    fallen = reached(**ahead)
    fallen["form", "fresh"] -= 6
    assert bounds.passes(fallen, "form") == (False, True)
