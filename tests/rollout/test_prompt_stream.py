"""The order of prompts: TRL's for the data loader, and a stream for dynamic sampling."""

import random

import pytest
from trl.trainer.utils import RepeatSampler

from opo_trl.rollout.prompts import EpochSampler, PromptStream, permutations


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
def test_every_epoch_of_the_stream_has_every_prompt_once_even_if_some_are_given_back(shuffle):
    stream, draw = PromptStream(permutations(7, seed=3, shuffle=shuffle)), random.Random(0)
    used = []
    while len(used) < 5 * 7 or stream.returned:
        drawn = stream.draw(draw.randint(1, 5))
        unused = draw.sample(drawn, draw.randint(0, len(drawn) - 1)) if len(used) < 5 * 7 else []
        stream.give_back(unused)
        used += [position for position in drawn if position not in unused]
    assert sorted(used) == list(range(len(used)))
    for epoch in range(5):
        prompts = stream.prompts(list(range(7 * epoch, 7 * epoch + 7)))
        assert sorted(prompts) == list(range(7))
        assert (prompts == list(range(7))) is not shuffle


def test_order_of_the_stream_depends_on_the_seed_and_the_epoch():
    orders = [PromptStream(permutations(50, seed=seed)).prompts(list(range(100))) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:50] != orders[0][50:]
