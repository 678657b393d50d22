"""Every recipe is parsed with the installed dataclasses, and says what it does."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from opo_trl.train import OPOScriptArguments, find_accelerate_config, load_reward, make_parser, parse, read_recipe


ROOT = Path(__file__).resolve().parents[1] / "recipes"
ALL = sorted(path for path in ROOT.rglob("*.yaml") if path.parent.name != "accelerate")
QWEN = [path for path in ALL if path.parent.name == "qwen3-1.7b"]
ACCELERATE = sorted((ROOT / "accelerate").glob("*.yaml"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parse_recipe(path: Path, *overrides: str):
    """Parse as on the hardware at hand: bf16 asks for a GPU before anything else is looked at."""
    return parse(["--config", str(path), "--use_cpu", "true", "--bf16", "false", *overrides])


@pytest.mark.parametrize("path", ALL, ids=name)
def test_recipe_parses_and_its_values_arrive(path):
    script, args, model, recipe = parse_recipe(path)
    written = read_recipe(path)
    assert recipe.keys() == written.keys() | {"use_cpu", "bf16"}
    for field in ("alpha", "mu", "num_generations", "max_completion_length", "learning_rate"):
        assert getattr(args, field) == float(written[field])
    assert script.levels == written["levels"]
    assert model.model_name_or_path == written["model_name_or_path"]
    assert all(callable(load_reward(reward)) for reward in script.reward_funcs)


@pytest.mark.parametrize("path", ALL, ids=name)
def test_accelerate_config_of_a_recipe_exists(path):
    script, *_ = parse_recipe(path)
    assert Path(script.accelerate_config).parent == ROOT / "accelerate"


@pytest.mark.parametrize("path", ACCELERATE, ids=name)
def test_accelerate_config_is_one_that_accelerate_reads(path):
    assert load_config_from_file(str(path)).num_machines == 1


@pytest.mark.parametrize("path", ALL, ids=name)
def test_two_optimizer_steps_share_a_rollout(path):
    _, args, *_ = parse_recipe(path)
    assert args.optimizer_steps_per_rollout == 2
    assert not args.is_on_policy


@pytest.mark.parametrize("path", QWEN, ids=name)
def test_rollout_holds_as_many_prompts_as_the_paper_says(path):
    _, args, *_ = parse_recipe(path)
    processes = load_config_from_file(find_accelerate_config(read_recipe(path)["accelerate_config"], str(path)))
    completions = args.per_device_train_batch_size * args.steps_per_generation * processes.num_processes
    assert completions == (48 if "10pct" in path.name else 32) * 6
    assert args.temperature_range == [0.2, 1.5]
    assert args.learning_rate == (2e-5 if args.output_dir.endswith("lora") else 2e-6)


def test_experiment_2_takes_a_tenth_of_the_data_with_seed_42():
    script, args, *_ = parse_recipe(ROOT / "qwen3-1.7b" / "experiment2/opo.yaml")
    assert (script.fraction, script.subset_seed, args.num_train_epochs) == (0.1, 42, 8)
    assert (script.validation_levels, script.validation_size, script.validation_steps) == (["Level 4"], 100, 10)


def test_unknown_key_fails_with_the_nearest_known_one(tmp_path):
    recipe = tmp_path / "typo.yaml"
    recipe.write_text("learning_rat: 1.0e-3\n")
    with pytest.raises(ValueError, match=r"learning_rat=0.001.*Did you mean `learning_rate`\?"):
        read_recipe(recipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n- b\n", "holds no `field: value` lines"), ("a: [1\n", "is not valid YAML"), (None, "does not exist")],
)
def test_file_that_is_no_recipe_is_named(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recipe(path)


def test_command_line_overrides_the_recipe_and_is_part_of_it(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"output_dir: {tmp_path}/run\nalpha: 0.3\nlearning_rate: 1e-3\n")  # YAML reads 1e-3 as a string
    _, args, _, recipe = parse_recipe(path, "--alpha", "0.7", "--levels", "Level 1", "Level 2")
    assert (args.alpha, args.learning_rate) == (0.7, 1e-3)
    assert recipe["alpha"] == 0.7
    assert recipe["levels"] == ["Level 1", "Level 2"]


def test_fields_of_the_script_have_help_for_the_command_line():
    text = make_parser().format_help()
    assert all(f"--{field}" in text for field in OPOScriptArguments.__dataclass_fields__)


def test_reward_function_is_found_by_dotted_path_and_a_wrong_one_is_named():
    assert load_reward("os.path.basename")("a/b") == "b"
    with pytest.raises(ValueError, match=r"reward_funcs='no_such.reward' cannot be imported.*accuracy_reward"):
        load_reward("no_such.reward")
