"""Weights and gradients as tensors by name: copied, and compared."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def snapshot(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of the model's state, on the host."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def in_float64(policy: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(torch.float64, copy=True) for name, tensor in policy.items()}


def all_finite(weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether no weight is infinite or NaN."""
    return all(weight.isfinite().all() for weight in weights.values())


def same_weights(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two models have the same weights, to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def norm(gradient: dict[str, Tensor]) -> float:
    squares = [tensor.double().square().sum() for tensor in gradient.values()]
    return math.sqrt(sum(square.item() for square in squares))


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference, over all tensors."""
    assert one.keys() == other.keys()
    differences = {name: tensor.double() - other[name].double() for name, tensor in one.items()}
    return norm(differences)


def relative_error(gradient: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    return distance(gradient, reference) / norm(reference)
