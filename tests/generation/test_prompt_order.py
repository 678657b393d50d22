"""The order of prompts: TRL's for the data loader, and a stream for dynamic sampling."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset
from launched_processes import launch, logs
from recording_trainers import make_trainer, trained
from scripted_rollouts import PROMPTS, even_tokens
from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler

from opo_trl.generation.prompt_order import EpochSampler, Place, PromptStream


def test_prompts_have_the_order_of_trl():
    arguments = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2, "seed": 11}
    theirs, ours = RepeatSampler(range(10), **arguments), EpochSampler(range(10), **arguments)
    epochs = [list(theirs) for _ in range(3)]
    for epoch in (2, 0, 1):
        ours.begin(Place(epoch), skipped=0)
        assert list(ours) == epochs[epoch]
    assert epochs[0] != epochs[1]
    plain = {**arguments, "shuffle": False}
    theirs, ours = RepeatSampler(range(10), **plain), EpochSampler(range(10), **plain)
    assert list(ours) == list(theirs)


class EndsEpoch(TrainerCallback):
    """Ends the first epoch after its second step."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 2


def test_the_next_epoch_follows_one_that_a_callback_ends(tiny_model, tmp_path):
    asked: list[int] = []

    def reward(prompts, **columns):
        asked.extend(PROMPTS.index(prompt) for prompt in dict.fromkeys(prompts))
        return even_tokens(**columns)

    arguments = {"reward_funcs": reward, "rollout_func": None, "callbacks": [EndsEpoch()]}
    trained(tiny_model, tmp_path, trainer_arguments=arguments, max_steps=6)  # two prompts in a rollout, for a step
    order = RepeatSampler(range(8), mini_repeat_count=1, seed=42)
    first, second = [*order], [*order]
    assert asked == first[:4] + second


def test_a_stream_that_fills_no_rollout_is_named(tiny_model, tmp_path):
    """Transformers would end the run before its first step."""
    stream = Dataset.from_dict({"prompt": PROMPTS[:1]}).to_iterable_dataset()
    with pytest.raises(ValueError, match="needs 2 prompts for one rollout, but the dataset has fewer"):
        trained(tiny_model, tmp_path, trainer_arguments={"train_dataset": stream})


def stream_of_four_files(shuffled: bool) -> IterableDataset:
    stream = Dataset.from_dict({"prompt": PROMPTS}).to_iterable_dataset(num_shards=4)
    return stream.shuffle(seed=1) if shuffled else stream


def train_on_a_stream(model: str, folder: str, shuffled: bool) -> None:
    """Train for two epochs of a stream, and write which prompts this process has got."""
    seen: list[str] = []

    def reward(prompts, **columns):
        seen.extend(prompts)
        return even_tokens(prompts=prompts, **columns)

    arguments = {
        "train_dataset": stream_of_four_files(shuffled),
        "reward_funcs": reward,
        "rollout_func": None,
    }
    steps = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "max_steps": 2 * len(PROMPTS)}
    trainer = make_trainer(
        model,
        folder,
        per_device_train_batch_size=2,
        num_generations=4,
        shuffle_dataset=False,
        trainer_arguments=arguments,
        **steps,
    )
    trainer.train()
    Path(folder, f"{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))


@pytest.mark.parametrize("shuffled", [False, True])
def test_two_processes_share_each_group_of_a_stream_of_several_files(tiny_model, tmp_path, shuffled):
    """By default, Accelerate gives each process files of its own: a group would have several prompts."""
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path}
    assert launch(train_on_a_stream, tiny_model, str(tmp_path), shuffled, **where) == [0, 0], logs(tmp_path)
    stream = stream_of_four_files(shuffled)
    expected = []
    for epoch in range(2):
        stream.set_epoch(epoch)
        expected += [row["prompt"] for row in stream for _ in range(2)]
    assert (expected[:16] != expected[16:]) is shuffled  # each epoch of a shuffled stream has an order of its own
    for process in range(2):
        assert json.loads((tmp_path / f"{process}.json").read_text()) == expected


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_of_the_stream_has_every_prompt_once_in_an_order_of_its_own(shuffle):
    stream = PromptStream(7, seed=3, shuffle=shuffle)
    drawn = stream.draw(1) + stream.draw(5)
    state = stream.state_dict()
    rest = stream.draw(3) + stream.draw(9) + stream.draw(3)
    drawn += rest
    epochs = [drawn[0:7], drawn[7:14], drawn[14:21]]
    for epoch in epochs:
        assert sorted(epoch) == [*range(7)]
    first, second, third = epochs
    assert (first != second != third != first) is shuffle
    resumed = PromptStream(7, seed=3, shuffle=shuffle)
    resumed.load_state_dict(state)
    assert resumed.draw(15) == rest
    other = PromptStream(7, seed=4, shuffle=shuffle)
    assert (other.draw(21) != drawn) is shuffle
