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


# The trainers, each derived from the one before.
TRAINERS = ("updates/logps.py", "generation/rollouts.py", "trainer.py")


def names_of_instances(path: Path) -> tuple[set[str], set[str], set[str]]:
    """Attributes of `self` that a module reads, those that it assigns, and those that the body of a class has."""
    read, assigned, of_classes = set(), set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            names = read if isinstance(node.ctx, ast.Load) else assigned
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef):
                    of_classes.add(statement.name)
                elif isinstance(statement, ast.AnnAssign | ast.Assign):
                    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                    of_classes |= {ast.unparse(target) for target in targets}
    return read, assigned, of_classes


def test_trainers_need_nothing_of_those_that_derive_from_them():
    known = set(dir(GRPOTrainer))  # attributes that TRL or a trainer so far has
    read_so_far: set[str] = set()
    for file in TRAINERS:
        read, assigned, of_classes = names_of_instances(PACKAGE / file)
        # What an earlier trainer reads, this one does not bring, nor does it change more than this.
        assert read_so_far & (assigned | of_classes) - known == set()
        of_another = read_so_far & assigned & known - of_classes - set(dir(GRPOTrainer))
        assert of_another <= {"_leaves_out_logps"}
        known |= assigned | of_classes
        read_so_far |= read
    assert {"_place", "_mode", "args", "planner", "_leaves_out_logps"} <= read_so_far & known
