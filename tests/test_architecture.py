"""The layout of the package: every import runs downwards, and none in a circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from trl import GRPOTrainer


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "opo_trl"

# From the ground up. A room is a module or a folder of modules; it imports from those before it.
ROOMS = (
    "asynchronous",
    "fields",
    "contract",
    "compatibility",
    "patching",
    "objective",
    "objectives",
    "options",
    "checks",
    "rewards",
    "data",
    "metrics",
    "config",
    "batch",
    "groups",
    "evaluate",
    "models",
    "updates",
    "reuse",
    "resume",
    "generation",
    "forecast",
    "trainer",
    "report",
    "selftest",
    "command",
)

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(module: str) -> set[str]:
    """Modules of the package that a module imports, wherever in its text: in a function, or for type checkers."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found |= {name if (name := f"{source}.{alias.name}") in MODULES else source for alias in node.names}
    return found & MODULES.keys()


def room(module: str) -> str:
    """The room of a module."""
    return module.split(".")[1]


def test_imports_run_downwards():
    inside = [module for module in MODULES if "." in module]
    assert {room(module) for module in inside} == set(ROOMS)
    edges = {module: {other for other in imports(module) if "." in other} for module in inside}
    upwards = {
        (module, other)
        for module, others in edges.items()
        for other in others
        if ROOMS.index(room(other)) > ROOMS.index(room(module))
    }
    assert not upwards
    TopologicalSorter(edges).prepare()  # raises an error if there is a circle


def names_of_instances(path: Path) -> tuple[set[str], set[str]]:
    """Attributes of `self` that a module reads, and those that it defines: in classes, or by assignment."""
    read, defined = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            names = read if isinstance(node.ctx, ast.Load) else defined
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            defined |= {statement.name for statement in node.body if isinstance(statement, ast.FunctionDef)}
            annotated = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
            defined |= {ast.unparse(statement.target) for statement in annotated}
    return read, defined


def test_rollouts_need_nothing_of_the_trainer_that_derives_from_them():
    read, defined = names_of_instances(PACKAGE / "generation" / "rollouts.py")
    _, defined_by_trainer = names_of_instances(PACKAGE / "trainer.py")
    assert {"_place", "_mode", "args"} <= read & defined
    of_trainer_alone = defined_by_trainer - defined - set(dir(GRPOTrainer))
    assert read & of_trainer_alone == set()
