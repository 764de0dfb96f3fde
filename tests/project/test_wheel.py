"""The wheel that users install is complete."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.checkout import ROOT, SOURCE


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """A wheel built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_every_file_of_the_package_is_inside(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if name.startswith("flowfabric/")}
    shipped = {
        path.relative_to(SOURCE.parent).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == shipped
    assert "flowfabric/py.typed" in inside
    assert sum(name.endswith(".lua") for name in inside) > 40


def test_only_the_testing_kit_has_a_movable_clock(wheel: zipfile.ZipFile) -> None:
    sources = [name for name in wheel.namelist() if name.endswith(".lua")]
    movable = [name for name in sources if "test" in name or b"ff_test" in wheel.read(name)]
    assert movable == ["flowfabric/lua/testing/clock.lua"]


def test_nothing_else_is_inside(wheel: zipfile.ZipFile) -> None:
    tops = {Path(name).parts[0] for name in wheel.namelist()}
    assert {top.partition("-")[0] for top in tops} == {"flowfabric"}


def test_licence_and_command_line(wheel: zipfile.ZipFile) -> None:
    (licence,) = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    assert Path(licence).parts[0].endswith(".dist-info")
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "The FlowFabric authors" in text
    assert (ROOT / "README.md").read_text().startswith("# FlowFabric")
