"""An objective of one's own, named by `objective:`, and objectives in a loop of one's own, without a trainer."""

from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from helpers import Recording, Reference, Script, assert_step_equals, even_tokens, relative_error, trained
from test_docs import code

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.objectives import objective_named


NAME = "added_objective.Cautious"


def test_gradient_is_that_of_its_formula(tiny_model, tmp_path):
    script = Script()
    recorder = type("Recorded", (Recording, OPOTrainer), {})
    options = {"max_steps": 8, "steps_per_generation": 4, "num_iterations": 2, "max_staleness": 1}
    options |= {"learning_rate": 0.02, "objective": NAME}
    trainer = trained(tiny_model, tmp_path, script=script, trainer_class=recorder, **options)
    reference = Reference(trainer, script)

    def half_if_pushed_down(rollout, row):
        return 0.5 if reference.drive(rollout).target[row] < 0 else 1.0

    for k, record in enumerate(trainer.steps):
        assert_step_equals(record, reference.step(k, row_weight=half_if_pushed_down))
    assert relative_error(trainer.steps[0].gradient, reference.step(0).gradient) > 0.1


# Without a trainer: the loop of docs/objectives.md, with a table of logits as the policy

GROUP, LENGTH, WORDS = 8, 6, 10
GROUPS, OUTDATED = 160, 8  # completions are written by a policy up to seven steps old


class Loop:
    """What the page's loop calls. Keeps each group with the policy before its step, and its gradient."""

    def __init__(self):
        self.logits = torch.zeros(LENGTH, WORDS, requires_grad=True)
        self.sgd = torch.optim.SGD([self.logits], lr=8.0)
        self.steps = []

    def policy(self, tokens, logits=None):
        logps = (self.logits if logits is None else logits).log_softmax(dim=1)
        return logps[torch.arange(LENGTH), tokens]

    def scored_groups(self):
        random = torch.Generator().manual_seed(0)
        for number in range(GROUPS):
            if number % OUTDATED == 0:
                writer = self.logits.detach().clone()
            words = torch.multinomial(writer.softmax(dim=1), GROUP, replacement=True, generator=random)
            tokens, lengths = words.T, torch.randint(2, LENGTH + 1, (GROUP, 1), generator=random)
            mask = torch.arange(LENGTH) < lengths
            rewards = even_tokens([row[own].tolist() for row, own in zip(tokens, mask, strict=True)])
            group = SimpleNamespace(tokens=tokens, mask=mask, anchor=self.policy(tokens, writer))
            group.rewards = torch.tensor(rewards)
            self.steps.append(group)
            yield tokens, mask, group.anchor, group.rewards

    def step(self):  # of the optimizer
        self.steps[-1].logits = self.logits.detach().clone()
        self.steps[-1].gradient = self.logits.grad.clone()
        self.sgd.step()

    def zero_grad(self):
        self.sgd.zero_grad()


def run(name: str) -> Loop:
    """The loop of the page, with another objective in place of its own."""
    text = code("objectives.md", "python").split("from opo_trl import OPOConfig\n")[1]
    made = 'OPO(OPOConfig("unused", '
    assert text.count(made) == 1
    text = text.replace(made, f"objective_named({name!r})(OPOConfig('unused', objective={name!r}, ")
    loop = Loop()
    known = {"OPOConfig": OPOConfig, "objective_named": objective_named}
    known |= {"policy": loop.policy, "scored_groups": loop.scored_groups, "optimizer": loop}
    exec(compile(text, "objectives.md", "exec"), known)
    return loop


def loss_by_hand(name: str, logps: torch.Tensor, group: SimpleNamespace) -> torch.Tensor:
    """Mean loss of a group's completions from the definitions, of log-probabilities `[G, T]` in float64."""
    rewards = group.rewards.double()
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    drives = GROUP * (0.6 * advantages).softmax(dim=0) - 1
    losses = []
    for row, anchor, own, advantage, drive in zip(logps, group.anchor, group.mask, advantages, drives, strict=True):
        moved = (row - anchor)[own]
        if name == "grpo":
            ratio = moved.exp()
            losses.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean())
            continue
        weight = moved.sum().exp().clamp(max=2).detach()
        loss = weight * (-drive + 0.3 * (weight - 1)) * moved.sum()
        losses.append(0.5 * loss if name == NAME and drive < 0 else loss)
    scale = 1 if name == "grpo" else 1 / group.mask.sum(dim=1).double().mean()
    return scale * torch.stack(losses).mean()


@pytest.mark.parametrize("name", ["opo", "grpo", NAME])
def test_objective_trains_in_a_loop_without_a_trainer(name):
    loop = run(name)
    for group in loop.steps:
        logits = group.logits.double().requires_grad_()
        loss_by_hand(name, loop.policy(group.tokens, logits), group).backward()
        torch.testing.assert_close(group.gradient.double(), logits.grad, rtol=1e-4, atol=1e-6)
    # The policy has moved so far that weights are at their bound, and ratios out of their range.
    moved = [(loop.policy(group.tokens, group.logits) - group.anchor) * group.mask for group in loop.steps]
    assert torch.cat(moved).sum(dim=1).exp().max() > 2
    rewards = [group.rewards.mean().item() for group in loop.steps]
    assert fmean(rewards[:8]) < 0.6
    assert fmean(rewards[-8:]) > 0.9
