"""The toy of gradient saturation: every curve against its closed form."""

import math

import pytest
import torch

from benchmarks.paper.saturation import ALPHA, BETA, METHODS, MU, gradient


CLIP_RANGES = {"GRPO": (0.2, 0.2), "DAPO": (0.2, 0.28), "GSPO": (3e-4, 4e-4)}
TARGET = math.tanh(1 - ALPHA) / MU


def of_sft(p):
    return -(1 - p)


def of_dpo(p):
    return -BETA * torch.sigmoid(-BETA * p.logit())


def of_clipping(p, low, high):
    right_ratio = 2 * p
    wrong_ratio = 2 * (1 - p)
    right_is_pushed = (right_ratio <= 1 + high).double()
    wrong_is_pushed = (wrong_ratio >= 1 - low).double()
    return -p * (1 - p) * (right_is_pushed + wrong_is_pushed)


def of_opo(p):
    right_log_ratio = (2 * p).log()
    wrong_log_ratio = (2 * (1 - p)).log()
    right_force = (right_log_ratio - TARGET) * (1 - p)
    wrong_force = (wrong_log_ratio + TARGET) * p
    return MU / 2 * (right_force - wrong_force)


def of_opo_exact(p):
    right_ratio = 2 * p
    distance = right_ratio - 1 - TARGET
    return MU * distance * 2 * p * (1 - p)


CLOSED_FORMS = {"SFT": of_sft, "DPO": of_dpo, "OPO": of_opo, "OPO, exact": of_opo_exact}


def closed_form(method, p):
    """The gradient by the logit, where `p` is the probability of the right answer and ½ that before the training."""
    if method in CLIP_RANGES:
        low, high = CLIP_RANGES[method]
        return of_clipping(p, low, high)
    return CLOSED_FORMS[method](p)


@pytest.mark.parametrize("method", METHODS)
def test_gradient_is_the_closed_form(method):
    z = torch.linspace(-7, 9, 1001, dtype=torch.float64)
    expected = closed_form(method, z.sigmoid())
    torch.testing.assert_close(gradient(method, z), expected, rtol=1e-10, atol=1e-13)
