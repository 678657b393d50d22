"""An objective of one's own, named by `objective:`, and objectives in a loop of one's own, without a trainer."""

import json
import re
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import ClassVar, Literal

import pytest
import torch
import yaml
from device_fields import SMALL
from float64_reference import Reference, assert_step_equals
from named_tensors import relative_error
from recording_trainers import Recording, make_trainer, trained
from scripted_rollouts import Script, even_tokens
from test_docs import code

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.checks.files import read_json
from opo_trl.command.train import main
from opo_trl.objective import Objective
from opo_trl.objectives import objective_named


NAME = "added_objective.Cautious"


REUSE = {"steps_per_generation": 4, "num_iterations": 2, "max_staleness": 1, "learning_rate": 0.02}


@pytest.mark.parametrize(("options", "factor"), [(None, 0.5), ({"factor": 2}, 2.0)])
def test_gradient_is_that_of_its_formula_with_its_options(tiny_model, tmp_path, options, factor):
    script = Script()
    recorder = type("Recorded", (Recording, OPOTrainer), {})
    fields = {**REUSE, "objective": NAME, "objective_options": options, "max_steps": 8}
    trainer = trained(tiny_model, tmp_path, script=script, trainer_class=recorder, **fields)
    reference = Reference(trainer, script)

    def weight(rollout, row):
        return factor if reference.drive(rollout).target[row] < 0 else 1.0

    for k, record in enumerate(trainer.steps):
        assert_step_equals(record, reference.step(k, row_weight=weight))
    assert relative_error(trainer.steps[0].gradient, reference.step(0).gradient) > 0.1


# Options


class Typed(Objective):
    """What counts as an option, by its type and value."""

    clip: float = 0.4
    rounds: int = 1
    kind: Literal["soft", "hard"] = "soft"
    bounds: list[float] = [0.0, 1.0]  # noqa: RUF012
    note: str | None = None
    _cache: dict = {}  # noqa: RUF012
    later: torch.Tensor  # without a value
    always: ClassVar[int] = 3
    is_regression: bool = True  # of every objective


TYPED = f"{Path(__file__).stem}.Typed"


def config(**fields) -> OPOConfig:
    return OPOConfig("unused", use_cpu=True, bf16=False, **fields)


def test_options_are_public_attributes_with_a_type_and_a_value():
    defaults = {"bounds": [0.0, 1.0], "clip": 0.4, "kind": "soft", "note": None, "rounds": 1}
    args = config(objective=TYPED)
    assert args.objective_options == defaults
    args.objective_options["bounds"].append(2.0)
    assert Typed.bounds == [0.0, 1.0]
    some = config(objective=TYPED, objective_options={"clip": 1, "kind": "hard", "note": "x", "rounds": 2.0})
    assert some.objective_options == {**defaults, "clip": 1.0, "kind": "hard", "note": "x", "rounds": 2}
    assert type(some.objective_options["clip"]) is float
    assert objective_named(TYPED)(some).clip == 1.0
    again = config(objective=TYPED, objective_options=some.to_dict()["objective_options"])
    assert again.objective_options == some.objective_options
    assert config(objective=TYPED, objective_options="{kind: hard}").objective_options["kind"] == "hard"
    assert config(objective=TYPED, objective_options="{clip: 1e-4}").objective_options["clip"] == 1e-4
    assert config().objective_options is None


class Named(Objective):
    """An option with the name of a property of every objective."""

    reduction: str = "mean"


def test_option_cannot_have_the_name_of_a_property():
    with pytest.raises(ValueError, match=r"`Named\.reduction` has a type.*replaces `Objective\.reduction`\. Rename"):
        config(objective=f"{Path(__file__).stem}.Named")


@pytest.mark.parametrize(
    ("objective", "options", "message"),
    [
        ("grpo", {"clip": 1}, "has no effect: this objective has no options. Remove `objective_options`."),
        (TYPED, {"clop": 1}, "sets clop, but its options are bounds, clip, kind, note, rounds. Use one of these."),
        (NAME, {"factor": -1.0}, "factor=-1.0 is not allowed. Set `factor` to a positive finite number."),
        (NAME, {"factor": "1"}, "factor='1' is not allowed. Set `factor` to a positive finite number."),
        (TYPED, {"clip": "1"}, "clip='1' is not allowed. Set `clip` to a number."),
        (TYPED, {"rounds": 1.5}, "rounds=1.5 is not allowed. Set `rounds` to an integer."),
        (TYPED, {"kind": "firm"}, "kind='firm' is not allowed. Set `kind` to one of soft, hard."),
        (TYPED, {"bounds": 3}, "bounds=3 is not allowed. Set `bounds` to a value of type list[float]."),
        (TYPED, {"note": 3}, "note=3 is not allowed. Set `note` to a value of type str | None."),
    ],
)
def test_what_is_no_option_is_named(objective, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        config(objective=objective, objective_options=options)
    assert str(error.value).startswith(f"objective_options={options!r} with objective={objective!r}")


@pytest.mark.parametrize("options", [[1], "{"])
def test_options_are_a_mapping(options):
    with pytest.raises(
        ValueError, match=r"^objective_options=.* is not allowed\. Set `objective_options` to a mapping"
    ):
        config(objective=NAME, objective_options=options)


def test_resumed_run_keeps_its_options_within_a_rollout(tiny_model, tmp_path, caplog):
    fields = {**REUSE, "objective": NAME, "max_staleness": 0, "save_strategy": "steps", "save_steps": 1}
    trained(tiny_model, tmp_path, **fields, max_steps=4)
    other = {**fields, "save_strategy": "no", "objective_options": {"factor": 0.9}}
    trainer = make_trainer(tiny_model, tmp_path, **other, max_steps=5)
    named = r"objective_options=\{'factor': 0\.5\}, but this run has objective_options=\{'factor': 0\.9\}"
    with pytest.raises(ValueError, match=rf"in the middle of a rollout, and goes on with {named}"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert "The run goes on with objective_options={'factor': 0.9} in place of" in caplog.text


def test_recipe_sets_options_and_a_run_keeps_them(tiny_model, tmp_path, capsys):
    problems = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"{i} + {i} ="} for i in range(16)]
    problems.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    folder = tmp_path / "run"
    fields = {**SMALL, "model_name_or_path": tiny_model, "dataset_name": str(problems), "output_dir": str(folder)}
    fields |= {
        "reward_funcs": ["scripted_rollouts.even_tokens"],
        "objective": NAME,
        "objective_options": {"factor": 0.25},
    }
    fields |= {"max_completion_length": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    fields |= {"num_generations": 4, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(fields))
    assert main([str(recipe)]) == 0
    assert read_json(folder / "settings.json")["objective_options"] == {"factor": 0.25}
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["objective_options"] == {"factor": 0.25}
    assert "Cautious, factor = 0.25, " in (folder / "plan.txt").read_text()
    capsys.readouterr()
    more = ["--max_steps", "2", "--resume_from_checkpoint", "last"]
    assert main([str(recipe), *more, "--objective_options", "{factor: 0.5}"]) == 2
    assert (
        "objective_options={'factor': 0.25} there, objective_options={'factor': 0.5} here" in capsys.readouterr().err
    )
    assert main([str(recipe), *more]) == 0


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
            clipped = ratio.clamp(0.8, 1.2)
            of_tokens = -torch.min(ratio * advantage, clipped * advantage)
            losses.append(of_tokens.mean())
            continue
        weight = moved.sum().exp().clamp(max=2).detach()
        pull_back = 0.3 * (weight - 1)
        loss = weight * (pull_back - drive) * moved.sum()
        losses.append(0.5 * loss if name == NAME and drive < 0 else loss)
    mean_length = group.mask.sum(dim=1).double().mean()
    scale = 1 if name == "grpo" else 1 / mean_length
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
