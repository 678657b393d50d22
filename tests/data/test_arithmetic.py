"""
The arithmetic task and its stored base model: problems, reward, tokenizer, and the accuracy in `ACCURACY.json`.

    pytest tests/data/test_arithmetic.py
"""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models.arithmetic_base import measure
from opo_trl.data.arithmetic import LEVELS, arithmetic_reward, base_model_path, make_problems


CHAIN = "85-16=69"  # worked solution of 47+38-16=


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(base_model_path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(base_model_path(), dtype=torch.float32)


# Problems


@pytest.mark.parametrize(("split", "size"), [("train", 2048), ("test", 1000)])
def test_every_level_has_its_number_of_distinct_problems(split, size):
    for level in LEVELS:
        rows = make_problems(split, [level])
        distinct = {row["problem"] for row in rows}
        assert len(distinct) == len(rows) == size
        assert {row["level"] for row in rows} == {level}


def test_same_problems_on_every_call_whatever_the_state_of_the_random_generator():
    random.seed(1)
    first = make_problems("train")
    random.seed(2)
    assert make_problems("train") == first
    # Pins the stream: the stored model was trained without these test problems.
    assert first[2048]["problem"] == "14+28-19="
    first_test_problem, *_ = make_problems("test", ["Level 3"])
    assert first_test_problem["problem"] == "12+23-21+30="


def test_splits_share_no_problem():
    train = {row["problem"] for row in make_problems("train")}
    test = {row["problem"] for row in make_problems("test")}
    assert train.isdisjoint(test)


def test_every_step_of_every_solution_is_right():
    for row in make_problems("train") + make_problems("test"):
        problem = row["problem"].removesuffix("=")
        value = eval(problem)
        steps = row["solution"].split("=")
        assert all(eval(step) == value for step in steps)
        assert steps[-1] == str(value)
        n_operations = len(re.findall(r"[+-]", problem))
        assert len(steps) == n_operations
        assert row["level"] == f"Level {n_operations}"


def test_unknown_level_and_split_are_rejected():
    with pytest.raises(ValueError, match="Level 6"):
        make_problems("train", ["Level 6"])
    with pytest.raises(ValueError, match="split='validation'"):
        make_problems("validation")


# Reward


@pytest.mark.parametrize("completion", [CHAIN, "69", "75-16=69", "=69", "70=69"])
def test_a_right_answer_is_rewarded_whatever_the_chain_before_it(completion):
    assert arithmetic_reward([completion], [CHAIN]) == [1.0]


@pytest.mark.parametrize(
    "completion",
    [
        "85-16=59",
        "85-16=",
        "",
        "85-16=69=70",  # two answers
        "85-16=69+",
        "85-16=69 ",
        "85-16=+69",
        "85-16=069",
        "85-16=６９",  # full-width digits
    ],
)
def test_a_wrong_or_decorated_answer_is_not_rewarded(completion):
    assert arithmetic_reward([completion], [CHAIN]) == [0.0]


# Stored model


def test_tokenizer_has_one_token_per_character_and_round_trips(tokenizer):
    for row in make_problems("test")[::50]:
        text = row["problem"] + row["solution"]
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_greedy_accuracy_is_the_claimed_one(model, tokenizer):
    claims = json.loads(Path(base_model_path(), "ACCURACY.json").read_text())
    claim = claims["Level 4"]["greedy"]
    figures = measure(model, tokenizer, make_problems("test", ["Level 4"]), do_sample=False)
    # Greedy, so only near ties may differ between machines.
    assert figures["accuracy"] == pytest.approx(claim["accuracy"], abs=0.01)
