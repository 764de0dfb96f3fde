"""Sync twins of async classes: each operation is one line, with its types and its docstring."""

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
C_co = TypeVar("C_co", covariant=True)


class Caller(Protocol):
    """Runs coroutines on an event loop of another thread."""

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `make` returns and wait for its result."""
        ...


class SyncTwin(Generic[C_co]):
    """The blocking form of an async object. Its operations are `blocking(Async.operation)`."""

    __slots__ = ("_caller", "_target")

    _target: C_co

    def __init__(self, target: C_co, caller: Caller) -> None:
        self._target = target
        self._caller = caller

    def _call(self, use: Callable[[C_co], Coroutine[Any, Any, T]]) -> T:
        """Run an operation of the async object and wait for its result."""
        return self._caller.call(lambda: use(self._target))

    def _perform(
        self,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        twin: Callable[[Any, Caller], Any] | None,
    ) -> Any:
        async def run(target: Any) -> Any:
            result = method(target, *args, **kwargs)
            return await result if inspect.iscoroutine(result) else result

        result = self._call(run)
        if twin is not None:
            return twin(result, self._caller)
        if isinstance(result, AsyncIterator):
            return iterate(cast("AsyncIterator[Any]", result), self._caller)
        return result


class Blocking(Generic[C, P, R]):
    """A method of a sync twin. `blocking` makes it."""

    def __init__(self, function: Callable[..., R]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        function = self._function
        function.__module__, function.__name__ = owner.__module__, name
        function.__qualname__ = f"{owner.__qualname__}.{name}"

    @overload
    def __get__(self, twin: None, owner: type) -> Callable[Concatenate[Any, P], R]: ...

    @overload
    def __get__(self, twin: SyncTwin[C], owner: type) -> Callable[P, R]: ...

    def __get__(self, twin: SyncTwin[C] | None, owner: type) -> Callable[..., R]:
        return self._function if twin is None else MethodType(self._function, twin)


@overload
def blocking(method: Callable[Concatenate[C, P], Coroutine[Any, Any, R]]) -> Blocking[C, P, R]: ...


@overload
def blocking(
    method: Callable[Concatenate[C, P], AsyncIterator[R]],
) -> Blocking[C, P, Iterator[R]]: ...


@overload
def blocking(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, R]], twin: Callable[[R, Caller], S]
) -> Blocking[C, P, S]: ...


@overload
def blocking(
    method: Callable[Concatenate[C, P], R], twin: Callable[[R, Caller], S]
) -> Blocking[C, P, S]: ...


@overload
def blocking(method: Callable[Concatenate[C, P], R]) -> Blocking[C, P, R]: ...


def blocking(
    method: Callable[..., Any], twin: Callable[[Any, Caller], Any] | None = None
) -> Blocking[Any, ..., Any]:
    """The blocking form of a method: waits for a coroutine, iterates over an async iterator.

    `twin` is the class that wraps the result, when that is an async object too.

    >>> class SyncClient(SyncTwin[Client]):
    ...     submit = blocking(Client.submit)
    ...     subscribe_lease_history = blocking(Client.subscribe_worker_events, SyncEventFeed)
    """

    @functools.wraps(method)
    def call(self: SyncTwin[Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._perform(method, args, kwargs, twin)  # pyright: ignore[reportPrivateUsage] - one mechanism

    return Blocking(call)


def iterate(source: AsyncIterator[T], caller: Caller) -> Iterator[T]:
    """A plain iterator over an async one."""
    end = object()

    async def following() -> T | object:
        return await anext(source, end)

    while (item := caller.call(following)) is not end:
        yield cast("T", item)
