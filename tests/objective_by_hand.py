"""Groups of completions, and the objective by hand: plain loops over Python floats, from the definitions."""

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


def assert_exactly_everywhere(actual, value):
    """Every entry is this value."""
    expected = torch.full_like(actual, value)
    assert_exact(actual, expected)


def assert_tight(actual, expected):
    """Equal up to the rounding of a few float64 operations."""
    reference = torch.as_tensor(expected, dtype=torch.float64)
    assert_close(actual, reference, rtol=1e-12, atol=1e-12)


def gradient_of_sum(terms, variable):
    """The derivative of the sum of all terms by the variable."""
    total = terms.sum()
    (gradient,) = torch.autograd.grad(total, variable)
    return gradient


def table(target, policy, before, *, mu=1.0, reused=True):
    """For each entry of the two policies, a completion of this one token."""
    one = torch.ones_like(before)
    logps = policy.log().unsqueeze(1)
    behaviour_logps = before.log().unsqueeze(1)
    mask = torch.ones_like(logps).bool()
    steering = {"target": target, "mu": mu * one, "weights": one, "age": torch.zeros_like(before)}
    return Samples(logps=logps, anchor_logps=behaviour_logps, mask=mask, **steering, reused=reused)


def values_at(values, rows):
    return [values[row] for row in rows]


def valid_rows_of(rows, valid):
    """Those of the rows that are valid; all of them without a mask."""
    if valid is None:
        return list(rows)
    return [row for row in rows if valid[row]]


def groups_of(n, group=G, valid=None):
    """The valid rows of each group."""
    groups = []
    for start in range(0, n, group):
        rows = range(start, start + group)
        groups.append(valid_rows_of(rows, valid))
    return groups


def escort_by_hand(advantages, alpha, temperature=1.0, correction=None, valid=None, group=G):
    """omega = rho / pi_k with rho ∝ pi_k (exp(A / tau) / exp(c))^(1 - alpha), normalized over the group."""
    n = len(advantages)
    omega = [0.0] * n
    if correction is None:
        correction = [0.0] * n
    for rows in groups_of(n, group, valid):
        unnormalized = []
        for row in rows:
            boltzmann_factor = math.exp(advantages[row] / temperature)
            tilted = boltzmann_factor / math.exp(correction[row])
            unnormalized.append(tilted ** (1 - alpha))
        total = sum(unnormalized)
        for row, weight in zip(rows, unnormalized, strict=True):
            omega[row] = weight * len(rows) / total
    return omega


def drive_by_hand(omega, valid=None, group=G):
    """The escort weights less the mean of their group."""
    drive = [0.0] * len(omega)
    for rows in groups_of(len(omega), group, valid):
        total = math.fsum(values_at(omega, rows))
        for row in rows:
            drive[row] = omega[row] - total / len(rows)
    return drive


def log_ratio_of(logps, anchor_logps, mask, *, reduction="sum", clamp=math.inf):
    """Log-ratio of each completion, and whether it is clamped, as the objective computes them."""
    zero = torch.zeros(len(logps))
    tokens = {"logps": logps, "anchor_logps": anchor_logps, "mask": mask.bool()}
    samples = Samples(**tokens, target=zero, mu=zero, weights=zero, age=zero, reused=False)
    args = SimpleNamespace(log_ratio_reduction=reduction, log_ratio_clamp=clamp, ratio_form="log")
    loss = OPO(args).loss(samples)
    return loss.log_ratio, loss.clamped
