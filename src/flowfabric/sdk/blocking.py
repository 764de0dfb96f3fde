"""Sync twins of async classes: each operation is one line, with its types and its docstring."""

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


class Caller(Protocol):
    """Runs coroutines on an event loop of another thread."""

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `make` returns and wait for its result."""
        ...


_Twin = Callable[[Any, Caller], Any]


class SyncTwin(Generic[C_co]):
    """The blocking form of an async object. Its operations are `blocking(Async.operation)`."""

    __slots__ = ("_caller", "_target")

    _target: C_co

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Tracebacks and help() name the method of the twin.
        for name, method in vars(cls).items():
            if hasattr(method, "__wrapped__"):
                method.__module__, method.__name__ = cls.__module__, name
                method.__qualname__ = f"{cls.__qualname__}.{name}"

    def __init__(self, target: C_co, caller: Caller) -> None:
        self._target = target
        self._caller = caller

    def _call(self, use: Callable[[C_co], Coroutine[Any, Any, T]]) -> T:
        """Run an operation of the async object and wait for its result."""
        return self._caller.call(lambda: use(self._target))

    def _perform(
        self, twin: _Twin | None, method: Callable[..., Any], /, *args: Any, **kwargs: Any
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


Method = Callable[Concatenate[C, P], R]
TwinMethod = Callable[Concatenate[SyncTwin[C], P], R]


@overload
def blocking(method: Method[C, P, Coroutine[Any, Any, R]]) -> TwinMethod[C, P, R]: ...


@overload
def blocking(method: Method[C, P, AsyncIterator[R]]) -> TwinMethod[C, P, Iterator[R]]: ...


@overload
def blocking(
    method: Method[C, P, Coroutine[Any, Any, R]], twin: Callable[[R, Caller], S]
) -> TwinMethod[C, P, S]: ...


@overload
def blocking(method: Method[C, P, R], twin: Callable[[R, Caller], S]) -> TwinMethod[C, P, S]: ...


@overload
def blocking(method: Method[C, P, R]) -> TwinMethod[C, P, R]: ...


def blocking(method: Callable[..., Any], twin: _Twin | None = None) -> Callable[..., Any]:
    """The blocking form of a method: waits for a coroutine, iterates over an async iterator.

    `twin` is the class that wraps the result, when that is an async object too.

    >>> class SyncClient(SyncTwin[Client]):
    ...     submit = blocking(Client.submit)
    ...     subscribe_lease_history = blocking(Client.subscribe_worker_events, SyncEventFeed)
    """

    @functools.wraps(method)
    def call(self: SyncTwin[Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._perform(twin, method, *args, **kwargs)  # pyright: ignore[reportPrivateUsage] - one mechanism

    return call


def iterate(source: AsyncIterator[T], caller: Caller) -> Iterator[T]:
    """A plain iterator over an async one."""
    end = object()

    async def following() -> T | object:
        return await anext(source, end)

    while (item := caller.call(following)) is not end:
        yield cast("T", item)
