"""Where a test's mark `device` names a number of processes, it is called in them, with its fixtures' values."""

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import call


@pytest.fixture(scope="session", autouse=True)
def library(shared: Path) -> Path:
    """The folder that makes torch see pretend devices, if it is on PYTHONPATH."""
    build = shared / "tools" / "fakecuda" / "build.sh"
    if not build.exists() or shutil.which("g++") is None:
        pytest.skip("needs tools/fakecuda in ../shared or OPO_TRL_SHARED, and g++")
    environment = {**os.environ, "PYTHON": sys.executable}
    return Path(subprocess.run([build], env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


@pytest.hookimpl
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker("device")
    if mark is None or not mark.kwargs:
        return None  # pytest calls it
    arguments = [pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters]
    where = {"folder": pyfuncitem.funcargs["tmp_path"], "library": pyfuncitem.funcargs["library"]}
    call(pyfuncitem.obj, *arguments, **where, **{"devices": mark.kwargs["processes"], **mark.kwargs})
    return True
