"""
What recorded log-probabilities look like: of tokens that a random and a sure model really sample, recorded as they
should be and otherwise.
"""

import functools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from opo_trl.data.arithmetic import EMBEDDED_MODELS, make_problems
from opo_trl.reuse.recorded_logps import Finding, compare


def truncated(logits, top_p=1.0, top_k=0, min_p=0.0):
    """Logits, minus infinity for tokens that sampling leaves out."""
    probabilities = logits.softmax(-1)
    largest = probabilities.amax(-1, keepdim=True)
    keep = probabilities >= min_p * largest
    if top_k:
        smallest_of_top = logits.topk(top_k).values[..., -1:]
        keep &= logits >= smallest_of_top
    ordered, places = probabilities.sort(descending=True)
    of_more_likely = ordered.cumsum(-1) - ordered
    keep &= torch.zeros_like(keep).scatter(-1, places, of_more_likely < top_p)
    return logits.masked_fill(~keep, -torch.inf)


@functools.cache
def loaded(name: str, half: bool = False) -> SimpleNamespace:
    """A model, and 64 prompts of equal length."""
    folder = EMBEDDED_MODELS[name]
    dtype = torch.bfloat16 if half else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = [row["problem"] for row in make_problems("train", ["Level 3", "Level 4"])]
    prompts = tokenizer(problems)["input_ids"]
    usual_length = np.bincount(list(map(len, prompts))).argmax()
    prompts = [ids for ids in prompts if len(ids) == usual_length]
    return SimpleNamespace(model=model, prompts=torch.tensor(prompts[:64]), end=tokenizer.eos_token_id)


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two random models beside the sure one, which has an entropy of 0.03 nats per token."""
    loaded.cache_clear()
    for seed, name in ((0, "random"), (5, "other")):
        EMBEDDED_MODELS[name] = Path(save_tiny_model(tmp_path_factory.mktemp(name), seed))
    yield
    for name in ("random", "other"):
        del EMBEDDED_MODELS[name]


@functools.cache
@torch.no_grad()
def sampled(name: str, temperature: float = 1.0, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with completions of up to 14 tokens, `[64, P + 14]`, and which of these are there, `[64, 14]`."""
    policy = loaded(name)
    generator = torch.Generator().manual_seed(0)
    ids = policy.prompts
    is_unfinished = torch.ones(len(ids), dtype=torch.bool)
    mask = []
    for _ in range(14):
        logits = policy.model(ids).logits[:, -1] / temperature
        probabilities = truncated(logits, **settings).softmax(-1)
        next_ids = probabilities.multinomial(1, generator=generator)
        ids = torch.cat([ids, next_ids], dim=1)
        mask.append(is_unfinished)
        is_unfinished = is_unfinished & (next_ids.squeeze(1) != policy.end)
    return ids, torch.stack(mask, dim=1)


@torch.no_grad()
def scored(name: str, ids, mask, temperature: float = 1.0, half: bool = False, **settings) -> tuple[np.ndarray, ...]:
    """Log-probabilities of sampled tokens, and entropies, `[n]`."""
    width = mask.size(1)
    logits = loaded(name, half).model(ids).logits[:, -width - 1 : -1]
    logits = truncated(logits.float() / temperature, **settings)
    completions = ids[:, -width:, None]
    logps = logits.log_softmax(-1).gather(-1, completions).squeeze(-1)
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    return logps[mask].double().numpy(), entropies[mask].double().numpy()


def seen(name: str, *, by: str | None = None, at: float = 1.0, said: float = 1.0, run: float = 1.0, **settings):
    """What is found if tokens that a model has sampled `at` a temperature are recorded for another (`said`)."""
    policy = by or name
    ids, mask = sampled(policy, at, **settings)
    recorded, _ = scored(policy, ids, mask, said, **settings)
    own, entropies = scored(name, ids, mask, run)
    return compare(recorded, own, entropies, temperature=run, truncation="")


@pytest.mark.parametrize("name", ["random", "arithmetic"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("half", [False, True])
def test_those_of_the_policy_agree_also_in_bfloat16(name, temperature, half):
    ids, mask = sampled(name, temperature)
    own, entropies = scored(name, ids, mask, temperature)
    recorded, _ = scored(name, ids, mask, temperature, half)
    assert compare(recorded, own, entropies, temperature=temperature, truncation="") is None
    assert compare(own, recorded, entropies, temperature=temperature, truncation="") is None
    has_zeros = name == "arithmetic" and temperature == 0.7 and not half
    if has_zeros:
        assert 0 < np.mean(recorded == 0) < 1  # of a sure model, which has real zeros


@pytest.mark.parametrize("cuts", [{"top_p": 0.9}, {"top_p": 0.95}, {"min_p": 0.1}, {"top_k": 20}], ids=str)
@pytest.mark.parametrize(("name", "temperature"), [("random", 0.7), ("random", 1.0), ("arithmetic", 1.0)])
def test_those_of_kept_tokens_are_truncated_sampling(name, cuts, temperature):
    if name == "arithmetic" and "top_k" in cuts:  # it has 16 tokens, and hardly ever a choice between three
        cuts = {"top_k": 2}
    found = seen(name, at=temperature, said=temperature, run=temperature, **cuts)
    assert "truncated sampling keeps (`top_p`" in found.cause
    assert "below for hardly any" in found.difference
    assert "`rollouts_model`" in found.fix


@pytest.mark.parametrize("name", ["random", "arithmetic"])
@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.3])
def test_those_of_another_temperature_have_another_slope(name, temperature):
    of_run = seen(name, at=temperature, said=1.0, run=temperature)
    of_record = seen(name, at=temperature, said=temperature, run=1.0)
    for found, near, instead in ((of_run, 1.0, temperature), (of_record, temperature, 1.0)):
        cause = re.fullmatch(rf"as those at a temperature near (\S+) instead of {instead:g}", found.cause)
        assert float(cause[1]) == pytest.approx(near, rel=0.15)
        assert "or set `temperature`" in found.fix


def test_nearly_the_temperature_of_the_run_is_nothing_to_speak_of():
    assert seen("random", at=0.7, said=0.72, run=0.7) is None


@pytest.mark.parametrize("name", ["random", "arithmetic"])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_exact_zeros_are_filled_in(name, share):
    ids, mask = sampled(name)
    own, entropies = scored(name, ids, mask)
    is_filled = np.random.default_rng(0).random(len(own)) < share
    recorded = np.where(is_filled, 0.0, own)
    found = compare(recorded, own, entropies, temperature=1.0, truncation="")
    is_noticed = is_filled & (own < -0.1)
    expected = np.mean(is_noticed)
    if name == "arithmetic" and share == 0.1:
        assert found is None  # one in 200 tokens
    else:
        assert found.difference.startswith(f"are exactly 0 for {expected:.0%} of the sampled tokens")
        assert "filled in" in found.cause


@pytest.mark.parametrize(("by", "name"), [("random", "other"), ("other", "random")])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_those_of_another_model_are_fine(by, name, temperature):
    """Also of a sharp one, whose log-probabilities are nearly all above the policy's."""
    found = seen(name, by=by, at=temperature, said=temperature, run=temperature)
    assert found == Finding(found.difference, "as those of another model, or of another state of this one", "")
    assert "above the policy's for" in found.difference


def compared(differences, own, entropies) -> Finding | None:
    return compare(own + differences, own, entropies, temperature=1.0, truncation="")


def test_what_only_resembles_a_temperature_or_truncated_sampling_is_another_model():
    generator = np.random.default_rng(0)
    own = generator.normal(-4, 1, 1000)
    entropies = np.full(1000, 4.0)
    # Training has made a sure model: of a few tokens, what it has learned is on a line, and others are at one end.
    almost_zero = -generator.exponential(0.01, 2000)
    learned = generator.uniform(-8, -1, 60)
    of_sure_model = np.concatenate([almost_zero, learned])
    differences = np.concatenate([-0.9 * almost_zero, -0.65 * learned])
    uneven = np.concatenate([generator.exponential(0.05, 2000), np.full(60, 0.5)])
    assert "another model" in compared(differences, of_sure_model, uneven).cause
    # All but a few tokens, which are far off, are on a line.
    noise = generator.normal(0, 0.25, 1000)
    near = 0.3 * (own + entropies) + noise
    far = np.full(20, -18.0)
    differences = np.concatenate([near, 0.3 * (far + 4)])
    assert "another model" in compared(differences, np.concatenate([own, far]), np.full(1020, 4.0)).cause
    some_below = np.where(generator.random(1000) < 0.06, -0.2, 0.3)
    assert "another model" in compared(some_below, own, entropies).cause
    to_a_constant = -1.0 - own
    assert "another model" in compared(to_a_constant, own, entropies).cause


def test_rounding_that_is_higher_on_average_is_not_truncated_sampling():
    """As that of log-probabilities in bfloat16 for which tokens were sampled, with any number of tokens."""
    generator = np.random.default_rng(0)
    own = generator.normal(-4, 1, 100_000)
    entropies = generator.normal(4, 1, 100_000)
    in_bfloat16 = generator.normal(0.01, 0.04, 100_000)
    assert compared(in_bfloat16, own, entropies) is None
    in_float32_never_below = generator.uniform(0, 1e-4, 100_000)
    assert compared(in_float32_never_below, own, entropies) is None


def test_zeros_of_a_sure_model_are_not_filled_in():
    """It has some 0, and many more that are almost 0; nearly all are above those of a policy that is not sure."""
    ids, mask = sampled("random", 0.02)
    recorded, _ = scored("random", ids, mask, 0.02)
    own, entropies = scored("other", ids, mask)
    assert np.mean(recorded == 0) > 0.01
    found = compare(recorded, own, entropies, temperature=1.0, truncation="")
    assert "another model" in found.cause


def test_settings_of_sampling_are_named():
    ids, mask = sampled("random", top_p=0.9)
    own, entropies = scored("random", ids, mask)
    recorded, _ = scored("random", ids, mask, top_p=0.9)
    of_policy = compare(recorded, own, entropies, temperature=1.0, truncation="top_p=0.9")
    assert "keeps (top_p=0.9)" in of_policy.cause
    other, entropies = scored("other", ids, mask)
    of_another = compare(recorded, other, entropies, temperature=1.0, truncation="top_p=0.9")
    assert "another model with top_p=0.9," in of_another.cause


@pytest.mark.parametrize("size", [0, 1, 9])
def test_few_tokens_tell_nothing(size):
    ids, mask = sampled("random")
    own, entropies = scored("other", ids, mask)
    own = own[:size]
    assert compare(own - 1, own, entropies[:size], temperature=1.0, truncation="") is None


def test_a_broken_policy_does_not_end_the_run():
    ids, mask = sampled("random")
    recorded, entropies = scored("random", ids, mask)
    own = recorded.copy()
    own[::2] = np.nan
    entropies[1] = np.inf
    assert compare(recorded, own, entropies, temperature=1.0, truncation="") is None
    assert compare(recorded, np.full_like(own, np.nan), entropies, temperature=1.0, truncation="") is None
