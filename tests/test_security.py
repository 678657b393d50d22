"""Recipes, models, checkpoints and answers from others are read and never executed (SECURITY.md)."""

import json
import logging
import re
import shutil
import sys
from pathlib import Path
from pickle import UnpicklingError

import pytest
import sympy.physics.units  # noqa: F401 - its first import evaluates names
import torch
from device_fields import RECIPES
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from safetensors.torch import load_file
from sympy import lambdify
from sympy.core import evalf

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.checks.weights import check_weights
from opo_trl.command.recipe import read
from opo_trl.command.train import main
from opo_trl.resume.checkpoint import load_state
from opo_trl.rewards import accuracy as rewards
from opo_trl.rewards.accuracy import accuracy_reward, score


def train(model: Path, tmp_path: Path) -> int:
    """Exit status of a short run of the arithmetic recipe, with another model."""
    arguments = ["--model_name_or_path", str(model), "--output_dir", str(tmp_path / "run")]
    arguments += ["--report_size", "2", "--max_steps", "1"]
    return main(["--config", str(RECIPES / "arithmetic" / "opo.yaml"), *arguments])


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_recipe_with_a_python_tag_is_rejected(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    harm = tmp_path / "harm"
    recipe.write_text(f"alpha: !!python/object/apply:os.mkdir [{harm}]\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        read(["--config", str(recipe)])
    assert not harm.exists()


def test_pickled_weights_are_rejected(bomb, model, tmp_path, capsys):
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weights["x"] = bomb
    torch.save(weights, model / "pytorch_model.bin")
    assert train(model, tmp_path) == 2
    assert "no file named model.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "harm").exists()


def test_code_that_comes_with_a_model_is_not_run(model, tmp_path, capsys):
    classes = {"AutoConfig": "remote.RemoteConfig", "AutoModelForCausalLM": "remote.RemoteModel"}
    edit(model / "config.json", model_type="remote", auto_map=classes)
    harm = str(tmp_path / "harm")
    (model / "remote.py").write_text(f"import os\nos.mkdir({harm!r})\n")
    assert train(model, tmp_path) == 2
    assert "trust_remote_code=True" in capsys.readouterr().err
    assert not (tmp_path / "harm").exists()


def edit(file: Path, **entries: object) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | entries))


@pytest.mark.parametrize(
    "entry", [{"attn_implementation": "evil/kernel"}, {"attn_implementation": {"": "paged|evil/kernel"}}], ids=str
)
def test_attention_from_the_hub_in_a_models_configuration_is_rejected(model, tmp_path, entry):
    """Transformers would download its code and run it, without `trust_remote_code`."""
    edit(model / "config.json", **entry)
    args = OPOConfig(str(tmp_path / "run"), use_cpu=True, bf16=False)
    message = r"model='.*model': its config.json asks for code from the Hub, attn_impl.*evil/"
    with pytest.raises(ValueError, match=message):
        OPOTrainer(str(model), accuracy_reward, args)
    check_weights("model", str(model), {"attn_implementation": "sdpa"})  # the user's own choice goes first


def test_other_code_of_a_model_is_not_run_unless_it_is_trusted(model, tmp_path):
    """A recipe passes its own `attn_implementation`; Transformers ignores the rest without `trust_remote_code`."""
    harm = str(tmp_path / "harm")
    for name in ("tokenization.py", "custom_generate/generate.py"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(f"import os\nos.mkdir({harm!r})\n")
    edit(model / "config.json", attn_implementation="evil/kernel")
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization.T", "tokenization.T"]})
    edit(model / "generation_config.json", custom_generate="evil/generate")
    assert train(model, tmp_path) == 0
    assert not (tmp_path / "harm").exists()


def test_state_of_a_rollout_is_read_as_tensors_only(bomb, tmp_path):
    torch.save({"text": bomb}, tmp_path / "rollout_state_0.pt")
    with pytest.raises(UnpicklingError):
        load_state(tmp_path, process=0)
    assert not (tmp_path / "harm").exists()


def patched() -> tuple:
    """What scoring patches."""
    loggers = [logging.getLogger(f"math_verify.{name}").disabled for name in ("parser", "grader")]
    return evalf.lambdify, _Latex2Sympy.parse_number, loggers, logging.getLogger("math_verify").level


@pytest.mark.parametrize("seconds", [0.01, 5.0], ids=["out of time", "in time"])
def test_scoring_restores_sympy(monkeypatch, seconds):
    before = patched()
    assert evalf.lambdify is lambdify  # also after the import
    monkeypatch.setattr(rewards, "VERIFYING_LIMIT", seconds)
    monkeypatch.setattr(rewards, "PARSING_LIMIT", seconds)
    score(r"\boxed{\sum_{n=0}^\infty \frac{2^n}{n!}}", "e^x")
    assert patched() == before


@pytest.fixture(scope="module")
def evaluated():
    """Every string that is compiled, except annotations. An audit hook cannot be removed, so it is switched off."""
    codes: list[str] = []
    is_on = True

    def watch(event: str, arguments: tuple) -> None:
        if not is_on or event != "compile":
            return
        source, filename = arguments
        is_of_a_file = not str(filename).startswith(("<string>", "<lambdifygenerated"))
        if source is None or is_of_a_file or sys._getframe(1).f_globals["__name__"] == "typing":
            return
        codes.append(source.decode() if isinstance(source, bytes) else str(source))

    sys.addaudithook(watch)
    yield codes
    is_on = False


@pytest.mark.parametrize(
    "answer",
    [
        "12x + 1.5",  # shows that it evaluates numbers
        "__import__('os').getcwd()",
        r"\text{__import__('os').getcwd()}",
        "(__import__('os'), 2)",
        "f(__import__('os'))",
        r"\operatorname{exec}(x)",
        r"\{().__class__, 2\}",
        r"\max(lambda x: 1, 2)",
        r"\sum_{n=0}^\infty \frac{2^n}{n!}",  # shows that it compiles the terms of a series
        r"\sum_{n=0}^\infty \frac{\text{[0for[builtins.harm]in[[1]]][0]}^n}{n!}",
        r"\sum_{n=0}^\infty \frac{1}{(n+\text{x.real})!}",
        r"\lfloor\sum_{n=0}^\infty \frac{\text{x.real}^n}{n!}\rfloor",
        r"\sum_{n=0}^\infty \frac{\operatorname{exit}(0)^n}{n!}",
    ],
)
def test_only_numbers_of_an_answer_are_evaluated(evaluated, answer):
    evaluated.clear()
    for gold in (r"(1, \infty)", "e^x"):
        score(f"\\boxed{{{answer}}}", gold)
        score(f"\\boxed{{{gold}}}", answer)
    codes = {code.strip() for code in evaluated}
    forms_of_harmless_code = (
        r"((Integer|Float) \('?[\d.]+'? \)|[-/()\s])+",  # numbers
        r"def _lambdifygenerated\(n\):\s+return [n\d +*()-]+",  # a polynomial with integer coefficients
        r"def monomial_\w+\(.*",  # SymPy's arithmetic
        r"((from|import) [\w.]+( import \*)?(; |$))+",
    )
    harmless = re.compile("|".join(f"(?:{form})" for form in forms_of_harmless_code), re.DOTALL)
    assert [code for code in codes if not harmless.fullmatch(code)] == []
    if answer == "12x + 1.5":
        assert "Integer (12 )" in codes
    if "2^n" in answer:
        assert any(code.endswith("return 2") for code in codes)
