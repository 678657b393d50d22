"""
Everything of the contract that does not fit the installed releases.

    python tests/contract.py

prints a line for each name, with the modules of the package that rely on it, and exits with status 1 if there is any.
`trl_contract.check`, which runs when a trainer is imported, compares names and parameters. This also reads the source
of the package and the bytecode of the libraries: new parameters of methods that we override, imports that fail,
attributes that a library still reads but no longer sets, and entries that it no longer adds to a rollout.
"""

import ast
import dis
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

import trl

from opo_trl import trl_contract


LIBRARIES = ("trl", "transformers", "accelerate", "deepspeed", "datasets", "peft", "torch")


_ASYNC = "trl.experimental.async_grpo"
# Function → entries that it must add to a rollout. Under another name they would be ignored silently.
KEYS: Mapping[str, Collection[str]] = {
    "trl.GRPOTrainer._generate_and_score_completions": (
        *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "tool_mask"),
        *("importance_sampling_ratio", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
        *trl_contract.MULTIMODAL_KEYS,
    ),
    f"{_ASYNC}.packing.TreeRow.pack": ("token_index", "old_log_probs", "segment_id"),
    f"{_ASYNC}.async_grpo_trainer.RolloutQueueDataset.__iter__": (
        *("completion_mask", "advantage", "group_id", "metrics"),
    ),
    f"{_ASYNC}.async_rollout_worker._AsyncRolloutLoop._score_group": ("reward",),
}


def has(owner: Any, name: str) -> bool:
    """Whether a module or a class has an attribute, or a method of the class assigns it to its instances."""
    return hasattr(owner, name) or name in assigned(owner)


def assigned(owner: Any) -> set[str]:
    """Attributes that the methods of a class assign, to whatever object."""
    bases = inspect.getmro(owner) if inspect.isclass(owner) else ()
    members = [member for base in bases for member in vars(base).values()]
    members = [getattr(member, "fget", None) or getattr(member, "func", None) or member for member in members]
    functions = [inspect.unwrap(member) for member in members if callable(member)]
    return set().union(*(_assigned(f.__code__) for f in functions if inspect.isfunction(f)))


@cache
def _assigned(code: CodeType) -> frozenset[str]:
    # In bytecode: the source of the trainers takes a second to parse.
    own = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return frozenset(own.union(*(_assigned(inner) for inner in code.co_consts if isinstance(inner, CodeType))))


@cache
def package() -> dict[str, ast.Module]:
    """Syntax trees of the package's modules, except the contract."""
    folder = Path(trl_contract.__file__).parent
    paths = {path: path.relative_to(folder.parent).with_suffix("") for path in sorted(folder.rglob("*.py"))}
    return {
        ".".join(name.parts).removesuffix(".__init__"): ast.parse(path.read_text(encoding="utf-8"))
        for path, name in paths.items()
        if path != Path(trl_contract.__file__)
    }


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted paths of what a module imports from the libraries, wherever in its text."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (path for path in found if path.split(".")[0] in LIBRARIES)


def methods(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Methods of classes with a base, whose methods they may override."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.bases:
            yield from (member for member in node.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef))


def names(tree: ast.Module) -> set[str]:
    """Names that may be a parent's: of methods, of what is private or set, and of what is taken from a parent."""
    found = {method.name for method in methods(tree)}
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(body=body):
                fields = [part.target for part in body if isinstance(part, ast.AnnAssign) and part.value]
                found |= {target.id for target in fields if isinstance(target, ast.Name)}
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Attribute(attr=name, value=ast.Call()):
                found.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id=owner)) if owner in ("self", "trl_contract"):
                found.add(name)
            case ast.Call(func=ast.Name(id="temporarily"), keywords=changed):
                found |= {keyword.arg for keyword in changed if keyword.arg}
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.Constant(value=str(name)):
                found |= {name} if name.startswith("_") else set()
    return found


def _further(path: str, name: str, override: ast.arguments) -> list[str]:
    """Parameters of a parent's method that an override does not take."""
    method = getattr(trl_contract.resolve(path), name, None)
    if override.vararg or override.kwarg or not callable(method):
        return []
    return [*inspect.signature(method).parameters][len(override.args + override.kwonlyargs) :]


def _unset(contract: trl_contract.Contract) -> Iterator[str]:
    """Attributes that neither a class or module has, nor a method assigns."""
    for path, entries in contract.items():
        owner = trl_contract.resolve(path)
        known = assigned(owner)
        for name in (name for name, parameters in entries.items() if parameters is None):
            if not (isinstance(owner, ImportError) or hasattr(owner, name) or name in known):
                yield f"{path}.{name}"


def _unmade() -> Iterator[tuple[str, str]]:
    """Functions that no longer add an entry to a rollout, and what is wrong with each."""

    def flat(constants: tuple) -> Iterator[Any]:
        for constant in constants:  # keys of a dictionary are in a tuple
            yield from flat(constant) if isinstance(constant, tuple) else (constant,)

    for path, wanted in KEYS.items():
        made = trl_contract.resolve(path)
        constants = set() if isinstance(made, ImportError) else set(flat(inspect.unwrap(made).__code__.co_consts))
        yield from ((path, f"does not add {key!r} to a rollout") for key in sorted({*wanted} - constants))


def report() -> Iterator[str]:
    """A line for each name that does not fit: what is wrong with it, and the modules that rely on it."""
    modules = package()
    used = {module: names(tree) for module, tree in modules.items()}
    everything = {**trl_contract.CONTRACT, **trl_contract.ASYNC_CONTRACT}
    problems = [*trl_contract.mismatches(everything, trl.__version__), *_unmade()]
    known = {path for path, _ in problems}
    problems += [(name, "is read but not set") for name in _unset(everything) if name not in known]
    for path, problem in problems:
        wanted = {*everything.get(path, ()), path.rpartition(".")[2]}
        relying = [module for module, found in used.items() if found & wanted]
        yield f"{path} {problem}: {', '.join(relying) or 'the package'}"
    importing: dict[str, list[str]] = {}
    for module, tree in modules.items():
        for path in {*imports(tree)}:
            importing.setdefault(path, []).append(module)
    for path, relying in sorted(importing.items()):
        error = trl_contract.resolve(path)
        if isinstance(error, ImportError) and find_spec(path.split(".")[0]):  # some libraries are optional
            yield f"{path} cannot be imported ({error}): {', '.join(relying)}"
    for module, tree in modules.items():
        for method in methods(tree):
            for path in (path for path, entries in everything.items() if entries.get(method.name) is not None):
                if method.name != "__init__" and (further := _further(path, method.name, method.args)):
                    yield f"{path}.{method.name} has additional parameters {', '.join(further)}: {module}"


if __name__ == "__main__":
    lines = [*report()]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.exit(bool(lines))
