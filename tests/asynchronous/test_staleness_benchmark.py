"""The methods of the benchmark of staleness: gradients by their formulas, in float64."""

import pytest
import scripted
import torch
from helpers import EXACT, in_float64, norm, relative_error
from transformers import AutoModelForCausalLM

from benchmarks.staleness_methods import METHODS
from opo_trl.asynchronous.attention import in_pytorch
from opo_trl.asynchronous.targets import OWN


def gspo(rows, own):
    ratios = [(moved.mean().exp(), target) for moved, target in rows]
    losses = [-torch.min(s * a, s.clamp(1 - own, 1 + own) * a) for s, a in ratios]
    return sum(losses) / len(losses), {bool(a * (s - 1) > abs(a) * own) for s, a in ratios}


def m2po(rows, own):
    tokens = [(step, target) for moved, target in rows for step in moved]
    ascending = sorted(tokens, key=lambda token: abs(token[0].item()))
    kept, squares = [], 0.0
    for count, (step, target) in enumerate(ascending, 1):
        squares += step.item() ** 2
        if squares / count > own:
            break
        kept.append(-step.exp() * target)
    return sum(kept) / len(tokens), {len(kept) > 0, len(kept) == len(tokens)}


@pytest.mark.parametrize(
    ("name", "formula", "own"),
    [
        ("GSPO", gspo, 0.02),
        ("M2PO", m2po, 0.04),
    ],
)
def test_gradient_is_that_of_the_formula(tiny_model, tmp_path, name, formula, own):
    groups = scripted.conversations(tiny_model, groups=3)
    for group in groups:
        for each in group:
            del each.rows[1:]
    args = scripted.config(tmp_path)
    samples = scripted.samples(groups, args)
    args.per_device_train_batch_size = len(samples)
    targets = [sample.advantage for sample in samples]
    for sample in samples:
        del sample.metrics[OWN]

    class Own(METHODS[name].trainer):
        def __init__(self, *inputs, **named):
            with in_pytorch(torch.device("cpu")):
                super().__init__(*inputs, **named)
            self.own = own

    trainer = scripted.train(tiny_model, args, samples, Own)
    (step,) = trainer.recorder.steps
    network = AutoModelForCausalLM.from_pretrained(tiny_model).double().eval()
    network.load_state_dict(in_float64(step.policy))
    rows = []
    for row, target in zip((each.rows[0] for group in groups for each in group), targets, strict=True):
        trained = torch.tensor(row.own[1:]).bool()
        moved = scripted.chosen(network, row.ids) - torch.tensor(row.old[1:]).double()
        rows.append((moved[trained], target))
    loss, seen = formula(rows, own)
    assert seen == {True, False}  # both sides of a clip, a mask or a bound
    names, parameters = zip(*network.named_parameters(), strict=True)
    expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    assert norm(expected) > 1e-4
    assert relative_error(step.gradient, expected) < EXACT
