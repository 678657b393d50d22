"""A prompt is computed once for its completions: the same log-probabilities, entropies and gradient as in rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import EXACT, USE_CPU, Recording, Script, distance, logged, make_trainer, norm, snapshot, trained
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from opo_trl import OPOConfig, OPOTrainer, config
from opo_trl.forecast.plan import _row_tokens
from opo_trl.rollout.planner import Planner
from opo_trl.rollout.planning import FEWEST_PASSES, Limits, Prompts, best_cut, parts_of_rows, row_lengths
from opo_trl.rollout.shared_prompts import arrange, balance, hashes, model_for


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
@pytest.mark.parametrize(("gaps", "multiple"), [(False, None), (True, 8)])
def test_log_probabilities_entropies_and_gradient_are_those_of_rows(kind, gaps, multiple):
    model = make_model(kind)
    assert balance(model) is not None
    random = torch.Generator().manual_seed(0)
    rows, lengths, prompts = rows_of_groups(random)
    if gaps:  # the first completion token after a gap, and a token of every prompt
        rows["attention_mask"][:, P + 1] = rows["attention_mask"][:, P - 3] = 0
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    labels[:, :P] = -100
    ids = {"prompt_ids": rows["input_ids"][:, :P], "completion_ids": rows["input_ids"][:, P:]}
    placed = arrange(ids, lengths, prompts, multiple)
    assert placed["opo_source"].shape == (3, 16 if multiple else 14)
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
    # Also where the number of passes counts most.
    fewest = Limits(8, pass_tokens=FEWEST_PASSES)
    assert best_cut(np.tile([[40, 6]], (8, 1)), fewest, prompts)[1:3] == ([], True)
    # Within a budget of tokens: 39 + 4 · 7 for a prompt.
    assert best_cut(np.tile([[40, 6]], (8, 1)), Limits(8, max_tokens=67), prompts)[1] == [4]
    # With columns that are multiples of 16, 67 would be 80: three at most, in 64.
    limits_of_16 = Limits(8, max_tokens=67, multiple=16)
    assert len(best_cut(np.tile([[40, 6]], (8, 1)), limits_of_16, Prompts(np.zeros(8), 6000.0))[1]) == 2
    # A wider row than that of a completion of its own, where tokens and attention together cost less.
    assert best_cut(np.tile([[1024, 512]], (8, 1)), Limits(8, pass_tokens=FEWEST_PASSES), prompts)[1:3] == ([], True)
    # Filled up to 2 · (40 + 12) tokens: two rows of 39 + 4 · 3, and not 39 + 13 + 3 · 3.
    assert best_cut(np.array([[40, 12], *[[40, 2]] * 7]), Limits(2, fill=True), prompts)[1:3] == ([1], True)


def test_parts_hold_each_sample_once_with_its_place():
    lengths, of_sample = np.tile([[40, 6]], (6, 1)), np.array([2, 1, 2, 1, 2, 2])
    mask = torch.ones(6, 40), torch.ones(6, 6)
    rows = {"prompt_ids": mask[0].long(), "prompt_mask": mask[0].long(), "completion_ids": mask[1].long()}
    rows |= {"completion_mask": mask[1].long(), "name": torch.arange(6)}
    (part,) = parts_of_rows(
        rows,
        row_lengths(rows).numpy(),
        np.arange(6),
        1,
        Limits(6),
        prompts=Prompts(of_sample, 400.0),
    )
    assert part["name"].tolist() == [0, 2, 4, 5, 1, 3]
    assert part["opo_source"].shape == (2, 39 + 4 * 7)
    source = part["opo_source"]
    assert sorted(set(source[source >= 0].tolist()) & set(range(40, 46))) == list(range(40, 46))
    assert np.array_equal(lengths, row_lengths(part).numpy())


RUN = {"per_device_train_batch_size": 8, "max_staleness": 1, "num_iterations": 2, "gradient_accumulation_steps": 1}
DATA = {"train_dataset": Dataset.from_dict({"prompt": [f"{'long ' * 8}{i}" for i in range(8)]})}


def shared_parts(trainer) -> list[bool]:
    return ["opo_source" in part for step in trainer.steps for part in step.batches]


@pytest.mark.parametrize(
    "options", [{}, {"beta": 0.1}, {"gradient_checkpointing": True}, {"max_staleness": 0}], ids=str
)
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 1, "steps_per_generation": 2},
        {"model_init_kwargs": {"attn_implementation": "eager"}},
        {"plan_micro_batches": False},
    ],
    ids=str,
)
def test_the_plan_knows_the_largest_micro_batch(tiny_model, tmp_path, options):
    options = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 2, **options}
    script = Script(min_length=12, max_length=12)
    trainer = trained(tiny_model, tmp_path, script=script, trainer_arguments=DATA, **options)
    prompt, completion = _row_tokens(trainer)
    rows, shared = trainer._largest_micro_batch(prompt, completion)
    parts = [part for step in trainer.steps for part in step.batches]
    tokens = [part.get("opo_source", torch.cat([part["prompt_ids"], part["completion_ids"]], 1)) for part in parts]
    planned, largest = rows * (prompt + shared * completion + shared - 1), max(part.numel() for part in tokens)
    assert planned >= largest
    if USE_CPU:
        assert planned == largest
        assert (shared > 1) is any(shared_parts(trainer))
    assert f"{rows} × ({prompt} + {f'{shared} × ' if shared > 1 else ''}{completion}) tokens" in trainer.plan


@pytest.mark.parametrize("multiple", [None, 16])
@pytest.mark.parametrize("length", [3, 12])
def test_a_budget_of_tokens_is_filled_and_planned(tiny_model, tmp_path, multiple, length):
    """With short completions too, more of which have room; the columns of a part are counted as they are computed."""
    budget = 100
    options = {"gradient_accumulation_steps": 2, "max_steps": 2, "pad_to_multiple_of": multiple}
    options |= {"max_tokens_per_micro_batch": budget, "trainer_arguments": DATA}
    trainer = trained(tiny_model, tmp_path, script=Script(min_length=length, max_length=length), **options)
    prompt, completion = _row_tokens(trainer)
    rows, shared = trainer._largest_micro_batch(prompt, completion)
    assert shared == 1
    assert budget <= rows * (prompt + completion) < budget + prompt + completion
    parts = [part for step in trainer.steps for part in step.batches]
    tokens = [part.get("opo_source", torch.cat([part["prompt_ids"], part["completion_ids"]], 1)) for part in parts]
    assert max(part.numel() for part in tokens) <= budget


def test_a_budget_is_rejected_where_each_backward_pass_is_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "updates_in_backward", lambda args: True)  # such optimizers are not installed
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch=60 .* takes one in every backward pass"):
        OPOConfig(str(tmp_path), max_tokens_per_micro_batch=60, use_cpu=True, bf16=False)


@pytest.mark.parametrize(
    ("device", "options", "fills"),
    [
        ("cuda", {}, True),
        ("cuda", {"multiple": 16}, True),
        ("cpu", {}, False),
        ("cuda", {"communicates": True}, False),
        ("cuda", {"balance": None}, False),
        ("cuda", {"optim": "galore_adamw_layerwise"}, False),
    ],
    ids=str,
)
def test_where_passes_are_filled(tmp_path, device, options, fills):
    """Wherever they may be, or some completions of a prompt may be skipped, the plan counts a prompt for each."""
    options = {"multiple": None, "communicates": False, "balance": 6000.0, "optim": "adamw_torch", **options}
    sizes = {"per_device_train_batch_size": 8, "use_cpu": True, "bf16": False}
    args = OPOConfig(str(tmp_path), **sizes)
    args.optim = options.pop("optim")  # its package is not installed
    planner = Planner(args, SimpleNamespace(process_index=0, device=torch.device(device)), **options)
    assert planner._limits(8).fill == fills
    assert device == "cpu" or planner.largest_part(40, 6) == (8, 1)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3", {"attn_implementation": "eager"}),
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}),
        ("gpt2", {}),
        ("opt", {}),
        ("qwen3_moe", {}),
    ],
    ids=str,
)
def test_models_that_may_compute_something_else_compute_rows(kind, fields):
    assert balance(make_model(kind, **fields)) is None


class OwnLogps(Recording, OPOTrainer):
    """Calls the model as in `GRPOTrainer`."""

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        assert isinstance(model, torch.nn.Module)
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)


class OwnLoss(Recording, OPOTrainer):
    """Trains on half of the samples."""

    def _compute_loss(self, model, inputs):
        half = len(inputs["completion_ids"]) // 2
        tables = {
            name: value[:half] for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim
        }
        return super()._compute_loss(model, {**inputs, **tables})


@pytest.mark.parametrize("kind", [OwnLogps, OwnLoss])
def test_subclasses_see_a_model_and_samples_as_in_grpo(tiny_model, tmp_path, kind):
    trainer = trained(tiny_model, tmp_path, trainer_class=kind, **RUN, trainer_arguments=DATA, max_steps=2)
    assert any(shared_parts(trainer)) == (kind is OwnLoss)
    assert norm(trainer.steps[0].gradient) > 0.01


def test_a_checkpoint_inside_a_rollout_is_resumed_with_another_attention(tiny_model, tmp_path):
    run = {**RUN, "trainer_arguments": DATA, "steps_per_generation": 2, "per_device_train_batch_size": 4}
    trained(tiny_model, tmp_path, **run, max_steps=1, save_strategy="steps", save_steps=1)
    eager = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager", dtype=torch.float32)
    found = []
    for model in (tiny_model, eager):
        trainer = make_trainer(model, tmp_path, **run, max_steps=2)
        trainer.train(resume_from_checkpoint="last")
        found.append(logged(trainer)[-1]["grad_norm"])
        assert any(shared_parts(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
