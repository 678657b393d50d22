"""Token reversal: the gradients, the work that is shared, seeds side by side, and the page."""

import itertools
import json
import statistics

import pytest
import torch
from torch.func import functional_call

from benchmarks import token_reversal
from benchmarks import token_reversal_training as tr
from benchmarks.token_reversal import FIELDS


LENGTH = 3
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    monkeypatch.setattr(tr, "PROMPTS", 6)


def training(method, seeds=(0,), dtype=torch.float64):
    return tr.Training(method, FIELDS[method], LENGTH, seeds, dtype=dtype)


def log_probs(policy, params, prompts, completions):
    """Log-probability of each completion, from the whole sequence in one pass."""
    everything, _ = functional_call(policy, params, (torch.cat([prompts, completions], 1), []))
    return everything[:, LENGTH - 1 : -1].gather(-1, completions[..., None])[..., 0].sum(1)


def weights(method, rewards, old, log_ratio):
    """Minus N times the derivative of the loss with respect to each log-ratio, by hand."""
    fields, found = FIELDS[method], torch.zeros_like(rewards)
    for i in range(0, len(rewards), tr.GENERATIONS):
        group = slice(i, i + tr.GENERATIONS)
        r, p_old, delta = rewards[group], old[group].exp(), log_ratio[group]
        u = (r - r.mean()) / r.std(correction=0) if r.std() > 0 else torch.zeros_like(r)
        if method == "GRPO":
            inside = ~(((u > 0) & (delta.exp() > 1.2)) | ((u < 0) & (delta.exp() < 0.8)))
            found[group] = tr.GENERATIONS * (delta.exp() * u * inside - fields["beta"] * (1 - (-delta).exp()))
        elif method == "TPO":
            q, p = p_old * (u / fields["eta"]).exp(), p_old * delta.exp()
            found[group] = tr.GENERATIONS * (q / q.sum() - p / p.sum())
        else:
            omega = ((1 - fields["alpha"]) * u).exp()
            found[group] = omega / omega.mean() - 1 - fields["mu"] * delta
    return found


@pytest.mark.parametrize("method", tr.OBJECTIVES)
@pytest.mark.parametrize("moved", [False, True])
def test_gradient_is_the_formula_on_every_completion(method, moved):
    run = training(method)
    for _ in range(3):  # a policy with some right answers
        run.episode()
    rollout, kept, error = run.rollout()
    prompts, completions, owner, place, old = rollout
    assert 0 < error < 1
    if moved:  # off the policy that sampled, beyond the clip range
        run.params = {n: p + 0.05 * torch.randn_like(p) for n, p in run.params.items()}
    params = {n: p[0].clone().requires_grad_() for n, p in run.params.items()}
    prompts, completions = prompts[0][owner[0]][place[0]], completions[0][place[0]]
    assert len(prompts) == tr.PROMPTS * tr.GENERATIONS > len(owner[0])
    logps = log_probs(run._policy, params, prompts, completions)
    rewards = (prompts.flip(1) == completions).all(1).double()
    assert 1 - rewards.mean() == error
    old = old[0].sum(1)
    by_hand = weights(method, rewards, old, logps.detach() - old)
    assert moved or torch.allclose(old, logps)  # sampled from these very probabilities
    (-(by_hand * logps).mean()).backward()
    gradient = run._gradient(run.params, rollout, kept)
    for name, parameter in params.items():
        torch.testing.assert_close(gradient[name][0], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", tr.OBJECTIVES)
def test_seeds_side_by_side_are_the_seeds_alone(method):
    together = training(method, seeds=(0, 1, 2))
    alone = [training(method, seeds=(seed,)) for seed in (0, 1, 2)]
    for _ in range(2):
        errors = together.episode()
        assert errors.tolist() == [run.episode().item() for run in alone]
    for name, values in together.params.items():
        # The scores of a query all change alike with a key's bias: its gradient is rounding, and Muon scales it up.
        if not name.endswith("_k_bias"):
            torch.testing.assert_close(values, torch.cat([run.params[name] for run in alone]), rtol=1e-7, atol=1e-9)


def test_distinct_keys_are_named_once():
    keys = torch.tensor([[5, 3, 5, 5, 9], [1, 1, 1, 1, 1]])
    positions, place = tr.distinct(keys)
    assert positions.shape == (2, 3)
    assert torch.equal(tr.take(tr.take(keys, positions), place), keys)
    assert sorted(keys[0, positions[0]].tolist()) == [3, 5, 9]


def test_samples_follow_the_policy():
    run = training("TPO", seeds=range(150))
    run.params = {n: p[:1].expand_as(p) for n, p in run.params.items()}  # one policy
    prompts, completions, owner, place, _ = run.rollout()[0]
    prompts = tr.take(tr.take(prompts, owner), place).flatten(0, 1)
    completions = tr.take(completions, place).flatten(0, 1)
    prompt = torch.tensor([0, 1, 1])
    mine = completions[(prompts == prompt).all(1)]
    one = {n: p[0] for n, p in run.params.items()}
    for bits in itertools.product((0, 1), repeat=LENGTH):
        completion = torch.tensor(bits)
        expected = log_probs(run._policy, one, prompt[None], completion[None]).exp().item()
        share = (mine == completion).all(1).double().mean().item()
        assert abs(share - expected) < 4 * (expected * (1 - expected) / len(mine)) ** 0.5


def test_muon_takes_optax_steps():
    """Two steps by hand: Nesterov momentum with its bias corrected, five Newton–Schulz steps in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (1, 8, 4), "x_kernel": (1, 4, 4)}
    params = {n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items()}
    optimizer = tr.Muon(params, rate=1.0)
    g, h = ({n: torch.randn(s, dtype=torch.float64, generator=generator) for n, s in shapes.items()} for _ in "gh")
    optimizer.step(g)
    after_one = {n: p.clone() for n, p in params.items()}
    optimizer.step(h)
    u, s, v = torch.linalg.svd(
        0.95 * (0.05 * 0.95 * g["w"] + 0.05 * h["w"]) / (1 - 0.95**3) + 0.05 * h["w"] / (1 - 0.95**2),
        full_matrices=False,
    )
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(after_one["w"] - params["w"], u @ torch.diag_embed(s) @ v)
    first = 0.9 * (0.1 * 0.9 * g["x_kernel"] + 0.1 * h["x_kernel"]) / (1 - 0.9**3) + 0.1 * h["x_kernel"] / (1 - 0.9**2)
    second = (0.001 * 0.999 * g["x_kernel"] ** 2 + 0.001 * h["x_kernel"] ** 2) / (1 - 0.999**2)
    torch.testing.assert_close(after_one["x_kernel"] - params["x_kernel"], first / (second.sqrt() + 1e-8))


# The record and the page


def test_only_missing_seeds_are_trained(monkeypatch, tmp_path):
    monkeypatch.setattr(token_reversal, "RECORD", tmp_path / "record.json")
    cell = {"method": "TPO", "fields": FIELDS["TPO"], "length": LENGTH, "episodes": 20, "seeds": [0]}
    token_reversal.run_missing([cell], "cpu")
    before = json.loads(token_reversal.RECORD.read_text())
    token_reversal.run_missing([cell, {**cell, "seeds": [0, 1]}], "cpu")
    after = json.loads(token_reversal.RECORD.read_text())
    assert after[:1] == before
    assert [run["seeds"] for run in after] == [[0], [1]]
    both = token_reversal.merged(after)
    assert [(run["seeds"], len(run["final"]), len(run["curve"])) for run in both] == [([0, 1], 2, 2)]


def test_page_is_made_from_the_record():
    runs = json.loads(token_reversal.RECORD.read_text())
    assert token_reversal.RECORD.with_suffix(".md").read_text() == token_reversal.report(runs)


def test_opo_has_the_fields_of_its_best_trial_and_the_others_the_published_ones():
    runs = json.loads(token_reversal.RECORD.read_text())
    trials = [run for run in runs if run["seeds"][0] >= token_reversal.TRIAL_SEEDS]
    assert {run["method"]: run["fields"] for run in trials}.keys() == FIELDS.keys()
    for method, fields in token_reversal.TRIALS.items():
        tried = [run for run in trials if run["method"] == method]
        assert [run["fields"] for run in tried] == fields
    best = min(tried, key=lambda run: statistics.fmean(token_reversal.over_episodes(run)))
    assert {**{name: tried[0] for name, tried in token_reversal.TRIALS.items()}, "OPO": best["fields"]} == FIELDS
    assert not {seed for run in trials for seed in run["seeds"]} & {
        s for r in runs if r not in trials for s in r["seeds"]
    }
