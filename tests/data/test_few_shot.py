"""Problems after worked lines: splits, solutions, and what counts as an answer."""

import re
import zlib

import pytest

from opo_trl.command.named_rewards import load_reward
from opo_trl.data.few_shot import LEVELS, SPLIT_SIZES, first_line_reward, make_problems
from opo_trl.data.problems import load_problems


SOLVED = {"addition": sum, "largest": max}


@pytest.mark.parametrize("level", LEVELS)
def test_every_line_is_right_and_no_numbers_occur_twice(level):
    seen = []
    for split, size in SPLIT_SIZES.items():
        rows = make_problems(split, [level])
        assert len(rows) == size
        assert len({row["problem"].rpartition("\n")[0] for row in rows}) == 1  # the worked lines
        for row in rows:
            *worked, asked = row["problem"].split("\n")
            lines = [*worked, f"{asked} {row['solution']}"]
            numbers = [[int(number) for number in re.findall(r"\d+", line)] for line in lines]
            assert len(worked) == 3
            assert all(answer == SOLVED[level](given) for *given, answer in numbers)
            seen.append(tuple(sorted(numbers[-1][:-1])))
    shown = [tuple(sorted(given)) for *given, _ in numbers[:-1]]
    assert len({*seen, *shown}) == len(seen) + 3


def test_same_problems_on_every_machine():
    assert zlib.crc32(str([make_problems(split) for split in SPLIT_SIZES]).encode()) == 4217247733
    assert make_problems("train", ["addition"])[0] == {
        "problem": "31 + 46 = 77\n58 + 27 = 85\n64 + 73 = 137\n25 + 64 =",
        "level": "addition",
        "solution": "89",
    }
    assert len(load_problems("few_shot", split="validation", levels=["largest"])) == 150


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" 89", 1.0),
        (" 89\n31 + 46", 1.0),
        ([{"role": "assistant", "content": "89"}], 1.0),
        (" 89.", 0.0),
        (" 89 = 89", 0.0),
        (" 890\n89", 0.0),
        ("\n89", 0.0),
        ("", 0.0),
    ],
)
def test_the_first_line_is_the_answer(completion, reward):
    assert first_line_reward([completion], ["89"], level=["addition"]) == [reward]
    assert load_reward("first_line_reward") is first_line_reward
