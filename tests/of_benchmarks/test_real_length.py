"""Longer completions on the pretrained model: the problems, the reward, and what a run is asked for."""

from dataclasses import asdict

import pytest

from benchmarks import real_length
from benchmarks.real_length import SEEDS, SETTINGS, SIZES, TOKENS, Run, make_problems, steps_reward
from opo_trl.launch.recipe import parse


@pytest.mark.parametrize("steps", TOKENS)
def test_problems_are_right_and_differ(steps):
    rows = [row for rows in make_problems(steps).values() for row in rows]
    assert len({row["problem"] for row in rows}) == sum(SIZES.values())
    for row in rows:
        *worked, asked = row["problem"].split("\n")
        for line in [*worked, f"{asked} {row['solution']}"]:
            written = line.partition(": ")[2].split(", ")
            assert len(written) == steps
            assert all(eval(step.replace("=", "==")) for step in written)
            assert all(step.split()[2] == line.split()[3].strip(":") for step in written)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" 16 + 9 = 25, 25 + 9 = 34\nfrom 3", 1.0),
        (" 16 + 9 = 25, 25 + 9 = 35", 0.5),
        (" 16 + 9 = 25", 0.5),
        (" 16 + 9 = 24, 25 + 9 = 34", 0.0),
        (" 16 + 9 = 25, 25 + 9 = 34, 34 + 9 = 43, 43 +", 0.5),
        ("\n16 + 9 = 25", 0.0),
        ("", 0.0),
    ],
)
def test_reward_is_the_share_of_right_steps(completion, reward):
    assert steps_reward([completion], ["16 + 9 = 25, 25 + 9 = 34"], level=["2"]) == [reward]


@pytest.mark.parametrize(("steps", "reduction", "mu"), SETTINGS)
def test_command_line_asks_for_what_the_plan_says(steps, reduction, mu, tmp_path):
    script, args, _, _ = parse(Run(steps, reduction, mu, 7).command_line(tmp_path))
    assert (args.log_ratio_reduction, args.mu, args.seed, args.learning_rate) == (reduction, mu, 7, 1e-5)
    assert (args.generation_batch_size, args.num_generations, args.max_completions) == (24, 6, 288)
    assert (args.num_iterations, args.max_staleness, args.max_completion_length) == (2, 8, TOKENS[steps])
    assert script.levels == script.report_levels == [str(steps)]
    assert script.reward_funcs == ["benchmarks.real_length.steps_reward"]


def test_page_compares_runs_of_the_same_seeds_and_leaves_out_settings_with_one():
    measured = {"over_run": 0.5, "curve": [0.1, 0.4, 0.6], "sampled": 0.6, "ess": 0.4, "least_ess": 0.2}
    runs = [Run(*setting, seed) for setting in SETTINGS for seed in SEEDS]
    found = {run: {**asdict(run), **measured} for run in runs}
    for run in runs[3:6]:
        found[run]["over_run"] = 0.6
    for run in (runs[0], *runs[-2:]):
        del found[run]
    rows = [line for line in real_length.page(found).splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(SETTINGS) - 1
    assert rows[0].startswith("| 69 | sum | 0.3 | 2 | 50.0 ± 0.0 |  | 10 40 60 |")
    assert rows[1].startswith("| 69 | sum | 0.03 | 2 | 60.0 ± 0.0 | +10.0 ± 0.0 | 10 40 60 |")
