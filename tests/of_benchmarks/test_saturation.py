"""The toy of gradient saturation: every curve against its closed form."""

import math

import pytest
import torch

from benchmarks.saturation import ALPHA, BETA, METHODS, MU, gradient, on_policy_gradient


CLIP_RANGES = {"GRPO": (0.2, 0.2), "DAPO": (0.2, 0.28), "GSPO": (3e-4, 4e-4)}
TARGET = math.tanh(1 - ALPHA) / MU


def logit(*p):
    return torch.tensor(p, dtype=torch.float64).logit()


def clipped(p, low, high):
    return -p * (1 - p) * ((2 * p <= 1 + high).double() + (2 * (1 - p) >= 1 - low).double())


CLOSED_FORMS = {
    "SFT": lambda p: -(1 - p),
    "DPO": lambda p: -BETA * torch.sigmoid(-BETA * p.logit()),
    **{name: lambda p, edges=edges: clipped(p, *edges) for name, edges in CLIP_RANGES.items()},
    "OPO": lambda p: MU / 2 * (((2 * p).log() - TARGET) * (1 - p) - ((2 * (1 - p)).log() + TARGET) * p),
    "OPO, exact": lambda p: MU * (2 * p - 1 - TARGET) * 2 * p * (1 - p),
}


@pytest.mark.parametrize("method", METHODS)
def test_gradient_is_the_closed_form(method):
    z = torch.linspace(-7, 9, 1001, dtype=torch.float64)
    torch.testing.assert_close(gradient(method, z), CLOSED_FORMS[method](z.sigmoid()), rtol=1e-10, atol=1e-13)


def closed_form_on_policy(method, p, size):
    """Sum over the number k of rewarded completions; the escort weights of both kinds sum to opposite values."""
    total = 0.0
    for k in range(1, size):
        high, low = math.sqrt((size - k) / k), -math.sqrt(k / (size - k))
        drive = high
        if method == "OPO":
            up, down = math.exp((1 - ALPHA) * high), math.exp((1 - ALPHA) * low)
            drive = size * up / (k * up + (size - k) * down) - 1
        total -= math.comb(size, k) * p**k * (1 - p) ** (size - k) * k / size * drive
    return total


@pytest.mark.parametrize("form", ["GRPO", "DAPO", "GSPO", "OPO", "OPO, exact"])
def test_on_policy_gradient_is_the_closed_form(form):
    p = [0.01, 0.3, 0.5, 0.9, 0.999]
    measured = on_policy_gradient(form, logit(*p))
    method = "OPO" if form.startswith("OPO") else "GRPO"
    expected = torch.tensor([closed_form_on_policy(method, x, 8) for x in p], dtype=torch.float64)
    torch.testing.assert_close(measured, expected, rtol=1e-10, atol=0)
