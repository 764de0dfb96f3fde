"""The base of every concern of the engine, and refusals for what a backend lacks."""

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from flowfabric.core.errors import UnavailableError


class Refusal:
    """An operation that a backend lacks: calling it raises `unavailable`."""

    def __init__(self, op: str) -> None:
        self.op = op

    async def __call__(self, *_: object, **__: object) -> NoReturn:
        raise UnavailableError("unavailable", self.op, op=self.op)


class Absent:
    """A noun that a backend lacks: all its operations are refusals."""

    if TYPE_CHECKING:

        def __getattr__(self, op: str) -> Refusal: ...


def provide(concern: object, operation: Callable[..., Awaitable[object]]) -> None:
    """Add an operation that a layer above the backend provides, which turns its flag on."""
    setattr(concern, operation.__name__, operation)


async def _described(_self: Any) -> None:
    """A method without a body, to compare with."""


async def _declared(_self: Any) -> None: ...


_BODILESS = {each.__code__.co_code for each in (_described, _declared)}


class Concern(Protocol):
    """Operations about one noun. Those that a backend leaves out raise `unavailable`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Protocol in cls.__bases__:
            return
        for name, method in inspect.getmembers(cls, inspect.iscoroutinefunction):
            if name not in vars(cls) and method.__code__.co_code in _BODILESS:
                setattr(cls, name, Refusal(name))
