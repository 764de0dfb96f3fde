"""What every concern of the engine has in common."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from flowfabric.engine.api.capabilities import Refusal


async def _declared(_self: Any) -> None:
    """How a method without a body looks."""


class Concern(Protocol):
    """Operations about one noun. Those that a backend leaves out raise `unavailable`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Protocol in cls.__bases__:
            return
        for name, method in inspect.getmembers(cls, inspect.iscoroutinefunction):
            if name not in vars(cls) and method.__code__.co_code == _declared.__code__.co_code:
                setattr(cls, name, Refusal(name))
