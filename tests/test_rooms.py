"""The layout of the package: every import runs downwards, and none in a circle."""

import ast
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "opo_trl"

# From the ground up. A room is a module or a folder of modules; it imports from those before it.
ROOMS = (
    "fields",
    "trl",
    "objective",
    "objectives",
    "checks",
    "rewards",
    "data",
    "metrics",
    "forecast",
    "config",
    "evaluate",
    "arguments",
    "rollout",
    "trainer",
    "asynchronous",
    "report",
    "launch",
    "train",
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


INSIDE = [module for module in MODULES if "." in module]


def test_every_module_is_in_a_room():
    assert {room(module) for module in INSIDE} == set(ROOMS)


@pytest.mark.parametrize("module", INSIDE)
def test_imports_run_downwards(module):
    upwards = {
        other
        for other in imports(module)
        if "." in other and room(other) != room(module) and ROOMS.index(room(other)) > ROOMS.index(room(module))
    }
    assert not upwards


def test_no_module_imports_itself_through_others():
    edges = {module: imports(module) - {"opo_trl", module} for module in INSIDE}
    while free := [module for module, others in edges.items() if not others & edges.keys()]:
        for module in free:
            del edges[module]
    assert not edges, f"a circle among {', '.join(edges)}"


def test_no_two_test_files_have_one_name():
    """Pytest imports them by name, and would stop at the second."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(set(names)) == len(names)
