"""Fixtures of the tests of data."""

from pathlib import Path

import pytest


@pytest.fixture
def math(shared_data: Path) -> str:
    """Folder of MATH itself. The expected numbers in the tests are those of the data's README."""
    return str(shared_data / "math")
