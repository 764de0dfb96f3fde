"""Runs the Python blocks of one page in order, in one session, as a reader would type them.

`python -m tests.docs.session PAGE`. Top-level `await` works as it does in `python -m asyncio`; a
traceback shows the page and its line.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import sys
import types
from pathlib import Path

from tests.docs.markdown import python_blocks


async def run(page: Path, text: str) -> None:
    """Everything on the page, in one event loop."""
    module = types.ModuleType("__main__")
    # Annotations and dataclasses look their module up by name.
    sys.modules["__main__"] = module
    linecache.cache[str(page)] = (0, None, text.splitlines(keepends=True), str(page))
    for block in python_blocks(page):
        padded = "\n" * (block.line - 1) + block.text
        code = compile(padded, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result: object = eval(code, module.__dict__)
        if inspect.isawaitable(result):
            await result


if __name__ == "__main__":
    chosen = Path(sys.argv[1])
    asyncio.run(run(chosen, chosen.read_text()))
