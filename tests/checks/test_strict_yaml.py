"""Recipes are read as written; what YAML 1.1 would change is an error."""

from pathlib import Path
from typing import get_args, get_origin

import pytest

from opo_trl.checks import strict_yaml
from opo_trl.launch.recipe import _fields, _read_recipe, parse, read
from opo_trl.launch.words import MAPPINGS
from opo_trl.methods import by_trainer


# Five lines that stand for a hundred thousand values and more.
ALIASES = (
    "".join(
        f"{name}: &{name} [{', '.join([before] * 10)}]\n"
        for name, before in (("report_to", "x"), ("levels", "*report_to"), ("tools", "*levels"), ("watches", "*tools"))
    )
    + f"generation_kwargs: [{', '.join(['*watches'] * 10)}]\n"
)


@pytest.fixture
def recipe(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("save_strategy: no", "no"),  # false, in YAML 1.1
        ("report_to: off", "off"),
        ("model_revision: 1234e5", "1234e5"),
        ("model_revision: 0012", "0012"),
        ("model_revision: 1.10", "1.10"),
        ("run_name: 2024-01-01T10:00:00Z", "2024-01-01T10:00:00Z"),
        ("run_name: 1:30", "1:30"),
        ("run_name: 'null'", "null"),
        ("run_name: null", None),
        ("run_name:", None),
        ("instruction: |\n  a\n  b\n", "a\nb\n"),
        ("levels: [no, 1.10, Level 1, 'x']", ["no", "1.10", "Level 1", "x"]),
        ("env: {A: no, B: 010, C: 1e3, D: true}", {"A": "no", "B": "010", "C": "1e3", "D": "true"}),
        ("env: {NO: no, 010: 1e3}", {"NO": "no", "010": "1e3"}),
        ("learning_rate: 1e-4", 1e-4),  # text, in YAML 1.1
        ("learning_rate: 1.0e-4", 1e-4),
        ("max_steps: 1_000", 1000),
        ("mu: .5", 0.5),
        ("mu: -.inf", -float("inf")),
        ("use_cpu: off", False),
        ("use_cpu: Yes", True),
        ("use_cpu: true", True),
        ("reward_weights: [1, .5, 1e-3]", [1, 0.5, 0.001]),
        ("generation_kwargs: {length_penalty: 1e-4, use_cache: true}", {"length_penalty": 1e-4, "use_cache": True}),
        ("generation_kwargs: {logit_bias: {1: 2.0}, a: '010'}", {"logit_bias": {1: 2.0}, "a": "010"}),
        ("generation_kwargs: '{\"top_k\": 3}'", '{"top_k": 3}'),
        ("generation_kwargs: {<<: {a: 1, b: 2}, b: 3}", {"a": 1, "b": 3}),
        ("generation_kwargs: {x: &a {<<: {b: 2}, b: 3}, y: {<<: *a}}", {"x": {"b": 3}, "y": {"b": 3}}),
        ("deepspeed: ds.json", "ds.json"),
    ],
)
def test_value_is_read_as_written(recipe, text, value):
    field = text.partition(":")[0]
    assert _read_recipe(recipe(text), [])[0] == {field: value}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("alpha: 0.3\nmu: 1\nalpha: 0.4", ["lines 1 and 3", "duplicate key 'alpha'", "Remove one"]),
        ("alpha: 0.3\n'alpha': 0.4", ["duplicate key 'alpha'"]),
        ("generation_kwargs:\n  top_k: 1\n  top_k: 2", ["duplicate key 'top_k'", "lines 2 and 3"]),
        ("generation_kwargs: {a: {b: 1, b: 1}}", ["duplicate key 'b'"]),
        ("env: {A: 1, A: 2}", ["duplicate key 'A'"]),
        ("max_steps: 010", ["line 1: 010 in `max_steps: 010`", "Write a decimal number"]),
        ("max_steps: 0x10", ["line 1: 0x10 in `max_steps: 0x10`"]),
        ("max_steps: 1:30", ["1:30 in `max_steps: 1:30`"]),
        ("max_steps: 1__0", ["max_steps: invalid int value: '1__0'", "Set it"]),
        ("max_steps: 1_", ["max_steps: invalid int value: '1_'", "Set it"]),
        (f"max_steps: {'9' * 5000}", ["line 1: 9999", "in `max_steps: 9999", "at most 1000 digits"]),
        ("seed: 2024-01-01", ["2024-01-01 in `seed: 2024-01-01`"]),
        ("mu: yes", ["yes in `mu: yes`"]),
        ("chat_template_kwargs:\n  enable_thinking: no", ["line 2: no in `enable_thinking: no`", "true or false"]),
        ("generation_kwargs: {date: 2024-01-01}", ["2024-01-01 in `generation_kwargs: {date: 2024-01-01}`"]),
        ("- alpha", ["one field per line"]),
        ("0.4", ["one field per line"]),
        ("", ["one field per line"]),
        ("alpha: 0.3\n---\nalpha: 0.4", ["not valid YAML", "another document"]),
        ("alpha:\t0.3\n\tmu: 1", ["not valid YAML"]),
        ("1: 2", ["sets 1=2", "no such field"]),
        ("no: 2", ["sets no=2", "no such field"]),
        ("? [alpha]\n: 1", ["line 1: a sequence cannot be a key"]),
        ("alpha: !!binary aGk=", ["not valid YAML", "binary"]),
        ("generation_kwargs: &a {x: *a}", ["not valid YAML", "recursive"]),
        ("max_steps: !!int abc", ["not valid YAML", "abc"]),
        ("env: {A: }", ["env={'A': None}", "Set `env`"]),
        ("env: {A: [1]}", ["env={'A': ['1']}", "Set `env`"]),
        ("levels: [[a]]", ["levels=[['a']]"]),
        ("levels: [a, ]\nreward_weights: [1, ~]", ["reward_weights=[1, None]"]),
        ('generation_kwargs: \'{"top_k": 3, "top_k": 4}\'', ["generation_kwargs=", "duplicate key 'top_k'"]),
        (f"generation_kwargs: {'[' * 3000}", ["not valid YAML", "nested too deeply"]),
        (ALIASES, ["line 5: 'generation_kwargs' has more than 100,000 values"]),
    ],
)
def test_what_yaml_would_change_is_rejected(recipe, text, says):
    fields = ["--output_dir", "run", "--use_cpu", "true", "--bf16", "false"]
    with pytest.raises(ValueError, match=r"\w") as error:
        parse(["--config", str(recipe(text)), *fields])
    for part in says:
        assert part in str(error.value)


def test_strategy_named_no_stays_a_word(recipe):
    path = recipe(
        "output_dir: run\nuse_cpu: on\nbf16: off\nsave_strategy: no\nscale_rewards: no\nwatches: []\ndebug: ''\n"
    )
    _, args, _, merged = parse(["--config", str(path), "--model_revision", "12e3"])
    assert (args.save_strategy, args.scale_rewards, args.use_cpu) == ("no", "none", True)
    assert merged["model_revision"] == "12e3"


def test_trainer_on_the_command_line_is_found_in_either_form():
    assert read(["--trainer=grpo"]).trainer == "grpo"
    assert read(["--trainer", "opo", "--trainer=grpo"]).trainer == "grpo"


def test_mapping_on_the_command_line_is_yaml_too():
    fields = ["--output_dir", "run", "--use_cpu", "true", "--bf16", "false", "--generation_kwargs"]
    *_, merged = parse([*fields, "{top_k: 3, length_penalty: 1e-4}"])
    assert merged["generation_kwargs"] == {"top_k": 3, "length_penalty": 1e-4}
    with pytest.raises(ValueError, match=r"generation_kwargs='\{a: no\}'.*ambiguous"):
        parse([*fields, "{a: no}"])


def test_every_field_with_a_mapping_is_known_before_its_type():
    takes_mapping = {
        name
        for trainer in by_trainer()
        for name, hint in _fields(trainer).items()
        if any((get_origin(part) or part) is dict for part in (hint, *get_args(hint)))
    }
    assert takes_mapping == MAPPINGS


def test_all_rejected_fields_are_named_at_once(recipe):
    path = recipe("xyzzy: 1\nalpha: 7\nepsilon: 0.3\nmax_steps: few\npositivity: much\nlevels: {a: 1}\n")
    with pytest.raises(ValueError, match=r"\w") as error:
        parse(["--config", str(path), "--plugh", "3"])
    said = str(error.value).splitlines()
    fields = ("xyzzy", "alpha=7", "epsilon=0.3", "levels={'a': '1'}", "max_steps", "positivity", "--plugh")
    assert len(said) == len(fields)
    for name in fields:
        assert any(name in line for line in said)


def test_what_is_written_is_read_back(tmp_path):
    texts = [
        "1e-4",
        "010",
        "0o10",
        "no",
        "1:30",
        "~",
        "null",
        "",
        "a\nb\n",
        "a\x85b",
        "a\u2028b",
        "<<",
        "=",
        ".5",
        "1_000",
    ]
    fields = {"a": texts, "b": {text: text for text in texts}, "c": 1e-5, "d": True, "e": None, "f": float("inf")}
    (tmp_path / "recipe.yaml").write_text(strict_yaml.dump(fields), encoding="utf-8")
    assert strict_yaml.read(tmp_path / "recipe.yaml", lambda _: "plain") == fields
