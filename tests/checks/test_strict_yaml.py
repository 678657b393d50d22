"""Recipes are read as written, with the types of their fields."""

import pytest
import yaml

from opo_trl.command.recipe import parse, read


FIELDS = ["--output_dir", "run", "--use_cpu", "true", "--bf16", "false"]


@pytest.fixture
def recipe(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return str(path)

    return write


FIELDS_AS_WRITTEN = {
    "save_strategy: no": "no",  # false, in YAML 1.1
    "model_revision: 0012": "0012",
    "run_name: 'null'": "null",
    "run_name:": None,
    "instruction: |\n  a\n  b\n": "a\nb\n",
    "levels: [no, 1.10, Level 1]": ["no", "1.10", "Level 1"],
    "env: {A: no, 010: 1e3}": {"A": "no", "010": "1e3"},
    "learning_rate: 1e-4": 1e-4,  # text, in YAML 1.1
    "mu: .5": 0.5,
    "use_cpu: Yes": True,
    "reward_weights: [1, -0.5]": [1, -0.5],
    "reward_funcs: []": [],
    "generation_kwargs: {length_penalty: 1e-4, use_cache: true}": {"length_penalty": 1e-4, "use_cache": True},
}


@pytest.mark.parametrize("text", FIELDS_AS_WRITTEN)
def test_value_is_read_as_written_and_so_is_what_a_run_stores(recipe, text):
    stored = read([recipe(text), "--trainer", "opo"]).as_stored
    assert stored == {text.partition(":")[0]: FIELDS_AS_WRITTEN[text], "trainer": "opo"}
    assert read([recipe(yaml.safe_dump(stored))]).as_stored == stored


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("alpha: 0.3\nmu: 1\nalpha: 0.4", ["duplicate key 'alpha'", "Remove one"]),
        ("generation_kwargs: {top_k: 3, top_k: 4}", ["duplicate key 'top_k'"]),
        ("max_steps: 0x10", ["max_steps='0x10' is not allowed", "an integer of at least 1"]),
        ("mu: yes", ["mu='yes' is not allowed", "a positive finite number"]),
        ("- alpha", ["one field per line"]),
        ("alpha: [1", ["config=", "not valid YAML"]),
        ("alpha: {a: 1}", ["alpha={'a': 1}"]),
    ],
)
def test_what_no_field_can_be_is_rejected(recipe, text, says):
    with pytest.raises(ValueError, match=r"\w") as error:
        read([recipe(text)])
    for part in says:
        assert part in str(error.value)


def test_all_unknown_names_and_values_out_of_range_are_named_at_once(recipe):
    with pytest.raises(ValueError, match=r"\w") as error:
        parse(["--config", recipe("xyzzy: 1\nalpha: 7\ntop_p: 3\n"), "--plugh", "3"])
    lines = str(error.value).splitlines()
    for name in ("xyzzy", "alpha=7", "top_p=3", "--plugh"):
        assert sum(name in line for line in lines) == 1


def test_command_line_overrides_the_recipe_and_is_part_of_it(recipe):
    path = recipe("alpha: 0.3\nlearning_rate: 1e-3\nlevels: [a]\nscale_rewards: no\n")
    words = ["--alpha", "0.7", "--levels", "Level 1", "Level 2", "--generation_kwargs", '{"top_k": 3}']
    script, args, _, stored = parse([path, *FIELDS, *words])
    assert (args.alpha, args.learning_rate, args.scale_rewards) == (0.7, 1e-3, "none")
    assert script.levels == stored["levels"] == ["Level 1", "Level 2"]
    assert args.generation_kwargs == {"top_k": 3}
    with pytest.raises(ValueError, match="trainer='topr' does not exist"):  # the last one counts
        read(["--trainer", "opo", "--trainer=topr"])


def test_recipe_keeps_what_was_asked_for_when_a_library_changes_a_mapping(recipe):
    """TRL sets `use_reentrant` in the arguments of PEFT under ZeRO-3, before the recipe is stored."""
    path = recipe("gradient_checkpointing_kwargs: {use_reentrant: false}\n")
    _, args, _, stored = parse([path, *FIELDS])
    args.gradient_checkpointing_kwargs["use_reentrant"] = True
    assert stored["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
