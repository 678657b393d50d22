"""The toy of gradient saturation: every curve against its closed form."""

import math

import pytest
import torch

from benchmarks.saturation import ALPHA, BETA, METHODS, MU, gradient


CLIP_RANGES = {"GRPO": (0.2, 0.2), "DAPO": (0.2, 0.28), "GSPO": (3e-4, 4e-4)}
TARGET = math.tanh(1 - ALPHA) / MU


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
