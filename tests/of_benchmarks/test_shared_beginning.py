"""The common beginning of prompts is computed once: the same gradient and the same samples."""

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from benchmarks.losses import sampling, shared_beginning
from opo_trl.updates import shared_prompts


PROMPTS = [[9, 8, 7, 6, 5], [9, 8, 7, 4], [9, 8, 7, 6, 3, 2]]
P = 6
T = 4


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=40, **shape, initializer_range=0.3)
    return LlamaForCausalLM(config).double()


def make_batch():
    """Two completions of each prompt, of which the second has one token; prompts are padded to P, completions to T."""
    lengths = np.array([(5, 4), (5, 1), (4, 2), (4, 1), (6, 3), (6, 1)])
    prompt_lengths, completion_lengths = np.hsplit(lengths, 2)
    ids = torch.randint(10, 40, (len(lengths), P + T))
    for i, prompt in enumerate(PROMPTS):
        of_prompt = ids[2 * i : 2 * i + 2]
        of_prompt[:, P - len(prompt) : P] = torch.tensor(prompt)
    positions = np.arange(P + T)
    is_token = (positions >= P - prompt_lengths) & (positions < P + completion_lengths)
    mask = torch.from_numpy(is_token).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :P] = -100
    position_ids = mask.cumsum(1).sub(1).clamp(0)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, "position_ids": position_ids}
    samples = {"prompt_ids": ids[:, :P], "completion_ids": ids[:, P:]}
    prompts = np.repeat(np.arange(3), 2)
    samples |= shared_prompts.arrange(samples, lengths, prompts)
    return inputs, samples


def gradient_of(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    return parameters_to_vector(gradients)


def test_log_probabilities_and_gradient_are_those_of_separate_prompts(monkeypatch):
    model = make_model()
    add_fused_lm_head(model, outputs=("log_probs",))
    inputs, samples = make_batch()
    token_counts = []

    def count_tokens(module, args, inputs):
        token_counts.append(inputs["input_ids"].numel())

    model.model.register_forward_pre_hook(count_tokens, with_kwargs=True)
    results = []
    for shared in (shared_prompts.shared_pass, shared_beginning.shared_pass):
        monkeypatch.setattr(shared_prompts, "shared_pass", shared)
        model.zero_grad()
        sharing_model = shared_prompts.model_for(model, samples)
        logps = sharing_model(**inputs, fused_lm_head=True)["log_probs"]
        weights = torch.arange(logps.numel()).view_as(logps)
        (logps * weights).sum().backward()
        results.append((logps.detach(), gradient_of(model)))
    (expected_logps, expected_gradient), (logps, gradient) = results
    assert expected_logps.abs().max() > 1
    assert torch.allclose(logps, expected_logps, atol=1e-12)
    tolerance = 1e-9 * expected_gradient.norm().item()
    assert torch.allclose(gradient, expected_gradient, atol=tolerance)
    separate_prompts, common_beginning = token_counts
    assert common_beginning <= separate_prompts - 2 * 3


def completions_of(sample, prompts, temperature=1.0):
    options = {"max_tokens": 6, "temperature": temperature, "eos": torch.tensor([1])}
    generator = torch.Generator().manual_seed(3)
    return sample(make_model(), prompts, **options, generator=generator)


@pytest.mark.parametrize("prompts", [PROMPTS * 5, [prompt for prompt in PROMPTS for _ in range(5)]])
def test_completions_are_those_of_separate_prompts(prompts):
    expected_ids, expected_logps = completions_of(sampling.sample, prompts)
    ids, logps = completions_of(shared_beginning.sample, prompts)
    assert torch.equal(ids, expected_ids)
    assert torch.allclose(logps, expected_logps, atol=1e-12)
    assert len(expected_ids.unique()) > 10


def test_completions_have_the_temperatures_in_turn():
    twice = [prompt for prompt in PROMPTS for _ in range(2)]
    ids, _ = completions_of(shared_beginning.sample, twice * 4, [1.0, 1e-6])
    greedy, _ = completions_of(sampling.sample, PROMPTS * 4, 1e-6)
    assert torch.equal(ids[1::2], greedy)
    assert (ids[::2] != greedy).any(dim=1).sum() > 6
