"""Every recipe can be parsed with the installed dataclasses."""

import re
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from opo_trl.command.named_rewards import load_rewards
from opo_trl.command.recipe import parse, read


ROOT = Path(__file__).resolve().parents[2] / "recipes"
ALL = sorted(path for path in ROOT.rglob("*.yaml") if path.parent.name != "accelerate")
EXPERIMENTS = sorted({path.parent for path in ALL if path.parent.name.startswith("experiment")})
REUSE = [path for path in ALL if "\nmax_staleness:" in path.read_text(encoding="utf-8")]
QWEN = [path for path in ALL if "qwen3-1.7b" in path.parts and path not in REUSE and path.stem != "pivots"]
ACCELERATE = sorted((ROOT / "accelerate").glob("*.yaml"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


def parse_recipe(path: Path, *overrides: str):
    """Parse for the CPU: bf16 needs a GPU before anything else is checked."""
    return parse(["--config", str(path), "--use_cpu", "true", "--bf16", "false", *overrides])


def written_fields(path: Path) -> dict:
    return read(["--config", str(path)]).as_stored


@pytest.mark.parametrize("path", ALL, ids=name)
def test_recipe_parses_and_its_values_arrive(path):
    script, args, model, recipe = parse_recipe(path)
    written = written_fields(path)
    assert recipe.keys() == written.keys() | {"use_cpu", "bf16"}
    for field in ("alpha", "mu", "epsilon", "epsilon_high", "beta", "num_generations", "learning_rate"):
        if field in written:
            assert getattr(args, field) == float(written[field])
    if "levels" in written:
        assert script.levels == [str(level) for level in written["levels"]]
    else:
        assert script.levels is None
    assert model.model_name_or_path == written["model_name_or_path"]
    assert Path(script.accelerate_config).parent == ROOT / "accelerate"
    assert all(callable(reward) for reward in load_rewards(script, args))


def test_a_list_may_stand_for_one_word(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("report_to: [wandb, tensorboard]\noptim_target_modules:\n- q_proj\n- v_proj\nlevels: [3, 4]\n")
    values = read(["--config", str(recipe)]).values
    assert values["report_to"] == ["wandb", "tensorboard"]
    assert values["optim_target_modules"] == ["q_proj", "v_proj"]
    assert values["levels"] == ["3", "4"]
    assert read(["--config", str(recipe), "--report_to", "none"]).values["report_to"] == "none"


@pytest.mark.parametrize("path", QWEN, ids=name)
def test_rollout_holds_as_many_prompts_as_the_paper_says(path):
    _, args, *_ = parse_recipe(path)
    written = written_fields(path)
    launch = load_config_from_file(written["accelerate_config"])
    of_process = args.per_device_train_batch_size * args.steps_per_generation
    completions = of_process * launch.num_processes
    prompts = 48 if path.parent.name == "experiment2" else 32
    assert completions == prompts * 6
    if path.stem == "opo":
        assert args.temperature_range == [0.2, 1.5]
    assert args.learning_rate == (2e-5 if "lora" in path.parent.name else 2e-6)


# All that may differ between the methods of an experiment.
METHOD_FIELDS = """
    trainer objective epsilon epsilon_high alpha mu adaptive_temperature escort_temperature temperature_range
    anchor_correction drive_scaling positivity log_ratio_reduction ratio_form log_ratio_clamp
    mask_truncated_completions overlong_cache max_sampling_rounds learning_rate
"""


def test_commands_in_comments_name_existing_files():
    """No other test reads them."""
    files = [path for path in ROOT.rglob("*.*") if path.suffix in (".yaml", ".sbatch", ".sh")]
    for path in files:
        text = path.read_text(encoding="utf-8")
        for file in re.findall(r"\brecipes/[\w./-]+\.\w+", text):
            assert (ROOT.parent / file).is_file(), (path, file)
        if path in ALL:
            assert f"--config {name(path)}\n" in text


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=name)
def test_recipes_of_an_experiment_differ_only_in_the_method(folder):
    methods = ("opo", "grpo", "gspo", "dapo")
    assert {path.stem for path in folder.iterdir()} == set(methods)
    shared = {}
    for method in methods:
        written = written_fields(folder / f"{method}.yaml")
        assert written.pop("output_dir") == f"runs/{folder.relative_to(ROOT)}/{method}"
        solved, *shaping = written.pop("reward_funcs")
        assert shaping == (["soft_overlong_punishment"] if method == "dapo" else [])
        assert solved in ("accuracy_reward", "arithmetic_reward")
        shared[method] = {field: value for field, value in written.items() if field not in METHOD_FIELDS.split()}
    for fields in shared.values():
        assert fields == shared["opo"]


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=name)
def test_baselines_are_configured_as_in_their_papers(folder):
    grpo, gspo, dapo = (parse_recipe(folder / f"{method}.yaml")[1] for method in ("grpo", "gspo", "dapo"))
    assert (grpo.objective, grpo.epsilon, grpo.epsilon_high) == ("grpo", 0.2, None)
    assert (gspo.objective, gspo.epsilon, gspo.epsilon_high) == ("gspo", 3e-4, 4e-4)
    assert (dapo.objective, dapo.epsilon, dapo.epsilon_high) == ("dapo", 0.2, 0.28)
    assert dapo.mask_truncated_completions
    assert dapo.max_sampling_rounds > 1
    assert {config.beta for config in (grpo, gspo, dapo)} == {0.0}
