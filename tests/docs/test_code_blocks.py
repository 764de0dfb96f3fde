"""Every Python block of the documentation runs, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.markdown import PAGES, ROOT, blocks, name_of, programs, python_blocks
from tests.docs.scratch import run_python, running_worker, tracebacks, wait_for_server_end

LANGUAGES = {"python", "console", "text", "ini", "toml"}
README = ROOT / "README.md"
"""Its example is a whole program, which `test_readme.py` runs as one."""
WITH_CODE = [page for page in PAGES if python_blocks(page) and page != README]
OF_TESTS = [ROOT / "docs" / "how-to" / "test-your-tasks.md"]
TUTORIAL = ROOT / "docs" / "learn" / "first-steps.md"
"""`test_tutorial.py` follows it to the letter."""
OF_PIECES = [page for page in WITH_CODE if not programs(page)]


@pytest.mark.parametrize("page", OF_TESTS, ids=name_of)
def test_every_test_on_a_page_passes(page: Path, tmp_path: Path) -> None:
    """In a folder with nothing else, and with no plugin but ours."""
    found = programs(page)
    assert len(found) == len(python_blocks(page)), "every block needs a name in its first line"
    for name, text, _ in found:
        (tmp_path / name).write_text(text)
    told = run_python(
        *(tmp_path, "-m", "pytest", "-p", "no:cacheprovider"),
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        PYTEST_PLUGINS="flowfabric.testing.plugin",
    )
    tests = sum(text.count("def test_") for _, text, _ in found)
    assert f"{tests} passed" in told
    assert not (tmp_path / ".flowfabric").exists()


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the tutorial, with its first worker still running."""
    folder = tmp_path_factory.mktemp("studio")
    name, text, _ = programs(TUTORIAL)[0]
    (folder / name).write_text(text)
    with running_worker(folder, "studio:app"):
        yield folder
    wait_for_server_end(folder / ".flowfabric")


@pytest.mark.parametrize("page", OF_PIECES, ids=name_of)
def test_page_beside_the_worker_of_the_tutorial(page: Path, studio: Path) -> None:
    run_python(studio, "-m", "tests.docs.session", str(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    unknown = [f"{name_of(page)}:{b.line}" for b in blocks(page) if b.language not in LANGUAGES]
    assert unknown == [], f"use one of {', '.join(sorted(LANGUAGES))}; only python is run"


def test_a_block_that_fails_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError, match=r'page.md", line 8'):
        run_python(tmp_path, "-m", "tests.docs.session", str(page))


def test_only_handlers_may_raise() -> None:
    logged = "fetch 86-4f741fa7… failed: ConnectionError: no (attempt 1, 5 ms)\n"
    raised = "Traceback (most recent call last):\n  File x\nConnectionError: no\n"
    assert tracebacks(logged + raised) == []
    assert tracebacks("Task exception was never retrieved\n" + raised) != []
    assert tracebacks(raised) == [""]


def test_there_is_something_to_run() -> None:
    assert len(OF_PIECES) >= 5
    assert [page for page in WITH_CODE if programs(page)] == [*OF_TESTS, TUTORIAL]
