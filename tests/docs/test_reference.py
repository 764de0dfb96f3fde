"""The reference is complete and current."""

from __future__ import annotations

import re
from pathlib import Path

import flowfabric
from flowfabric import testing
from flowfabric.scanners.settings import INTERVALS_S
from tests.docs.markdown import PAGES, ROOT, code_of, name_of
from tests.docs.scratch import run_python
from tests.project.checkout import SOURCE, modules

REFERENCE = ROOT / "docs" / "reference"
COMMAND_LINE = REFERENCE / "cli.md"


def test_generated_pages_are_current(tmp_path: Path) -> None:
    """Errors, state codes, scanners and the command line; `make pages` writes them again."""
    assert run_python(tmp_path, str(ROOT / "docs" / "generate.py"), "--check") == ""


def test_every_variable_is_documented() -> None:
    page = (REFERENCE / "configuration.md").read_text()
    documented = set(re.findall(r"`(FF_[A-Z_]+)(?:=\S+)?`", page))
    used: set[str] = set()
    for path in [*modules(), *SOURCE.rglob("*.lua")]:
        # Names that end in an underscore are put together in code, as those of the intervals are.
        used |= set(re.findall(r"\bFF_[A-Z][A-Z_]*[A-Z]\b", path.read_text()))
    intervals = {
        f"FF_{name.upper()}_INTERVAL_{unit}" for name in INTERVALS_S for unit in ("S", "MS")
    }
    assert used - documented - intervals == set()
    assert documented - used - intervals == set()
    assert "FF_<SCANNER>_INTERVAL_MS" in page


def test_every_public_name_is_in_the_overview() -> None:
    known = set(re.findall(r"\b\w+\b", " ".join(code_of(REFERENCE / "python.md"))))
    assert {*flowfabric.__all__, *testing.__all__} - known == {"__version__"}


def test_commands_in_the_pages_exist() -> None:
    known = set(re.findall(r"^## flowfabric ([\w-]+)$", COMMAND_LINE.read_text(), re.MULTILINE))
    unknown: list[str] = []
    for page in PAGES:
        for text in code_of(page):
            used = re.findall(r"(?:^|[\s/])flowfabric (\w[\w-]*)", text, re.MULTILINE)
            unknown += [f"{name_of(page)}: flowfabric {name}" for name in used if name not in known]
    assert unknown == []


def test_options_in_the_pages_exist() -> None:
    """Each option belongs to the command that it is used with."""
    parts = re.split(r"^##+ flowfabric (.+)$", COMMAND_LINE.read_text(), flags=re.MULTILINE)
    helps = dict(zip(parts[1::2], parts[2::2], strict=True))
    unknown: list[str] = []
    for page in PAGES:
        text = "\n".join(code_of(page)).replace("\\\n", " ")
        for first, second, rest in re.findall(r"flowfabric (\w[\w-]*)( [\w-]+)?([^|)&\n]*)", text):
            name = first + second if first + second in helps else first
            used = re.findall(r"(?<=\s)--[a-z-]+", second + rest)
            known = re.findall(r"--[a-z-]+", helps.get(name, ""))
            unknown += [f"{name_of(page)}: {name} {each}" for each in used if each not in known]
    assert unknown == []
