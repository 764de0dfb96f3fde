"""What a case of a lost reply consists of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.support.engine import Engine

Setup = Callable[[Engine], Awaitable[Any]]
Call = Callable[[ValkeyBackend, Any], Awaitable[Any]]


class Case(msgspec.Struct):
    """What to set up, the call whose reply is lost, and the function that serves it."""

    function: str
    setup: Setup
    call: Call
    answer: Callable[[Any], Any] = lambda outcome: outcome


async def nothing(_: Engine) -> None:
    return None


def no_answer(_: Any) -> None:
    """Scanners only count; what a repeat counts is not kept."""
