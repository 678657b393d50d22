"""The common beginning of prompts is computed once: the same gradient and the same samples."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from benchmarks import sampling, shared_beginning
from opo_trl.updates import shared_prompts


PROMPTS = [[9, 8, 7, 6, 5], [9, 8, 7, 4], [9, 8, 7, 6, 3, 2]]
P, T = 6, 4


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, **shape, initializer_range=0.3)).double()


def test_log_probabilities_and_gradient_are_those_of_separate_prompts(monkeypatch):
    model = make_model()
    add_fused_lm_head(model, outputs=("log_probs",))
    lengths = np.array([(len(prompt), n) for prompt, n in zip(PROMPTS, (4, 2, 3), strict=True) for n in (n, 1)])
    ids = torch.randint(10, 40, (len(lengths), P + T))
    for row, prompt in enumerate(prompt for prompt in PROMPTS for _ in range(2)):
        ids[row, P - len(prompt) : P] = torch.tensor(prompt)
    column = np.arange(P + T)
    mask = torch.from_numpy((column >= P - lengths[:, :1]) & (column < P + lengths[:, 1:])).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :P] = -100
    positions = mask.cumsum(1).sub(1).clamp(0)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, "position_ids": positions}
    samples = {"prompt_ids": ids[:, :P], "completion_ids": ids[:, P:]}
    samples |= shared_prompts.arrange(samples, lengths, np.repeat(np.arange(3), 2))
    tokens, found = [], []
    model.model.register_forward_pre_hook(
        lambda module, args, inputs: tokens.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    for shared in (shared_prompts._shared, shared_beginning._shared):
        monkeypatch.setattr(shared_prompts, "_shared", shared)
        model.zero_grad()
        logps = shared_prompts.model_for(model, samples)(**inputs, fused_lm_head=True)["log_probs"]
        (logps * torch.arange(logps.numel()).view_as(logps)).sum().backward()
        found.append((logps.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (logps, gradient), (own, own_gradient) = found
    assert logps.abs().max() > 1
    assert torch.allclose(own, logps, atol=1e-12)
    assert torch.allclose(own_gradient, gradient, atol=1e-9 * gradient.norm().item())
    assert tokens[1] <= tokens[0] - 2 * 3


def test_completions_are_those_of_separate_prompts():
    model = make_model()
    options = {"max_tokens": 6, "temperature": 1.0, "eos": torch.tensor([1])}
    (ids, logps), (own, own_logps) = (
        sample(model, PROMPTS * 5, **options, generator=torch.Generator().manual_seed(3))
        for sample in (sampling.sample, shared_beginning.sample)
    )
    assert torch.equal(own, ids)
    assert torch.allclose(own_logps, logps, atol=1e-12)
    assert len(ids.unique()) > 10
