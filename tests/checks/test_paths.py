"""Paths without permission. Root may read everything, so the tests run as another user."""

import os
from pathlib import Path

import pytest

from opo_trl.checks import paths
from opo_trl.data import load_problems


@pytest.fixture
def forbidden(tmp_path: Path):
    """A folder that this process may not read."""
    folder, root = tmp_path / "forbidden", os.geteuid() == 0
    (folder / "in").mkdir(parents=True)
    folder.chmod(0)
    if root:
        for parent in list(tmp_path.parents)[:3]:
            parent.chmod(0o755)
        tmp_path.chmod(0o755)
        os.seteuid(65_534)
    yield folder / "in"
    if root:
        os.seteuid(0)
    folder.chmod(0o755)


@pytest.mark.parametrize(
    ("field", "look"),
    [
        ("output_dir", lambda path: paths.check_folder("output_dir", path)),
        ("config", lambda path: paths.check_file("config", path, "Pass another.")),
        ("dataset_name", lambda path: load_problems(str(path))),
    ],
)
def test_unreadable_path_is_rejected_with_field_and_fix(forbidden: Path, field, look):
    with pytest.raises(ValueError, match=f"{field}='{forbidden}/x' cannot be .*[Pp]ermission.*`{field}`"):
        look(forbidden / "x")
