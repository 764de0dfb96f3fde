"""The Lua sources as the guards see them: what a header says, and what the code can do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec

from tests.project.checkout import SOURCE

LUA = SOURCE / "lua"
FUNCTIONS = sorted((LUA / "functions").glob("*.lua"))
SECTIONS = ("Keys", "Arguments", "Replies", "Errors", "Events")

_SECTION = re.compile(rf"\b({'|'.join(SECTIONS)})\b(?: [^.:,]*)?:")
_DEFINITION = re.compile(
    r"^(?:local )?function ([\w.:]+)(\([^\n]*\bend$|\(.*?^end)", re.MULTILINE | re.DOTALL
)
_ERROR = re.compile(r"\breply\.(?:err|refuse)\('(\w+)'")
_EVENT = re.compile(
    r"\b(?:events\.emit(?:_lease|_flow|_operator)?|workers\.event)\([\w.]+, (?:[\w.()]+, )?'(\w+)'"
)
# Every call ends with `flow.settle`, but it reports something only if the call did one of these.
_SETTLE = "flow.settle"
_SETTLED = ("ending.finish", "flow.recount")
_REPEATED = ("then ", "per ", "any number of ")


def comment_of(text: str) -> str:
    """The comment a file begins with, as one line."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return " ".join(lines)


def sections_of(text: str) -> dict[str, str]:
    """What the header of a function file says, by section."""
    parts = _SECTION.split(comment_of(text))
    return {name: said.strip() for name, said in zip(parts[1::2], parts[2::2], strict=True)}


def without_comments(text: str) -> str:
    return re.sub(r"^\s*--.*\n|\s--\s.*$", "", text, flags=re.MULTILINE)


def split(text: str) -> list[str]:
    """The parts between commas that stand outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'`":
            quote = sign
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def first_sentence(text: str) -> str:
    return re.split(r"\.(?: |$)", text, maxsplit=1)[0]


def without_notes(text: str) -> str:
    return re.sub(r"\([^()]*\)", "", text)


class Arguments(msgspec.Struct, frozen=True):
    """The arguments a header names: those passed once, then those of which there may be many."""

    fixed: list[str]
    repeated: list[str]

    @property
    def group(self) -> int | None:
        """How many arguments each repetition has, where the header lists them."""
        if not self.repeated or ":" not in self.repeated[0]:
            return None
        more = (i for i, item in enumerate(self.repeated) if i and item.startswith(_REPEATED))
        return next(more, len(self.repeated))


def arguments_of(text: str) -> Arguments:
    """The first item with `then`, `per …:` or `any number of` begins the repeated ones."""
    said = without_notes(first_sentence(sections_of(text).get("Arguments", "none"))).strip()
    items = [] if said == "none" else split(said)
    more = next((i for i, item in enumerate(items) if item.startswith(_REPEATED)), len(items))
    return Arguments(items[:more], items[more:])


class Block(msgspec.Struct, frozen=True):
    """One Lua function of a helper file, or a whole function file."""

    path: Path
    code: str
    locals: dict[str, Block] = {}

    def called(self) -> Iterable[Block]:
        names = set(re.findall(r"\b\w+\.\w+\b|:\w+(?=\()|\b\w+\b", self.code)) - {_SETTLE}
        if any(self is helpers()[name] for name in _SETTLED):
            names.add(_SETTLE)
        for name in names:
            found = self.locals.get(name) or helpers().get(name)
            if found is not None and found is not self:
                yield found


@cache
def helpers() -> dict[str, Block]:
    """The functions that helper files offer to others, by the name they are called with."""
    offered: dict[str, Block] = {}
    for path in sorted((LUA / "lib").glob("*.lua")):
        own: dict[str, Block] = {}
        for name, body in _DEFINITION.findall(without_comments(path.read_text())):
            block = Block(path, body, own)
            (offered if re.search(r"[.:]", name) else own)[name.removeprefix("Context")] = block
    return offered


def function(path: Path) -> Block:
    return Block(path, without_comments(path.read_text()))


def reach(block: Block) -> list[Block]:
    """A block and all that it may call, directly or not."""
    seen: dict[int, Block] = {}
    waiting = [block]
    while waiting:
        found = waiting.pop()
        if id(found) not in seen:
            seen[id(found)] = found
            waiting += found.called()
    return list(seen.values())


def errors_in(block: Block) -> set[str]:
    """The codes a block may answer with. Any stored record may turn out to be unreadable."""
    return {code for each in reach(block) for code in _ERROR.findall(each.code)} - {"corruption"}


def events_in(block: Block) -> set[str]:
    return {kind for each in reach(block) for kind in _EVENT.findall(each.code)}


def positions_in(block: Block) -> set[int]:
    """The arguments a function file reads by their number."""
    found = {int(number) for number in re.findall(r"\bargs\[(\d+)\]", block.code)}
    for name, first in re.findall(r"\b(\w+\.\w+)\(args, (\d+)\)", block.code):
        offsets = re.findall(r"\bargs\[first(?: \+ (\d+))?\]", helpers()[name].code)
        found |= {int(first) + int(offset or 0) for offset in offsets}
    # Helpers that get all arguments, and those that register the function.
    passed = re.findall(r"\b(\w+\.\w+)\([^()]*\bargs\)|\b(\w+\.register_\w+)\(", block.code)
    for name in {name for pair in passed for name in pair if name}:
        found |= positions_in(helpers()[name])
    return found


def _constructors(text: str, before: str) -> list[int]:
    """How many positional items each table has that `before` introduces."""
    sizes: list[int] = []
    for found in re.finditer(before + r"\{", text):
        end = _closing(text, found.end() - 1)
        items = split(text[found.end() : end])
        if items and not any(re.match(r"[\w\[\]']+ =(?!=)", item) for item in items):
            sizes.append(len(items))
    return sizes


def _closing(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "({") - (text[at] in ")}")
        if depth == 0:
            return at
    raise AssertionError(f"unbalanced: {text[start : start + 60]}")


def answers_in(block: Block) -> list[str]:
    """The shape of what a function answers: words and the size of lists, not how they are made."""
    shapes: set[str] = set()
    for each in reach(block):
        for found in re.finditer(r"\breply\.(ok|duplicate|already)(?=\()", each.code):
            items = split(each.code[found.end() + 1 : _closing(each.code, found.end())])
            words = [item if re.fullmatch(r"'[^']*'", item) else "_" for item in items]
            shapes.add(f"{found[1]}({', '.join(words)})")
        shapes |= {f"list of {size}" for size in _constructors(each.code, r"\breturn ")}
    shapes |= set(re.findall(r"\breturn ('\w+')", block.code))
    # A function that writes makes lists for its commands, too.
    rows = _constructors(block.code, "= ") if "'no-writes'" in block.code else []
    return sorted(shapes) + [f"row of {size}" for size in sorted(rows)]


def interface_of(path: Path) -> str:
    """What callers of a function rely on, as a text that changes only when that does."""
    text = path.read_text()
    said = arguments_of(text)
    reads = "reads" if "'no-writes'" in text else "writes"
    return "\n".join([reads, *said.fixed, "…", *said.repeated, "→", *answers_in(function(path))])
