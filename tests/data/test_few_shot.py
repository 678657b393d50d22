"""Problems after worked lines: splits, solutions, and what counts as an answer."""

import re
import zlib

import pytest

from opo_trl.command.named_rewards import load_reward
from opo_trl.data.few_shot import LEVELS, SPLIT_SIZES, first_line_reward, make_problems
from opo_trl.data.problems import load_problems


SOLVED = {"addition": sum, "largest": max}


def numbers_of(line: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", line)]


@pytest.mark.parametrize("level", LEVELS)
def test_every_line_is_right_and_no_numbers_occur_twice(level):
    rows = []
    for split, size in SPLIT_SIZES.items():
        of_split = make_problems(split, [level])
        assert len(of_split) == size
        rows += of_split
    asked = set()
    worked_parts = set()
    for row in rows:
        worked, _, question = row["problem"].rpartition("\n")
        worked_parts.add(worked)
        worked_lines = worked.split("\n")
        assert len(worked_lines) == 3
        for line in (*worked_lines, f"{question} {row['solution']}"):
            *operands, answer = numbers_of(line)
            assert answer == SOLVED[level](operands)
        asked.add(tuple(sorted(operands)))
    assert len(worked_parts) == 1
    assert len(asked) == len(rows)
    for line in worked_lines:
        *operands, _ = numbers_of(line)
        assert tuple(sorted(operands)) not in asked


def test_same_problems_on_every_machine():
    splits = str([make_problems(split) for split in SPLIT_SIZES])
    assert zlib.crc32(splits.encode()) == 4217247733
    assert make_problems("train", ["addition"])[0] == {
        "problem": "31 + 46 = 77\n58 + 27 = 85\n64 + 73 = 137\n25 + 64 =",
        "level": "addition",
        "solution": "89",
    }
    loaded = load_problems("few_shot", split="validation", levels=["largest"])
    assert len(loaded) == 150


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
