"""What `import flowfabric` gives is complete, documented and typed."""

from __future__ import annotations

import inspect
from importlib.resources import files

import pytest

import flowfabric
from flowfabric import testing

NAMES = [name for name in flowfabric.__all__ if name != "__version__"]


def test_exports_are_sorted_and_exist() -> None:
    assert list(flowfabric.__all__) == sorted(set(flowfabric.__all__))
    assert [name for name in flowfabric.__all__ if not hasattr(flowfabric, name)] == []


def test_every_name_has_a_home_and_nothing_else_is_offered() -> None:
    assert sorted(flowfabric._HOME_OF) == sorted(NAMES)
    with pytest.raises(AttributeError, match="no attribute 'Fabrik'"):
        getattr(flowfabric, "Fabrik")  # noqa: B009 - type checkers refuse the attribute
    with pytest.raises(AttributeError, match="no attribute 'Klock'"):
        getattr(testing, "Klock")  # noqa: B009


def undocumented(value: type) -> list[str]:
    """Public members that the class itself defines without a docstring."""
    missing = [] if value.__dict__.get("__doc__") else [value.__name__]
    for name in vars(value):
        target: object = inspect.getattr_static(value, name)
        if isinstance(target, (classmethod, staticmethod)):
            target = getattr(value, name)
        documentable = inspect.isroutine(target) or isinstance(target, property)
        if documentable and not name.startswith("_") and not inspect.getdoc(target):
            missing.append(f"{value.__name__}.{name}")
    return missing


@pytest.mark.parametrize("name", [*NAMES, *testing.__all__])
def test_every_public_name_has_a_docstring(name: str) -> None:
    value: object = getattr(flowfabric if name in NAMES else testing, name)
    if isinstance(value, type):
        assert undocumented(value) == []
    else:
        assert inspect.getdoc(value)


def test_the_docstring_guard_catches() -> None:
    class Bare:
        def method(self) -> None: ...

    assert undocumented(Bare) == ["Bare", "Bare.method"]


def test_the_package_is_marked_as_typed() -> None:
    assert (files("flowfabric") / "py.typed").is_file()
