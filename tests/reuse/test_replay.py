"""Passes over a rollout, and replay of earlier rollouts: which samples, which loss, and exact resumption."""

import pytest
import torch
from datasets import Dataset
from float64_reference import Reference, assert_step_equals
from named_tensors import relative_error
from recording_trainers import logged, make_trainer, trained, without_times
from scripted_rollouts import Script

from opo_trl.reuse.replay import ReplayBuffer


# Two optimizer steps per pass, three passes per rollout.
PASSES = {"steps_per_generation": 4, "num_iterations": 3}


def members(step) -> list[tuple[int, int]]:
    """Rollout and row of each sample of an optimizer step."""
    samples = []
    for batch in step.batches:
        samples += zip(batch["rollout"].tolist(), batch["row"].tolist(), strict=True)
    return samples


def pairs(items: list) -> list[tuple]:
    """The first two, the next two …; here, the two steps of each pass."""
    return list(zip(items[::2], items[1::2], strict=True))


# Passes


def test_each_pass_has_every_sample_once_in_other_steps(tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, max_steps=12, **PASSES)
    steps = [frozenset(members(step)) for step in trainer.steps]
    for number, (first, second) in enumerate(pairs(steps)):
        assert len(first) == len(second) == 8
        assert first | second == {(number // 3, row) for row in range(16)}
    first_steps = set(steps[::2])
    assert len(first_steps) == 6
    assert [entry["opo/pass"] for entry in logged(trainer)] == [1, 1, 2, 2, 3, 3] * 2
    # The behaviour policy stays the one that wrote the rollout.
    assert [entry["opo/off_policy_steps"] for entry in logged(trainer)] == [0, 1, 2, 3, 4, 5] * 2


def test_passes_of_one_optimizer_step_need_no_stored_log_probabilities(tiny_model, tmp_path):
    options = {"steps_per_generation": 2, "gradient_accumulation_steps": 4, "num_iterations": 2, "max_steps": 2}
    trainer = trained(tiny_model, tmp_path, **options)
    for step in trainer.steps:
        assert not any("old_per_token_logps" in batch for batch in step.batches)
    assert [entry["opo/log_ratio/absmax"] for entry in logged(trainer)] == [0, 0]
    assert [entry["opo/pass"] for entry in logged(trainer)] == [1.5, 1.5]


def test_nothing_is_kept_that_no_pass_needs(tiny_model, tmp_path):
    assert not trained(tiny_model, tmp_path)._replay.rollouts
    trainer = trained(tiny_model, tmp_path, max_steps=5, **PASSES)  # the last pass is the steps 5 and 6
    assert not trainer._replay.rollouts
    # Nor what a step has computed for each token.
    tensors = filter(torch.is_tensor, vars(trainer).values())
    assert all(tensor.ndim <= 1 for tensor in tensors)


def test_a_run_that_is_started_again_has_forgotten_how_the_first_one_ended(tiny_model, tmp_path):
    def interrupt(rollout, trainer):
        if len(trainer.rollouts) == 1:  # between the two micro-steps of the first optimizer step
            trainer._skipped.in_a_row, trainer._reward_failures.counts = 1, {"reward/errors": 1}
            trainer._metrics["train"]["reward"].append(9.0)
            raise KeyboardInterrupt

    options = {"steps_per_generation": 1, "max_sampling_rounds": 2}
    script = Script()
    trainer = make_trainer(tiny_model, tmp_path, script=script, inject=interrupt, **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer._reports
    trainer.inject = None
    script.calls.clear()
    trainer.train()
    assert (trainer._skipped.in_a_row, trainer._reward_failures.counts) == (0, {})
    first_entry, *_ = logged(trainer)
    first_entry_of_fresh_run, *_ = logged(trained(tiny_model, tmp_path, **options))
    assert without_times(first_entry) == without_times(first_entry_of_fresh_run)


# Replay


@pytest.mark.parametrize(
    "options",
    [{}, {"log_ratio_reduction": "mean", "ratio_form": "exact", "beta": 0.1}, {"ratio_form": "log"}],
    ids=str,
)
def test_gradient_of_a_replaying_pass_is_the_definition(tiny_model, tmp_path, options):
    script = Script()
    trainer = trained(
        tiny_model, tmp_path, script=script, max_steps=16, max_staleness=2, learning_rate=0.02, **PASSES, **options
    )
    reference = Reference(trainer, script)
    replayed = 0
    for number, step in enumerate(trainer.steps):
        rollout, step_of_rollout = divmod(number, 6)
        is_first_pass = step_of_rollout < 2
        expected = reference.step(number)
        assert_step_equals(step, expected)
        stale = {rollout_of_sample for rollout_of_sample, _ in members(step)} - {rollout}
        assert not (is_first_pass and stale)
        replayed += bool(stale)
        if stale and options == {"ratio_form": "log"}:  # the default's ratio is no weight of its own
            weights = dict(zip(expected.rows, expected.weights, strict=True))
            unweighted = reference.step(number, row_weight=lambda *sample, own=weights: 1 / own[sample])
            assert relative_error(step.gradient, unweighted.gradient) > 0.01, "the weights did not matter"
            assert len({round(weight, 6) for weight in expected.weights}) > 2
    assert replayed > 3


def test_a_loss_per_token_counts_the_tokens_of_the_drawn_samples(tiny_model, tmp_path):
    options = {"objective": "dapo", "max_steps": 12, "max_staleness": 1, **PASSES}
    steps = trained(tiny_model, tmp_path, **options).steps
    counted = []
    for first, second in pairs(steps):
        batches = first.batches + second.batches
        n_tokens = 0
        for batch in batches:
            n_tokens += int(batch["completion_mask"].sum())
        for batch in batches:
            assert (batch["opo_scale"] * n_tokens).tolist() == pytest.approx([16] * len(batch["opo_scale"]), abs=5e-4)
        counted.append(n_tokens)
    counted_in_later_passes = set(counted[3:])
    assert len(counted_in_later_passes) > 1, "the passes have to draw other samples"


def rollout(number: int, n: int, width: int = 3) -> dict:
    places = torch.arange(n)
    ids = 100 * number + places
    completion_ids = ids[:, None].repeat(1, width + number)
    return {
        "prompt_ids": ids[:, None].repeat(1, width),
        "completion_ids": completion_ids,
        "candidates": torch.stack([completion_ids, completion_ids], dim=2),  # a subclass's own entry
        "advantages": torch.zeros(n),
        "place": places,
        "of": torch.full((n,), number),
        "names": [f"{number} {i}" for i in range(n)],
    }


def buffer(useful=((1, 1, 1, 1),) * 3, process: int = 0, processes: int = 1) -> ReplayBuffer:
    """Rollouts of 4 groups of 2, of which some are useful; of these the part of a process."""
    replay = ReplayBuffer(max_staleness=2, num_generations=2, seed=0, process=process)
    n_local = 8 // processes
    local = slice(process * n_local, (process + 1) * n_local)
    for number, flags in enumerate(useful):
        advantages = []
        for flag in flags:
            advantages += [-1.0, 1.0] if flag else [0.5, 0.5]
        part = {name: values[local] for name, values in rollout(number, 8).items()}
        replay.add(part, torch.tensor(advantages))
    return replay


def test_a_pass_draws_whole_useful_groups_in_their_places():
    useful = [(1, 0, 1, 0), (1, 1, 0, 0), (0, 1, 1, 0), (1, 0, 1, 0)]
    drawn = [buffer(useful=useful).rows_of_pass(3, passed) for passed in range(1, 200)]
    for rows in drawn:
        assert rows["place"].tolist() == list(range(8))
        rollout_of_group, rollout_of_other = rows["of"].view(4, 2).unbind(dim=1)
        assert rollout_of_group.equal(rollout_of_other)
        assert rows["names"] == [f"{number} {place}" for place, number in enumerate(rows["of"].tolist())]
        first_ids = rows["completion_ids"][:, 0]
        assert first_ids.equal(100 * rows["of"] + rows["place"])
        assert rows["candidates"][:, :, 1].equal(rows["completion_ids"])
    rollouts_of_groups = torch.stack([rows["of"][::2] for rows in drawn], dim=1)
    # Rollout 0 is too old; a place without a useful group is served by the current rollout.
    assert list(map(set, rollouts_of_groups.tolist())) == [{1, 3}, {1, 2}, {2, 3}, {3}]


def test_draws_are_others_for_each_rollout_and_seed():
    def drawn(rollout: int, seed: int) -> list[list[int]]:
        """From which rollouts the first eight replaying passes take their completions."""
        replay = buffer()
        replay.seed = seed
        return [replay.rows_of_pass(rollout, passed)["of"].tolist() for passed in range(1, 9)]

    assert drawn(3, 0) == drawn(3, 0)
    assert drawn(3, 0) != drawn(4, 0)
    assert drawn(3, 0) != drawn(3, 1)


def test_processes_draw_their_parts_of_one_pass():
    useful = [(1, 0, 1, 0), (1, 1, 0, 0), (0, 1, 1, 0), (1, 0, 1, 0)]
    for passed in range(1, 20):
        whole = buffer(useful).rows_of_pass(3, passed)
        parts = [buffer(useful, process, processes=2).rows_of_pass(3, passed) for process in range(2)]
        for name in ("of", "place", "advantages"):
            assert torch.cat([part[name] for part in parts]).equal(whole[name])


def test_completions_that_do_not_count_do_not_make_a_group_useful(tiny_model, tmp_path):
    # In the first group the others are alike, in the last one all have different rewards.
    script = Script([0.1, 0.1, 0.1, None, 0.1, 0.1, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 1, 2, 3, 4], truncated=(6,))
    options = {"max_staleness": 1, "mask_truncated_completions": True, **PASSES}
    trainer = trained(tiny_model, tmp_path, script=script, **options)
    assert list(trainer._replay.useful) == [[False, False, False, True]]


def test_a_completion_that_does_not_count_leaves_the_group_of_others_useful():
    replay = ReplayBuffer(max_staleness=1, num_generations=3, seed=0, process=0)
    replay.add(rollout(0, 6), torch.tensor([torch.nan, -1.0, 1.0, 0.5, 0.5, torch.nan]))
    assert list(replay.useful) == [[True, False]]


def test_rollouts_that_cannot_be_replayed_are_rejected():
    replay = buffer()
    images = {**rollout(3, 8), "pixel_values": torch.zeros(8, 2), "num_images": [1] * 8}  # an environment's
    with pytest.raises(ValueError, match=r"max_staleness=2 cannot replay samples with num_images, pixel_values"):
        replay.add(images, torch.zeros(8))
    with_further_entry = {**rollout(3, 8), "tool_mask": torch.ones(8, 6)}
    with pytest.raises(ValueError, match="needs the same entries in every rollout"):
        replay.add(with_further_entry, torch.zeros(8))


# The budget


def test_a_run_ends_with_the_rollout_that_spends_its_completions(tiny_model, tmp_path):
    options = {"max_steps": 100, "max_completions": 48, "save_strategy": "steps", "save_steps": 50, **PASSES}
    trainer = trained(tiny_model, tmp_path, **options)  # rollouts of 16
    assert trainer.state.global_step == 18
    assert trainer.completions_generated == 48
    assert (tmp_path / "checkpoint-18").is_dir()
    resumed = make_trainer(tiny_model, tmp_path, **options)
    resumed.train(resume_from_checkpoint="last")
    assert resumed.state.global_step == 18
    assert resumed.steps == []
    further = make_trainer(tiny_model, tmp_path, **{**options, "max_completions": 50})
    further.train(resume_from_checkpoint="last")
    assert further.state.global_step == 24


def test_a_budget_ends_a_run_whose_optimizer_steps_are_not_those_of_rollouts(tiny_model, tmp_path):
    """Rollouts of two micro-steps, optimizer steps of three: the second would need a second rollout in its middle."""
    options = {"steps_per_generation": 2, "gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 9}
    trainer = trained(tiny_model, tmp_path, max_completions=8, max_steps=50, **options)
    assert trainer.state.global_step == 1
    assert trainer.completions_generated == 16  # the first one needed it
    resumed = make_trainer(tiny_model, tmp_path, max_completions=8, max_steps=50, **options)
    resumed.train(resume_from_checkpoint="last")
    assert resumed.steps == []


@pytest.mark.parametrize(("strategy", "saved"), [("steps", {5, 6}), ("epoch", {4, 6})])
def test_a_run_with_a_budget_ends_as_one_with_max_steps_does(tiny_model, tmp_path, strategy, saved):
    # Epochs of two rollouts, of two optimizer steps each.
    eval_dataset = Dataset.from_dict({"prompt": ["1"] * 4})
    trainer = trained(
        tiny_model,
        tmp_path,
        trainer_arguments={"eval_dataset": eval_dataset},
        num_train_epochs=9,
        steps_per_generation=4,
        per_device_eval_batch_size=4,
        max_steps=-1,
        max_completions=40,
        save_strategy=strategy,
        save_steps=5,
        eval_strategy=strategy,
        eval_steps=4,
    )
    assert trainer.state.global_step == trainer.state.max_steps == 6
    checkpoints = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert checkpoints == {f"checkpoint-{step}" for step in saved}
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [4, 6]


def test_a_resumed_run_completes_the_rollout_that_spent_its_budget(tiny_model, tmp_path):
    trained(tiny_model, tmp_path, max_steps=4, save_strategy="steps", **PASSES)  # of 6
    resumed = make_trainer(tiny_model, tmp_path, max_steps=50, max_completions=16, **PASSES)
    resumed.train(resume_from_checkpoint="last")
    assert resumed.state.global_step == 6


def test_a_run_resumed_with_other_micro_batches_completes_the_rollout_that_spent_its_budget(tiny_model, tmp_path):
    rows = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "steps_per_generation": 16}
    trained(tiny_model, tmp_path, max_steps=1, save_strategy="steps", **rows)  # of 2, after 8 of 16 micro-steps
    resumed = make_trainer(tiny_model, tmp_path, max_steps=50, max_completions=16, steps_per_generation=4)
    resumed.train(resume_from_checkpoint="last")
    assert resumed.state.global_step == 2
