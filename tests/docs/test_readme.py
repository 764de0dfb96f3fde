"""The front page is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import PAGES, ROOT, blocks, code_of, links, name_of, python_blocks
from tests.docs.scratch import run_python, wait_for_server_end
from tests.project.checkout import files

README = ROOT / "README.md"


def test_the_example_runs_verbatim(tmp_path: Path) -> None:
    (example,) = python_blocks(README)
    assert len([line for line in example.text.splitlines() if line]) == 12
    (tmp_path / "example.py").write_text(example.text)
    for _ in range(2):
        # The second run finds the first one's execution by its key, and its result.
        assert run_python(tmp_path, "example.py") == "Hello, Ada!\ncompleted\n"
        wait_for_server_end(tmp_path / ".flowfabric")


def test_the_tree_is_the_real_one() -> None:
    (tree,) = [block.text for block in blocks(README) if block.text.startswith("src/flowfabric/")]
    rows = [(line.startswith("  "), line.split()[0].rstrip("/")) for line in tree.splitlines()]
    packages = [name for inside, name in rows[1:] if inside]
    folders = [name for inside, name in rows[1:] if not inside]
    tracked = [path.relative_to(ROOT).parts for path in files()]
    inner = {p[2] for p in tracked if p[:2] == ("src", "flowfabric") and len(p) > 3}
    outer = {p[0] for p in tracked if len(p) > 1 and not p[0].startswith(".")}
    assert set(packages) == inner
    assert set(folders) | {"src"} == outer


def test_the_commands_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        used = set(re.findall(r"\bmake ([a-z]+)\b", "\n".join(code_of(page))))
        assert used <= targets, name_of(page)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken: list[str] = []
    for target in links(page):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors that headings make."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in links(index)}
    pages = {page for page in PAGES if page.is_relative_to(index.parent) and page != index}
    assert pages - linked == set()
