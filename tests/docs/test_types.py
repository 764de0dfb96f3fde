"""Both type checkers accept what the documentation shows and reject wrong calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.type_checks import EXAMPLES, Finding, mypy, pyright, write_pages

WRONG = Path(__file__).with_name("wrong_calls.py")
MARKED = {
    number
    for number, line in enumerate(WRONG.read_text().splitlines(), 1)
    if line.endswith("  # error")
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("check", [mypy, pyright])
def test_checkers_accept_the_documentation_and_reject_wrong_calls(
    check: Callable[[Path, list[Path]], list[Finding]], tmp_path: Path
) -> None:
    found = check(tmp_path, [*write_pages(tmp_path), *EXAMPLES, WRONG])
    assert [each for each in found if each.file != WRONG.name] == []
    reported = {each.line: each.message for each in found if each.file == WRONG.name}
    assert {line: text for line, text in reported.items() if line not in MARKED} == {}
    assert sorted(MARKED - reported.keys()) == []
