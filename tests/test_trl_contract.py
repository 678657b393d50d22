"""
The contract with TRL and the libraries below it: it fits what is installed, and a change is named.

The second half walks over the package. Whatever a module takes from those libraries that is private, overrides one of
their methods or sets one of their attributes must be in `CONTRACT`, and every entry must be used. When a test names
something new, use public API in its place, or add it to the class or the module that has it.
"""

import ast
import importlib
import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any

import contract
import pytest
import transformers
import trl
from accelerate.state import GradientState
from contract import LIBRARIES
from transformers.integrations import deepspeed
from trl.experimental.async_grpo import AsyncGRPOTrainer

from opo_trl import trl_contract
from opo_trl.trl_contract import ASYNC_CONTRACT


MODULES = contract.package()

CONTRACT = {**trl_contract.CONTRACT, **ASYNC_CONTRACT}


def test_installed_libraries_fit():
    trl_contract.check()
    assert list(contract.report()) == []


@pytest.mark.parametrize("version", ["1.16.0", "1.16.1", "1.16.2.dev0"])
def test_tested_versions_pass(version):
    trl_contract.check(version=version)


@pytest.mark.parametrize("version", ["1.15.2", "1.16.0.dev0", "1.17.0", "2.0.0"])
def test_version_outside_the_tested_range_is_rejected(version):
    with pytest.raises(ImportError) as error:
        trl_contract.check(version=version)
    assert version in str(error.value)
    assert str(trl_contract.TESTED_VERSIONS) in str(error.value)


def without_threshold(self, entropies, mask):
    return mask


def with_scaler(self, model, grad_norm=None, scaler=None):
    return grad_norm


CHANGES: list[tuple[Callable[[pytest.MonkeyPatch], Any], str]] = [
    (lambda m: m.delattr(transformers.Trainer, "_get_grad_norm"), "transformers.Trainer._get_grad_norm is missing"),
    (
        lambda m: m.setattr(trl.GRPOTrainer, "get_high_entropy_mask", without_threshold),
        "trl.GRPOTrainer.get_high_entropy_mask has no parameter threshold",
    ),
    (lambda m: m.setattr(trl.GRPOTrainer, "_generate", None), "trl.GRPOTrainer._generate is missing"),
    (
        lambda m: m.delattr(deepspeed, "_hf_deepspeed_config_weak_ref"),
        "transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref is missing",
    ),
    (
        lambda m: m.delattr(GradientState, "_set_sync_gradients"),
        "accelerate.state.GradientState._set_sync_gradients is missing",
    ),
]


@pytest.mark.parametrize(("change", "problem"), CHANGES, ids=[problem for _, problem in CHANGES])
def test_change_is_named_with_the_modules_that_rely_on_it(monkeypatch, change, problem):
    change(monkeypatch)
    with pytest.raises(ImportError) as error:
        trl_contract.check()
    assert problem in str(error.value)
    assert str(trl_contract.TESTED_VERSIONS) in str(error.value)
    (line,) = [line for line in contract.report() if line.startswith(problem)]
    assert re.fullmatch(r"opo_trl\.[\w.]+(, opo_trl\.[\w.]+)*", line.rpartition(": ")[2])


def test_every_problem_is_in_one_message(monkeypatch):
    for change, _ in CHANGES:
        change(monkeypatch)
    with pytest.raises(ImportError) as error:
        trl_contract.check(version="9.9")
    for text in ("TRL 9.9", "pip install", *(problem for _, problem in CHANGES)):
        assert text in str(error.value)


def test_class_that_is_gone_is_named():
    with pytest.raises(ImportError, match=r"trl\.NoSuchTrainer cannot be imported"):
        trl_contract.check({"trl.NoSuchTrainer": {"log": ("logs",)}})


def test_attribute_that_is_read_but_no_longer_set_is_reported(monkeypatch):
    monkeypatch.setattr(trl.GRPOTrainer, "__init__", lambda self, model, reward_funcs, args: None)
    assert [
        line for line in contract.report() if line.startswith("trl.GRPOTrainer._logs is read but not set: opo_trl.")
    ]


def test_further_parameter_of_an_overridden_method_is_reported(monkeypatch):
    monkeypatch.setattr(transformers.Trainer, "_get_grad_norm", with_scaler)
    lines = contract.report()
    assert {line.partition(": opo_trl.")[0] for line in lines} == {
        "transformers.Trainer._get_grad_norm has additional parameters scaler"
    }


def test_import_that_is_gone_is_reported(monkeypatch):
    monkeypatch.delattr(trl.trainer.utils, "RepeatSampler")
    lines = "\n".join(contract.report())
    assert re.search(
        r"^trl\.trainer\.utils\.RepeatSampler cannot be imported \(.*\): opo_trl\.\S+$", lines, re.MULTILINE
    )


def test_command_lists_everything_and_fails():
    """In another process, where a release is newer and two names have gone."""
    broken = (
        "import runpy, transformers, trl; trl.__version__ = '9.9'; "
        "del transformers.Trainer._get_grad_norm, transformers.Trainer._save_rng_state; "
        f"runpy.run_path({contract.__file__!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    for problem, line in zip(
        ("9.9 is outside", "_get_grad_norm is", "_save_rng_state is"), done.stdout.splitlines(), strict=True
    ):
        assert problem in line


def test_command_prints_nothing_if_everything_fits(capsys):
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(contract.__file__, run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out) == (False, "")


def test_check_runs_when_the_trainer_is_imported(monkeypatch):
    monkeypatch.delattr(transformers.Trainer, "_get_grad_norm")
    for module, tree in MODULES.items():
        if module == "opo_trl.trainer" or "trl_contract.check()" in ast.unparse(tree):
            monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=r"Trainer\._get_grad_norm is missing"):
        importlib.import_module("opo_trl.trainer")


@pytest.mark.parametrize("key", contract.KEYS["trl.GRPOTrainer._generate_and_score_completions"])
def test_renamed_entry_of_a_rollout_is_named(key, monkeypatch):
    """Without it OPO would train without a correction, or on the output of tools."""
    made = inspect.unwrap(trl.GRPOTrainer._generate_and_score_completions)

    def renamed(constant: Any) -> Any:
        return (
            tuple(map(renamed, constant)) if isinstance(constant, tuple) else "other" if constant == key else constant
        )

    monkeypatch.setattr(made, "__code__", made.__code__.replace(co_consts=renamed(made.__code__.co_consts)))
    assert any(f"does not add {key!r} to a rollout: opo_trl." in line for line in contract.report())


def test_change_of_the_experimental_trainer_leaves_the_others_usable(monkeypatch):
    monkeypatch.delattr(AsyncGRPOTrainer, "_sync_weight")
    monkeypatch.delitem(sys.modules, "opo_trl.asynchronous", raising=False)
    with pytest.raises(ImportError, match=r"AsyncGRPOTrainer\._sync_weight is missing"):
        importlib.import_module("opo_trl.asynchronous")
    trl_contract.check()
    (line,) = contract.report()
    assert "_sync_weight is missing" in line
    assert "opo_trl.asynchronous.trainer" in line


ASYNC_KEYS = [(path, key) for path, keys in contract.KEYS.items() for key in keys if "experimental" in path]


@pytest.mark.parametrize(("path", "key"), ASYNC_KEYS)
def test_renamed_entry_of_an_asynchronous_sample_is_named(path, key, monkeypatch):
    owner, _, name = path.rpartition(".")
    monkeypatch.setattr(resolve_name(owner), name, lambda: "what it returned under other names")
    assert any(line.startswith(f"{path} does not add {key!r} to a rollout") for line in contract.report())


# The package


# Underscored but documented: `os._exit`, and methods of named tuples.
DOCUMENTED = {"_exit", "_replace", "_asdict", "_fields"}

_assigned = cache(contract.assigned)


def _has(owner: type, name: str) -> bool:
    return hasattr(owner, name) or name in _assigned(owner)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def parents(kind: type) -> list[type]:
    """The libraries' classes that a class derives from."""
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] in LIBRARIES]


def of_parent(kind: type, name: str) -> bool:
    return any(name in vars(parent) if name.startswith("__") else _has(parent, name) for parent in parents(kind)[:1])


def nodes(tree: ast.Module, namespace: Mapping[str, Any]) -> Iterator[tuple[ast.AST, type]]:
    """All nodes of a module, each with its class, or `object`."""
    for statement in tree.body:
        kind = namespace[statement.name] if isinstance(statement, ast.ClassDef) else object
        yield from ((node, kind) for node in ast.walk(statement))


def defined(tree: ast.Module, namespace: Mapping[str, Any]) -> Iterator[str]:
    """Functions, classes and variables of a module, and attributes that no parent has."""
    for node, kind in nodes(tree, namespace):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")) if not of_parent(kind, name):
                yield name


@cache
def namespaces() -> dict[str, dict[str, Any]]:
    return {module: vars(importlib.import_module(module)) for module in MODULES}


@cache
def own() -> set[str]:
    return {name for module, tree in MODULES.items() for name in defined(tree, namespaces()[module])}


@cache
def kinds() -> set[type]:
    """The libraries' classes that one of the package derives from."""
    found = {kind for module, tree in MODULES.items() for _, kind in nodes(tree, namespaces()[module])}
    return {parent for kind in found for parent in parents(kind)[:1]}


def overrides(tree: ast.Module, namespace: Mapping[str, Any]) -> Iterator[tuple[type, str]]:
    """What a class body defines that a parent has."""
    for statement in tree.body:
        for member in statement.body if isinstance(statement, ast.ClassDef) else ():
            match member:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    defines = [name]
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                    defines = [name]
                case ast.Assign(targets=targets):
                    defines = [target.id for target in targets if isinstance(target, ast.Name)]
                case _:
                    continue
            kind = namespace[statement.name]
            yield from ((kind, name) for name in defines if of_parent(kind, name))


def attributes(tree: ast.Module, namespace: Mapping[str, Any]) -> Iterator[tuple[type | None, str, bool]]:
    """Names that a module takes as attributes: of `self` in which class, or of another object; whether it sets it."""
    for node, kind in nodes(tree, namespace):
        match node:
            case ast.Attribute(
                attr=name, ctx=context, value=ast.Name(id="self") | ast.Call(func=ast.Name(id="super"))
            ):
                yield kind, name, isinstance(context, ast.Store)
            case ast.Attribute(attr=name):
                yield None, name, False
            case ast.Constant(value=str(name)) if any(_has(each, name) for each in kinds()):
                yield None, name, False
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[_, ast.Constant(value=name), *_]):
                yield None, name, False
            case ast.Call(func=ast.Name(id="temporarily"), keywords=changed):
                yield from ((None, keyword.arg, True) for keyword in changed if keyword.arg)
            case ast.ImportFrom(module=module, names=taken, level=0) if module.partition(".")[0] in LIBRARIES:
                yield from ((None, name, False) for name in [*module.split("."), *(alias.name for alias in taken)])


def relied_on(tree: ast.Module, namespace: Mapping[str, Any], ours: set[str]) -> set[tuple[type | None, str]]:
    """What the contract must name, with the class of the package that has it from a parent."""
    found: set[tuple[type | None, str]] = set(overrides(tree, namespace))
    for kind, name, sets in attributes(tree, namespace):
        if kind is None:
            relies = sets or (is_private(name) and (name not in ours or any(_has(each, name) for each in kinds())))
        elif not parents(kind):
            relies = is_private(name) and name not in ours
        elif of_parent(kind, name):
            relies = is_private(name) or (sets and not is_dataclass(kind))
        else:
            relies = name not in ours  # a parent had it once, or it is misspelt
        found |= {(kind, name)} if relies else set()
    return found


def owners(name: str) -> list[str]:
    return [path for path, entries in CONTRACT.items() if name in entries]


def is_named(kind: type | None, name: str) -> bool:
    """Whether the contract has a name: of anything, or of a parent of a class."""
    return any(kind is None or resolve_name(path) in kind.__mro__ for path in owners(name))


def test_contract_names_what_the_package_relies_on():
    missing = {}
    for module, tree in MODULES.items():
        found = relied_on(tree, namespaces()[module], own())
        missing[module] = sorted({name for kind, name in found if not is_named(kind, name)})
    assert {module: names for module, names in missing.items() if names} == {}


def test_contract_names_the_parameters_of_overrides():
    missing = {}
    for module, tree in MODULES.items():
        for kind, name in overrides(tree, namespaces()[module]):
            if not inspect.isfunction(method := inspect.unwrap(vars(kind)[name])):
                continue
            parameters = inspect.signature(getattr(parents(kind)[0], name)).parameters.values()
            theirs = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
            entries = [CONTRACT[path][name] for path in owners(name) if resolve_name(path) in kind.__mro__]
            named = {parameter for entry in entries for parameter in entry}
            missing[f"{module}.{kind.__name__}.{name}"] = {*theirs[1 : method.__code__.co_argcount]} - named
    assert {method: names for method, names in missing.items() if names} == {}


def test_every_entry_is_used():
    used = set().union(*map(contract.names, MODULES.values()))
    assert {name for entries in CONTRACT.values() for name in entries} <= used


def test_only_the_contract_reads_source():
    assert not [module for module, tree in MODULES.items() if "getsource" in ast.dump(tree)]


CLASS = """
import trl


class Extended(trl.GRPOTrainer):
    def ours(self):
        self._ours = 1
        return {}
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (CLASS.format("self._something_of_trl"), "_something_of_trl"),
        (CLASS.format("self._signature_columns"), "_signature_columns"),
        (CLASS.format("self.no_longer_there"), "no_longer_there"),
        (CLASS.format("setattr(self, '_signature_columns', [])"), "_signature_columns"),
        (CLASS.format("super()._signature_columns"), "_signature_columns"),
        (CLASS.format("0").replace("ours(self)", "_remove_unused_columns(self)"), "_remove_unused_columns"),
        (CLASS.format("0").replace("self._ours", "self.beta"), "beta"),
        ("def f(trainer):\n    return trainer._signature_columns", "_signature_columns"),
        ("def f(model):\n    return getattr(model, '_no_split_modules', ())", "_no_split_modules"),
        ("from transformers.trainer import _is_peft_model", "_is_peft_model"),
        ("import transformers.trainer as t\nt._is_peft_model", "_is_peft_model"),
        ("from trl._compat import *", "_compat"),
        ("def temporarily(*_, **__):\n    pass\n\n\ntemporarily(None, beta=0.0)", "beta"),
    ],
)
def test_walk_finds(text, name):
    namespace = {"__name__": "opo_trl.example"}
    exec(text, namespace)
    tree = ast.parse(text)
    (found,) = relied_on(tree, namespace, {*own(), *defined(tree, namespace)})
    assert found[1] == name
    assert not is_named(*found)


def test_walk_passes_what_is_our_own():
    namespace = {"__name__": "opo_trl.example"}
    text = CLASS.format("self._ours + self.beta")
    exec(text, namespace)
    assert not relied_on(ast.parse(text), namespace, set(defined(ast.parse(text), namespace)))
