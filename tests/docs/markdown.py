"""Reading the project's Markdown: its files, code blocks and links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
        *(page for folder in ("docs", "examples") for page in (ROOT / folder).rglob("*.md")),
    ]
)

_fence = re.compile(r"^```(\w*)\s*$")
_file_name = re.compile(r"# (\w+\.py)\n")
_link = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block: its language, the line its text begins at, the text."""

    language: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page."""
    found: list[Block] = []
    language: str | None = None
    begin = 0
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        fence = _fence.match(line)
        if fence is None:
            continue
        if language is None:
            language, begin = fence[1], number + 1
        else:
            found.append(Block(language, begin, "\n".join(lines[begin - 1 : number - 1]) + "\n"))
            language = None
    if language is not None:
        raise ValueError(f"{page}:{begin - 1}: the block has no end")
    return found


def python_blocks(page: Path) -> list[Block]:
    """The blocks that are run."""
    return [block for block in blocks(page) if block.language == "python"]


def programs(page: Path) -> list[tuple[str, str, str | None]]:
    """Blocks that are whole files: name, text, and what the page says that they print.

    Their first line is `# name.py`; a text block that follows is the output.
    """
    found: list[tuple[str, str, str | None]] = []
    all_blocks = blocks(page)
    for block, after in zip(all_blocks, [*all_blocks[1:], None], strict=True):
        name = _file_name.match(block.text)
        if block.language == "python" and name is not None:
            told = after.text if after is not None and after.language == "text" else None
            found.append((name[1], block.text, told))
    return found


def links(page: Path) -> list[str]:
    """Every link target outside code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return _link.findall(re.sub(r"`[^`]*`", "", text))


def code_of(page: Path) -> list[str]:
    """Code in a page, inline or in blocks that a person would type."""
    typed = [block.text for block in blocks(page) if block.language == "console"]
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return typed + re.findall(r"`([^`\n]+)`", prose)


def name_of(page: Path) -> str:
    """A page as messages and test ids show it."""
    return page.relative_to(ROOT).as_posix()
