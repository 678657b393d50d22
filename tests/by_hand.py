"""Groups of samples, and the objective by hand: plain loops over Python floats, from the definitions."""

import math
from types import SimpleNamespace

import torch
from torch.testing import assert_close

from opo_trl.objective import OPO, Samples


G = 4
# Three groups of four: advantages of both signs, two successes in four (z-scored), and a zero-variance group.
ADVANTAGES = [1.3, -0.2, 0.4, -1.5, 0.8660254, 0.8660254, -0.8660254, -0.8660254, 0.1, 0.1, 0.1, 0.1]
VALID = [True, True, False, True, True, True, True, True, True, False, False, True]
LOGPS = [-3.1, -2.2, -7.9, -4.0, -5.5, -1.2, -2.9, -3.3, -6.1, -0.4, -2.6, -8.8]
LENGTHS = [5, 2, 9, 4, 6, 1, 3, 4, 7, 1, 3, 8]
CORRECTIONS = {
    "absorbed": None,
    "length_normalized": [logp / length for logp, length in zip(LOGPS, LENGTHS, strict=True)],
    "sequence": LOGPS,
}
TRASH = [math.nan, math.inf, -math.inf, 1e30, -1e30]


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def assert_exact(actual, expected):
    """Bitwise equal, up to the sign of zero."""
    assert_close(actual, expected, rtol=0, atol=0)


def assert_tight(actual, expected):
    """Equal up to the rounding of a few float64 operations."""
    assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def groups_of(n, group=G, valid=None):
    """The valid rows of each group."""
    rows = [range(start, start + group) for start in range(0, n, group)]
    return [[i for i in group_rows if valid is None or valid[i]] for group_rows in rows]


def escort_by_hand(advantages, alpha, temperature=1.0, correction=None, valid=None, group=G):
    """omega = rho / pi_k with rho ∝ pi_k (exp(A / tau) / exp(c))^(1 - alpha), normalized over the group."""
    omega = [0.0] * len(advantages)
    for rows in groups_of(len(advantages), group, valid):
        c = correction or [0.0] * len(advantages)
        raw = [(math.exp(advantages[i] / temperature) / math.exp(c[i])) ** (1 - alpha) for i in rows]
        for i, weight in zip(rows, raw, strict=True):
            omega[i] = weight * len(rows) / sum(raw)
    return omega


def drive_by_hand(omega, valid=None, group=G):
    drive = [0.0] * len(omega)
    for rows in groups_of(len(omega), group, valid):
        for i in rows:
            drive[i] = omega[i] - math.fsum(omega[j] for j in rows) / len(rows)
    return drive


def log_ratio_of(logps, anchor_logps, mask, *, reduction="sum", clamp=math.inf):
    """Log-ratio of each completion, and whether it is clamped, as the objective computes them."""
    zero = torch.zeros(len(logps))
    tokens = {"logps": logps, "anchor_logps": anchor_logps, "mask": mask.bool()}
    samples = Samples(**tokens, target=zero, mu=zero, weights=zero, age=zero, reused=False)
    fields = {"log_ratio_reduction": reduction, "log_ratio_clamp": clamp, "ratio_form": "log"}
    loss = OPO(SimpleNamespace(**fields)).loss(samples)
    return loss.log_ratio, loss.clamped
