"""A prompt is computed once for its completions: the same log-probabilities, entropies and gradient as in rows."""

import doctest

import numpy as np
import pytest
import torch
from datasets import Dataset
from float64_reference import EXACT
from named_tensors import distance, snapshot
from recording_trainers import RecordingOPO, logged, trained
from scripted_rollouts import Script
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.trainer.utils import add_fused_lm_head

from opo_trl.batch import model_inputs
from opo_trl.forecast.plan import _longest_tokens, most_rows
from opo_trl.updates import shared_prompts
from opo_trl.updates.cutting import Limits, Prompts, best_cut
from opo_trl.updates.shared_prompts import arrange, break_even_width, hashes, model_for


# Prompts of 5, 1 and 3 tokens, and the lengths of their completions; of one, none is left.
GROUPS = {5: (2, 4, 1), 1: (3,), 3: (4, 0, 2)}
P, T = 6, 5


def test_the_example_of_the_module_is_right():
    failed, attempted = doctest.testmod(shared_prompts)
    assert attempted > 0
    assert failed == 0


def padded_groups(random: torch.Generator) -> tuple[dict, np.ndarray, np.ndarray]:
    """Inputs of a model, a row for each completion; lengths of prompts and completions; which prompt each has."""
    rows, lengths = [], []
    for prompt_length, completion_lengths in GROUPS.items():
        prompt = torch.randint(3, 250, (prompt_length,), generator=random)
        for completion_length in completion_lengths:
            row = torch.randint(3, 250, (P + T,), generator=random)
            row[P - prompt_length : P] = prompt
            rows.append(row)
            lengths.append((prompt_length, completion_length))
    lengths = np.array(lengths)
    column = np.arange(P + T)
    begins, ends = P - lengths[:, :1], P + lengths[:, 1:]
    mask = (column >= begins) & (column < ends)
    return {"input_ids": torch.stack(rows), "attention_mask": torch.from_numpy(mask).long()}, lengths, lengths[:, 0]


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"sliding_window": None},
    "qwen3": {"sliding_window": None, "head_dim": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
}
# The default implementation of experts does not compute in float64.
KINDS["qwen3_moe"]["experts_implementation"] = "eager"


def make_model(kind: str, **fields) -> torch.nn.Module:
    torch.manual_seed(0)
    fields = {**SHAPE, "num_key_value_heads": 2, "vocab_size": 259, **KINDS.get(kind, {}), **fields}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float64)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gaps", [False, True])
def test_log_probabilities_entropies_and_gradient_are_those_of_rows(kind, gaps):
    model = make_model(kind)
    assert break_even_width(model) is not None
    random = torch.Generator().manual_seed(0)
    rows, lengths, prompts = padded_groups(random)
    if gaps:  # the first completion token after a gap, and a token of every prompt
        rows["attention_mask"][:, [P + 1, P - 3]] = 0
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    labels[:, :P] = -100
    prompt_ids, completion_ids = rows["input_ids"].split([P, T], dim=1)
    batch = {"prompt_ids": prompt_ids, "completion_ids": completion_ids}
    places = arrange(batch, lengths, prompts)
    # The longest prompt has 5 tokens, and all completions of one at most 2 + 4 + 1, each after the prompt's last.
    assert places["opo_source"].shape == (3, 4 + 10)
    assert places["opo_completion"].shape == (3, 10)
    weights = torch.randn(2, len(labels), T, generator=random, dtype=torch.float64)

    def values_and_gradient(forward) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        outputs = forward(**rows, labels=labels, fused_lm_head=True)
        values = torch.stack([outputs["log_probs"], outputs["entropy"]])[..., -T:]
        (values * weights).sum().backward()
        return values.detach(), gradient_of(model)

    values, gradient = values_and_gradient(model)
    shared_values, shared_gradient = values_and_gradient(model_for(model, batch | places))
    assert torch.allclose(shared_values, values, atol=1e-12)
    assert values[0].abs().max() > 1
    difference = shared_gradient - gradient
    assert difference.norm() < 1e-6 * gradient.norm()

    assert model_for(model, batch) is model
    cut_by_an_override = batch | places | {"completion_ids": completion_ids[:, 1:]}
    assert model_for(model, cut_by_an_override) is model


def test_attention_has_its_dropout():
    model = make_model("qwen3", attention_dropout=0.5)
    rows, lengths, prompts = padded_groups(torch.Generator().manual_seed(0))
    prompt_ids, completion_ids = rows["input_ids"].split([P, T], dim=1)
    batch = {"prompt_ids": prompt_ids, "completion_ids": completion_ids}
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    labels[:, :P] = -100
    shared = model_for(model, batch | arrange(batch, lengths, prompts))
    for mode, is_same in ((model.eval, True), (model.train, False)):
        mode()
        one, other = (shared(**rows, labels=labels, fused_lm_head=True)["log_probs"] for _ in range(2))
        assert torch.equal(one, other) == is_same


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padding_is_finite_in_half_precision(dtype):
    model = make_model("qwen3").to(dtype)
    rows, lengths, prompts = padded_groups(torch.Generator().manual_seed(0))
    prompt_ids, completion_ids = rows["input_ids"].split([P, T], dim=1)
    batch = {"prompt_ids": prompt_ids, "completion_ids": completion_ids}
    masks, hidden_states = [], []
    model.register_forward_pre_hook(lambda _, args, inputs: masks.append(inputs["attention_mask"]), with_kwargs=True)
    model.model.register_forward_hook(lambda _, args, outputs: hidden_states.append(outputs.last_hidden_state))
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    labels[:, :P] = -100
    shared = model_for(model, batch | arrange(batch, lengths, prompts))
    shared(**rows, labels=labels, fused_lm_head=True)["log_probs"].sum().backward()
    # Completions have 10 columns, the longest prompt, without its last token, has 4.
    assert masks[0].shape == (3, 1, 10, 14)
    assert hidden_states[0].isfinite().all()
    assert gradient_of(model).isfinite().all()


def test_a_mask_of_one_row_is_that_of_all_queries():
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    mask = torch.rand(2, 1, 1, 5) < 0.7
    mask[..., 0] = True
    values, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](torch.nn.Module(), query, key, value, mask)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert torch.equal(values, expected.transpose(1, 2))


def test_with_another_attention_rows_are_computed(monkeypatch):
    model = make_model("qwen3")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", ALL_ATTENTION_FUNCTIONS["flex_attention"])
    assert break_even_width(model) is None


def test_shapes_of_parts_are_those_of_their_rows():
    random = np.random.default_rng(0)
    prompts = np.repeat([3, 1, 2, 0], [4, 1, 2, 5])
    lengths = np.stack([random.integers(1, 9, 4)[prompts], random.integers(0, 7, 12)], axis=1)
    table = {"prompt_ids": torch.zeros(12, 9), "completion_ids": torch.zeros(12, 7)}
    for size, shapes in enumerate(Prompts(prompts, 6000.0).shapes(lengths), 1):
        for first, width in enumerate(shapes.width):
            part = slice(first, first + size)
            batch = {name: entry[part] for name, entry in table.items()}
            source = arrange(batch, lengths[part], prompts[part])["opo_source"]
            assert source.shape == (shapes.rows[first], width)


def test_prompts_are_told_apart_by_their_tokens_and_not_by_their_padding():
    ids = torch.tensor([[7, 0, 5, 6], [0, 0, 5, 6], [0, 9, 5, 6], [0, 0, 6, 5], [0, 5, 6, 0], [0, 0, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]])
    numbers = hashes({"prompt_ids": ids, "prompt_mask": mask})
    assert numbers[0] == numbers[1]
    assert len(numbers.unique()) == 5  # the last one begins with the token 0
    wider = {"prompt_ids": pad(ids, (1, 0), value=9), "prompt_mask": pad(mask, (1, 0))}
    assert torch.equal(hashes(wider), numbers)


def equal_lengths(prompt: int, completion: int) -> np.ndarray:
    """Of eight completions."""
    return np.tile([[prompt, completion]], (8, 1))


def test_prompts_are_shared_where_that_costs_less():
    prompts, limits = Prompts(np.repeat([3, 1], 4), break_even_width=6000.0), Limits(8)
    cheapest = best_cut(equal_lengths(40, 6), limits, prompts)
    assert cheapest.shared
    assert cheapest.bounds == []
    prompts_in_order = prompts.of_completion[cheapest.order]
    assert np.count_nonzero(np.diff(prompts_in_order)) == 1
    # Attention between completions of 4,000 tokens costs more than a prompt of 400.
    assert not best_cut(equal_lengths(400, 4000), limits, prompts).shared
    all_different = Prompts(np.arange(8), 6000.0)
    assert not best_cut(equal_lengths(40, 6), limits, all_different).shared
    # Within a budget of tokens: 39 + 4 · 7 for a prompt.
    in_budget = best_cut(equal_lengths(40, 6), Limits(8, max_tokens=67), prompts)
    assert in_budget.bounds == [4]
    # Filled up to 2 · (40 + 12) tokens: two rows of 39 + 4 · 3, and not 39 + 13 + 3 · 3.
    lengths = equal_lengths(40, 2)
    lengths[0, 1] = 12
    filled = best_cut(lengths, Limits(2, fill=True), prompts)
    assert filled.shared
    assert filled.bounds == [1]


RUN = {"per_device_train_batch_size": 8, "max_staleness": 1, "num_iterations": 2, "gradient_accumulation_steps": 1}
LONG_PROMPTS = ["long " * 8 + str(number) for number in range(8)]
DATA = {"train_dataset": Dataset.from_dict({"prompt": LONG_PROMPTS})}


def micro_batches(trainer: RecordingOPO) -> list[dict]:
    return [micro_batch for step in trainer.steps for micro_batch in step.batches]


@pytest.mark.parametrize("options", [{"beta": 0.1}, {"gradient_checkpointing": True, "max_staleness": 0}], ids=str)
def test_training_is_the_same_as_in_rows(tiny_model, tmp_path, options):
    run = {**RUN, "trainer_arguments": DATA, "max_steps": 4, **options}
    rows = trained(tiny_model, tmp_path, script=Script(), plan_micro_batches=False, **run)
    shared = trained(tiny_model, tmp_path, script=Script(), **run)
    assert all("opo_source" in micro_batch for micro_batch in micro_batches(shared))
    assert not any("opo_source" in micro_batch for micro_batch in micro_batches(rows))
    end = snapshot(rows.model)
    moved = distance(end, rows.initial)
    assert moved > 1e-3
    assert distance(snapshot(shared.model), end) < EXACT * moved
    entry, expected = logged(shared)[1], logged(rows)[1]
    assert entry["opo/log_ratio/absmax"] == pytest.approx(expected["opo/log_ratio/absmax"], abs=1e-5)


@pytest.mark.parametrize("budget", [None, 100])
@pytest.mark.parametrize("length", [3, 12])
def test_the_plan_knows_the_largest_micro_batch(tiny_model, tmp_path, budget, length):
    """With short completions too, more of which have room in a budget of tokens."""
    options = {"gradient_accumulation_steps": 2, "max_steps": 2, "trainer_arguments": DATA}
    script = Script(min_length=length, max_length=length)
    trainer = trained(tiny_model, tmp_path, script=script, max_tokens_per_micro_batch=budget, **options)
    prompt, completion = _longest_tokens(trainer)
    rows = most_rows(trainer.args, prompt + completion)
    largest = 0
    for micro_batch in micro_batches(trainer):
        ids, _, _ = model_inputs(micro_batch)
        computed = micro_batch.get("opo_source", ids)
        largest = max(largest, computed.numel())
    assert largest <= rows * (prompt + completion)
    if budget is not None:
        assert largest <= budget
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
        ("mixtral", {"sliding_window": None}),
        ("gemma3_text", {"sliding_window": 4}),
        ("qwen3_next", {}),
    ],
    ids=str,
)
def test_models_that_may_compute_something_else_compute_rows(kind, fields):
    assert break_even_width(make_model(kind, **fields)) is None
