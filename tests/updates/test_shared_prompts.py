"""A prompt is computed once for its completions: the same log-probabilities, entropies and gradient as in rows."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import EXACT, Script, distance, logged, norm, snapshot, trained
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from opo_trl.forecast.plan import _longest_tokens, most_rows
from opo_trl.updates.cutting import Limits, Prompts, best_cut
from opo_trl.updates.shared_prompts import arrange, balance, hashes, model_for


# Prompts of 5, 1 and 3 tokens, and the lengths of their completions; of one, none is left.
GROUPS = {5: (2, 4, 1), 1: (3,), 3: (4, 0, 2)}
P, T = 6, 5


def rows_of_groups(random: torch.Generator) -> tuple[dict, np.ndarray, np.ndarray]:
    rows, lengths = [], []
    for prompt, completions in GROUPS.items():
        ids = torch.randint(3, 250, (prompt,), generator=random)
        for completion in completions:
            row = torch.randint(3, 250, (P + T,), generator=random)
            row[P - prompt : P] = ids
            rows.append(row)
            lengths.append((prompt, completion))
    ids, lengths = torch.stack(rows), np.array(lengths)
    column = np.arange(P + T)
    mask = (column >= P - lengths[:, :1]) & (column < P + lengths[:, 1:])
    return {"input_ids": ids, "attention_mask": torch.from_numpy(mask).long()}, lengths, lengths[:, 0]


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"sliding_window": None},
    "qwen3": {"sliding_window": None, "head_dim": 16},
}


def make_model(kind: str, **fields) -> torch.nn.Module:
    torch.manual_seed(0)
    fields = {**SHAPE, "num_key_value_heads": 2, "vocab_size": 259, **KINDS.get(kind, {}), **fields}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float64)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gaps", [False, True])
def test_log_probabilities_entropies_and_gradient_are_those_of_rows(kind, gaps):
    model = make_model(kind)
    assert balance(model) is not None
    random = torch.Generator().manual_seed(0)
    rows, lengths, prompts = rows_of_groups(random)
    if gaps:  # the first completion token after a gap, and a token of every prompt
        rows["attention_mask"][:, P + 1] = rows["attention_mask"][:, P - 3] = 0
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    labels[:, :P] = -100
    ids = {"prompt_ids": rows["input_ids"][:, :P], "completion_ids": rows["input_ids"][:, P:]}
    placed = arrange(ids, lengths, prompts)
    assert placed["opo_source"].shape == (3, 14)
    weights = torch.randn(2, len(labels), T, generator=random, dtype=torch.float64)
    found = []
    for kind in (model, model_for(model, ids | placed)):
        model.zero_grad()
        outputs = kind(**rows, labels=labels, fused_lm_head=True)
        values = torch.stack([outputs[name][:, -T:] for name in ("log_probs", "entropy")])
        (values * weights).sum().backward()
        found.append((values.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (values, gradient), (shared, shared_gradient) = found
    assert torch.allclose(shared, values, atol=1e-12)
    assert values[0].abs().max() > 1
    assert model_for(model, ids) is model
    cut = ids | {"completion_ids": ids["completion_ids"][:, 1:]}
    assert model_for(model, cut | placed) is model  # an override has cut them
    assert (shared_gradient - gradient).norm() < 1e-6 * gradient.norm()


def test_prompts_are_told_apart_by_their_tokens_and_not_by_their_padding():
    ids = torch.tensor([[7, 0, 5, 6], [0, 0, 5, 6], [0, 9, 5, 6], [0, 0, 6, 5], [0, 5, 6, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]])
    found = hashes({"prompt_ids": ids, "prompt_mask": mask}).tolist()
    assert found[0] == found[1]
    assert len(set(found)) == 4
    wider = {"prompt_ids": torch.cat([ids[:, :1], ids], dim=1), "prompt_mask": torch.nn.functional.pad(mask, (1, 0))}
    assert hashes(wider).tolist() == found


def test_prompts_are_shared_where_that_costs_less():
    prompts, limits = Prompts(np.repeat([3, 1], 4), balance=6000.0), Limits(8)
    order, bounds, shared, _ = best_cut(np.tile([[40, 6]], (8, 1)), limits, prompts)
    assert shared
    assert bounds == []
    assert np.diff(prompts.of_sample[order]).astype(bool).sum() == 1
    # Attention between completions of 4,000 tokens costs more than a prompt of 400.
    assert not best_cut(np.tile([[400, 4000]], (8, 1)), limits, prompts)[2]
    assert not best_cut(np.tile([[40, 6]], (8, 1)), limits, Prompts(np.arange(8), 6000.0))[2]
    # Within a budget of tokens: 39 + 4 · 7 for a prompt.
    assert best_cut(np.tile([[40, 6]], (8, 1)), Limits(8, max_tokens=67), prompts)[1] == [4]
    # Filled up to 2 · (40 + 12) tokens: two rows of 39 + 4 · 3, and not 39 + 13 + 3 · 3.
    assert best_cut(np.array([[40, 12], *[[40, 2]] * 7]), Limits(2, fill=True), prompts)[1:3] == ([1], True)


RUN = {"per_device_train_batch_size": 8, "max_staleness": 1, "num_iterations": 2, "gradient_accumulation_steps": 1}
DATA = {"train_dataset": Dataset.from_dict({"prompt": [f"{'long ' * 8}{i}" for i in range(8)]})}


def shared_parts(trainer) -> list[bool]:
    return ["opo_source" in part for step in trainer.steps for part in step.batches]


@pytest.mark.parametrize("options", [{"beta": 0.1}, {"gradient_checkpointing": True, "max_staleness": 0}], ids=str)
def test_training_is_the_same_as_in_rows(tiny_model, tmp_path, options):
    run = {**RUN, "trainer_arguments": DATA, "max_steps": 4, **options}
    rows = trained(tiny_model, tmp_path, script=Script(), plan_micro_batches=False, **run)
    shared = trained(tiny_model, tmp_path, script=Script(), **run)
    assert all(shared_parts(shared))
    assert not any(shared_parts(rows))
    end, start = snapshot(rows.model), rows.initial
    moved = norm({name: end[name] - start[name] for name in end})
    assert moved > 1e-3
    assert distance(snapshot(shared.model), end) < EXACT * moved
    largest, expected = (logged(trainer)[1]["opo/log_ratio/absmax"] for trainer in (shared, rows))
    assert largest == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("budget", [None, 100])
@pytest.mark.parametrize("length", [3, 12])
def test_the_plan_knows_the_largest_micro_batch(tiny_model, tmp_path, budget, length):
    """With short completions too, more of which have room in a budget of tokens."""
    options = {"gradient_accumulation_steps": 2, "max_steps": 2, "trainer_arguments": DATA}
    script = Script(min_length=length, max_length=length)
    trainer = trained(tiny_model, tmp_path, script=script, max_tokens_per_micro_batch=budget, **options)
    prompt, completion = _longest_tokens(trainer)
    rows = most_rows(trainer.args, prompt + completion)
    parts = [part for step in trainer.steps for part in step.batches]
    tokens = [part.get("opo_source", torch.cat([part["prompt_ids"], part["completion_ids"]], 1)) for part in parts]
    assert max(part.numel() for part in tokens) <= rows * (prompt + completion)
    assert budget is None or max(part.numel() for part in tokens) <= budget
    assert f"{rows} × ({prompt} + {completion}) tokens" in trainer.plan


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3", {"attn_implementation": "eager"}),
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}),
        ("qwen3", {"auto_map": {"AutoModelForCausalLM": "code.Model"}}),
        ("gpt2", {}),
        ("opt", {}),
        ("qwen3_moe", {}),
    ],
    ids=str,
)
def test_models_that_may_compute_something_else_compute_rows(kind, fields):
    assert balance(make_model(kind, **fields)) is None
