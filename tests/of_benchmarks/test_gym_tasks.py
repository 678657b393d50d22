"""
The tasks of reasoning-gym: problems, rewards, and the mistakes that the base models learn from.
"""

import dataclasses
import json
import random
import zlib
from itertools import islice, pairwise
from statistics import mean

import pytest


pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install 'opo_trl[gym]'")

from benchmarks import gym_tasks
from benchmarks.gym_tasks import (
    SEED,
    SPLIT_SIZES,
    TASKS,
    ab_reward,
    draw_entries,
    draw_examples,
    make_problems,
    palindrome_reward,
    write_problems,
)
from opo_trl.data.problems import load_problems
from opo_trl.launch.rewards import load_reward


REWARDS = {"ab": "ab_reward", "ab_long": "ab_reward", "palindrome_generation": "palindrome_reward"}
DRAWN = {"ab": 3183618740, "ab_long": 3708644622, "palindrome_generation": 2808049297}  # checksums of the problems


@pytest.fixture(scope="module", params=TASKS)
def task(request):
    return TASKS[request.param]


@pytest.fixture(scope="module")
def problems(task):
    return make_problems(task)


def reduce_program(symbols: str) -> str:
    """The final state of an A::B program, rewritten at the last possible place: the order of steps is free."""
    program = symbols.split()
    for index in reversed(range(len(program) - 1)):
        left, right = program[index : index + 2]
        if left[1] == right[0] == "#":
            between = [] if left[0] == right[1] else [right, left]
            return reduce_program(" ".join([*program[:index], *between, *program[index + 2 :]]))
    return " ".join(program)


def is_right(task, problem: str, completion: str) -> bool:
    """Whether a completion is right, stated independently of the package."""
    if task.source == "ab":
        return completion.rpartition("> ")[2].strip() == reduce_program(problem.removesuffix("> "))
    return completion == completion[::-1] and sorted(completion) == sorted(problem.removesuffix("="))


# Problems


def test_splits_share_no_problem_and_no_answer(task, problems):
    keys = [task.key(entry) for entry in draw_entries(task, sum(SPLIT_SIZES.values()))]
    assert len(set(keys)) == len(keys)
    train, test = ({row["problem"] for row in problems[split]} for split in ("train", "test"))
    assert (len(train), len(test)) == (SPLIT_SIZES["train"], SPLIT_SIZES["test"])
    assert not train & test


def test_same_problems_on_every_call_whatever_the_state_of_the_random_generator(task, problems):
    random.seed(1)
    assert make_problems(task) == problems
    # Another release of reasoning-gym may draw others; results of the two are not comparable.
    assert zlib.crc32(json.dumps(problems).encode()) == DRAWN[task.name]


def test_written_problems_load_as_the_dataset_of_a_recipe(task, problems, tmp_path):
    write_problems(problems, tmp_path)
    for split, rows in problems.items():
        loaded = load_problems(str(tmp_path), split=split, levels=[task.name])
        assert [{name: row[name] for name in rows[0]} for row in loaded] == rows


def test_problem_states_all_that_the_question_asks(task, problems):
    for row, entry in zip(problems["test"], draw_entries(task, 50), strict=False):
        assert is_right(task, row["problem"], entry["answer"])


# Rewards


@pytest.mark.parametrize("slips", [None, random.Random(0)], ids=["right", "slipping"])
def test_reward_agrees_with_an_independent_check_and_with_the_packages_scorer(task, problems, slips):
    reward = load_reward(f"benchmarks.gym_tasks.{REWARDS[task.name]}")
    entries = draw_entries(task, 300)
    completions = [task.work_out(entry, slips) for entry in entries]
    rewards = reward(completions, [row["solution"] for row in problems["test"][:300]])
    assert rewards == [float(is_right(task, task.problem(e), c)) for e, c in zip(entries, completions, strict=True)]
    scorer = task.dataset(SEED)
    scores = [scorer.score_answer(task.answer(c), e) for e, c in zip(entries, completions, strict=True)]
    assert rewards == [float(score == 1) for score in scores]
    assert 0.3 < sum(rewards) / 300 < 0.7 if slips else all(rewards)


AB_SOLUTION = "#A B# #B > #A "


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (AB_SOLUTION, 1.0),
        ("#A ", 1.0),
        ([{"role": "assistant", "content": "B# > #A "}], 1.0),
        ("#A > #A B# #B ", 0.0),
        ("#A B# #B > A# ", 0.0),
        ("#A B# #B > #A #A ", 0.0),
        ("#A B# #B > #A > ", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_program_is_the_answer(completion, reward):
    assert ab_reward([completion], [AB_SOLUTION], level=["ab"]) == [reward]


def test_a_program_that_vanishes_has_an_empty_answer():
    assert ab_reward(["A# #A > ", "A# #A "], ["B# #B > "] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("abcba", 1.0),
        ("bacab", 1.0),
        ("abcab", 0.0),
        ("abccba", 0.0),
        ("abba", 0.0),
        ("acbca", 0.0),
        ("abcba=", 0.0),
        ("", 0.0),
    ],
)
def test_any_palindrome_of_the_letters_is_right(completion, reward):
    assert palindrome_reward([completion], ["abcba"], level=["palindrome_generation"]) == [reward]


# The base model


def test_tokenizer_gives_every_text_back_and_every_solution_fits(task, problems):
    tokenizer = task.build_tokenizer()
    for column in ("problem", "solution"):
        texts = [row[column] for row in problems["train"]]
        encoded = tokenizer(texts)["input_ids"]
        assert tokenizer.batch_decode(encoded) == texts
        assert tokenizer.unk_token_id not in {token for ids in encoded for token in ids}
    assert max(map(len, encoded)) < task.max_new_tokens  # the end of the text is a token, too


def test_base_model_sees_no_test_problem(task):
    held_out = {task.key(entry) for entry in draw_entries(task, SPLIT_SIZES["test"])}
    problems = [problem for problem, _ in first_examples(task)]
    seen = [problem if task.source == "ab" else "".join(sorted(problem.removesuffix("="))) for problem in problems]
    assert not held_out & set(seen)
    assert len(set(seen)) > 1500


def first_examples(task) -> list[tuple[str, str]]:
    return list(islice(draw_examples(task, seed=0), 2000))


def test_two_seeds_draw_other_examples_and_one_seed_the_same(task):
    assert first_examples(task) == first_examples(task)
    other = {problem for problem, _ in islice(draw_examples(task, seed=1), 2000)}
    shared = sum(problem in other for problem, _ in first_examples(task))
    assert shared < 200


def test_long_programs_have_completions_of_200_tokens_and_more(problems, task):
    if task.name != "ab_long":
        pytest.skip("one task only")
    encoded = task.build_tokenizer()([row["solution"] for row in problems["test"]])["input_ids"]
    assert mean(len(ids) + 1 for ids in encoded) > 200  # with the end of the text


@pytest.mark.parametrize(("name", "careless"), [("ab", 8), ("ab_long", 2)])
def test_ab_slips_let_different_letters_vanish_and_continue_from_there(name, careless):
    vanished = {"A# #B": [], "B# #A": []}
    for problem, solution in first_examples(TASKS[name]):
        states = [state.split() for state in (problem + solution).split("> ")]
        for before, after in pairwise(states):
            i, pair = next((i, pair) for i, pair in enumerate(pairwise(before)) if pair[0][1] == pair[1][0] == "#")
            rest, swapped = [*before[:i], *before[i + 2 :]], [*before[:i], *reversed(pair), *before[i + 2 :]]
            if pair[0][0] == pair[1][1]:
                assert after == rest
            elif i >= careless:
                assert after == swapped
            else:
                assert after in (rest, swapped)
                vanished[" ".join(pair)].append(after == rest)
    rates = {pair: sum(outcomes) / len(outcomes) for pair, outcomes in vanished.items()}
    assert rates == pytest.approx({"A# #B": 0.25, "B# #A": 0.5}, abs=0.04)


def test_palindrome_slips_double_the_middle_or_swap_two_neighbours():
    doubled, swapped = [], []
    for problem, solution in first_examples(TASKS["palindrome_generation"]):
        letters = problem.removesuffix("=")
        half, odd = divmod(len(letters), 2)
        first, middle, last = solution[:half], solution[half:-half], solution[-half:]
        assert sorted(first + middle[:odd] + last) == sorted(letters)
        assert sorted(first) == sorted(last)
        if odd:
            assert middle in (middle[0], 2 * middle[0])
            doubled.append(len(middle) == 2)
        else:
            assert middle == ""
        swapped.append(first != last[::-1])
    assert sum(doubled) / len(doubled) == pytest.approx(0.6, abs=0.05)
    assert 0.2 < sum(swapped) / len(swapped) < 0.28  # equal neighbours change places unseen


def test_same_seed_builds_the_same_model_and_measures_it(tmp_path, monkeypatch, capsys):
    small = dataclasses.replace(TASKS["palindrome_generation"], steps=2, rows=4)
    monkeypatch.setitem(gym_tasks.TASKS, small.name, small)
    monkeypatch.setattr(gym_tasks, "MEASURED", 3)
    for folder, seed in (("one", "0"), ("same", "0"), ("other", "1")):
        gym_tasks.main([small.name, "--output", str(tmp_path / folder), "--seed", seed])
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "same", "other"))
    assert one == same != other
    measured = json.loads((tmp_path / "one" / "base.json").read_text())
    assert measured["problems"] == 3
    assert measured["greedy"]["accuracy"] == measured["pass@8"]["accuracy"] == 0  # untrained
    assert {"train_seconds", "reasoning_gym", "versions", "date"} <= measured.keys()
    assert "sampled 0.000" in capsys.readouterr().out
