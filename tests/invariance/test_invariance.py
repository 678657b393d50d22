"""The equivalence classes as tests: a quick selection by default, all of them with `-m slow`."""

import functools
from pathlib import Path

import pytest

from .canonical import Form
from .classes import CLASSES, ONE, EquivalenceClass, compare, train


def members():
    for each in CLASSES:
        for index, member in enumerate(each.members):
            marks = () if index in each.quick else (pytest.mark.slow,)
            yield pytest.param(each, member, id=f"{each.name}-{member.name}", marks=marks)


@pytest.fixture(scope="module")
def trained(tiny_model: str, tmp_path_factory: pytest.TempPathFactory):
    """Forms by name, each trained once."""
    folder = tmp_path_factory.mktemp("invariance")

    @functools.cache
    def of(name: str):
        form = next(each.reference for each in CLASSES if each.reference.name == name)
        return train(form, tiny_model, folder / name)

    return of


@pytest.mark.parametrize(("each", "member"), list(members()))
def test_member_trains_as_its_reference_does(
    each: EquivalenceClass, member: Form, trained, tiny_model: str, tmp_path: Path
):
    found = compare(train(member, tiny_model, tmp_path), trained(each.reference.name))
    assert found.largest <= each.tolerance, found


def test_comparison_sees_a_difference(trained, tiny_model: str, tmp_path: Path):
    other = train(Form("another seed", options={"seed": 43}), tiny_model, tmp_path)
    assert compare(other, trained(ONE.name)).parameters > 0.01
