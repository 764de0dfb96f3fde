"""The data folder of a project is found from its subfolders, as git finds `.git`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowfabric.valkey.project_folder import data_folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FF_DATA_DIR", raising=False)
    (tmp_path / "shop" / "src" / "web").mkdir(parents=True)
    return tmp_path / "shop"


def found_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return data_folder()


def test_it_is_found_from_a_subfolder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / ".flowfabric").mkdir()
    for folder in (project, project / "src", project / "src" / "web"):
        assert found_from(folder, monkeypatch) == project / ".flowfabric"


def test_the_nearest_one_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (project, project / "src"):
        (folder / ".flowfabric").mkdir()
    inner = project / "src" / ".flowfabric"
    assert found_from(project / "src" / "web", monkeypatch) == inner


def test_without_one_it_is_made_here(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_from(project / "src", monkeypatch) == project / "src" / ".flowfabric"
    assert list(project.rglob(".flowfabric")) == []


def test_a_chosen_folder_is_not_searched_for(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / ".flowfabric").mkdir()
    monkeypatch.setenv("FF_DATA_DIR", "elsewhere")
    assert found_from(project / "src", monkeypatch) == project / "src" / "elsewhere"


@pytest.mark.parametrize("end", ["repository", "home", "shared", "file"])
def test_another_project_is_not_met_by_accident(
    project: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The folder above belongs to something else."""
    (project / ".flowfabric").mkdir()
    here = project / "src" / "web"
    match end:
        case "repository":
            (here / ".git").mkdir()
        case "home":
            monkeypatch.setenv("HOME", str(project))
        case "shared":
            project.chmod(0o1777)
        case _:
            # It is in the way, and an error will say so.
            (here / ".flowfabric").touch()
    assert found_from(here, monkeypatch) == here / ".flowfabric"
