"""The order of prompts: TRL's for the data loader, and a stream for dynamic sampling."""

import pytest
from trl.trainer.utils import RepeatSampler

from opo_trl.rollout.prompts import EpochSampler, PromptStream


def test_prompts_have_the_order_of_trl():
    arguments = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2, "seed": 11}
    theirs, ours = RepeatSampler(range(10), **arguments), EpochSampler(range(10), **arguments)
    epochs = [list(theirs) for _ in range(3)]
    for epoch in (2, 0, 1):
        ours.epoch = epoch
        assert list(ours) == epochs[epoch]
    assert epochs[0] != epochs[1]
    plain = {**arguments, "shuffle": False}
    assert list(EpochSampler(range(10), **plain)) == list(RepeatSampler(range(10), **plain))


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_of_the_stream_has_every_prompt_once_in_an_order_of_its_own(shuffle):
    stream, again, other = (PromptStream(7, seed=seed, shuffle=shuffle) for seed in (3, 3, 4))
    drawn = [prompt for count in (1, 5, 3, 9, 3) for prompt in stream.draw(count)]
    epochs = [drawn[0:7], drawn[7:14], drawn[14:21]]
    assert [sorted(epoch) for epoch in epochs] == [[*range(7)]] * 3
    assert (len({*map(tuple, epochs)}) == 3) is shuffle
    again.position = 5
    assert again.draw(16) == drawn[5:]
    assert (other.draw(21) != drawn) is shuffle
