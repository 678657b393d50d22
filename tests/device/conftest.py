"""Where a test's mark `device` names a number of processes, it is called in them, with its fixtures' values."""

import inspect
from pathlib import Path

import pytest
from device_processes import call


@pytest.fixture(autouse=True)
def _on_a_pretend_device(library: Path) -> None:
    """Skip where there is none."""


@pytest.hookimpl
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker("device")
    if mark is None or not mark.kwargs:
        return None  # pytest calls it
    arguments = [pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters]
    where = {"folder": pyfuncitem.funcargs["tmp_path"], "library": pyfuncitem.funcargs["library"]}
    call(pyfuncitem.obj, *arguments, **where, **{"devices": mark.kwargs["processes"], **mark.kwargs})
    return True
