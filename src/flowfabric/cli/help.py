"""How the help of a command looks: names as people type them, without the library's type marks."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

__all__ = ["Command"]

_required = re.compile(r"\{([^|{}]+)\}(\.\.\.)?").fullmatch
_type_mark = re.compile(r"^(  \S+)( <(?:str|list\[str\])>)", re.MULTILINE)


class Command(TyperCommand):
    """A command whose usage says `ID...`, not `{ID}...`, and that does not call a text `<str>`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What stands in brackets may be left out; what must be there needs no mark."""
        pieces = super().collect_usage_pieces(ctx)
        return [_bare(piece) for piece in pieces]

    def get_help(self, ctx: Any) -> str:
        """The text of `--help`."""
        text = super().get_help(ctx)
        return _type_mark.sub(lambda found: found[1] + " " * len(found[2]), text)


def _bare(piece: str) -> str:
    found = _required(piece)
    return piece if found is None else found[1] + (found[2] or "")
