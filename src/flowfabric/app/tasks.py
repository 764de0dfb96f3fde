"""Task definitions: what `@app.task` makes of a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, cast, get_type_hints

import msgspec

from flowfabric.app.context import Context
from flowfabric.core.capabilities import normalise
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import ConfigError, invalid_input
from flowfabric.core.ids import validate_execution_kind, validate_lane
from flowfabric.core.policy import ExecutionPolicy, parse_policy
from flowfabric.core.retry import Retry

__all__ = ["SUBMIT_OPTIONS", "Task", "TaskOptions"]

SUBMIT_OPTIONS = frozenset({"delay", "idempotency_key", "lane", "priority", "tags"})
"""What `Fabric.submit` takes by name for itself."""

P = ParamSpec("P")
R = TypeVar("R")


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How executions of a task are run."""

    lane: str = "default"
    timeout: Duration | None = None
    deadline: Duration | None = None
    retry: Retry | int | None = None
    capabilities: Iterable[str] = ()
    retention: Duration | None = None

    def policy(self) -> ExecutionPolicy | None:
        """The execution policy these options amount to; None when all are defaults."""
        policy: dict[str, Any] = {}
        if self.retry is not None:
            policy["retry_policy"] = msgspec.to_builtins(_retry(self.retry).policy())
        timeouts = {
            "attempt_timeout_ms": self.timeout,
            "execution_deadline_ms": self.deadline,
        }
        set_timeouts = {name: to_ms(v, name) for name, v in timeouts.items() if v is not None}
        if set_timeouts.get("execution_deadline_ms") == 0:
            raise ConfigError("task", "must be more than 0; None means no deadline", "deadline")
        if set_timeouts:
            policy["timeout_policy"] = set_timeouts
        tokens = normalise(self.capabilities)
        if tokens:
            policy["routing_requirements"] = {"required_capabilities": tokens}
        if self.retention is not None:
            policy["stream_policy"] = {"retention_ttl_ms": to_ms(self.retention, "retention")}
        return parse_policy(policy) if policy else None


class Task(Generic[P, R]):
    """A registered function. Calling it runs it right here; `app.submit` runs it on a worker."""

    def __init__(
        self,
        function: Callable[P, R | Awaitable[R]],
        name: str | None,
        options: TaskOptions,
    ) -> None:
        self.function = function
        self.name = _name_of(function, name)
        self.lane = validate_lane(options.lane)
        self.options = options
        self.policy = options.policy()
        self.is_async = inspect.iscoroutinefunction(function)
        self._signature = inspect.signature(function)
        hints = _hints(function)
        self.returns: Any = hints.get("return", Any)
        self._converters = self._parameter_types(hints)
        self._shape()
        self.__name__ = self.name
        self.__doc__ = function.__doc__

    def _parameter_types(self, hints: dict[str, Any]) -> dict[str, Any]:
        """The declared types of the arguments a submitter gives; checks the signature once."""
        wanted: dict[str, Any] = {}
        self.takes_context = False
        for position, (name, parameter) in enumerate(self._signature.parameters.items()):
            if position == 0 and hints.get(name) is Context:
                self.takes_context = True
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigError(
                    "task", f"{self.name}: *args and **kwargs cannot be submitted", name
                )
            if name in SUBMIT_OPTIONS and parameter.kind is not parameter.POSITIONAL_ONLY:
                raise ConfigError(
                    "task",
                    f"{self.name}: `submit` has an option of this name and would take the "
                    "argument for itself: rename the parameter, or put a `/` after it so that "
                    "it is given by position only",
                    name,
                )
            wanted[name] = hints.get(name, Any)
        return wanted

    def _shape(self) -> None:
        """What `bind` needs to know of the signature: `Signature.bind` takes 2 µs a call."""
        parameters = [self._signature.parameters[name] for name in self._converters]
        positional = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
        needed = [each for each in parameters if each.default is each.empty]
        only = [each for each in parameters if each.kind is each.POSITIONAL_ONLY]
        self._most = len(positional)
        # One that is needed by name is not given by any number of others.
        by_position = all(each in positional for each in needed)
        self._fewest = len(needed) if by_position else len(parameters)
        self._by_position_only = bool(only)
        self._named = frozenset(each.name for each in parameters if each not in only)
        self._needed = frozenset(each.name for each in needed)

    def __repr__(self) -> str:
        return f"Task({self.name!r}, lane={self.lane!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the task {self.name!r} cannot be pickled: send its name, {self.name!r}, which "
            "`submit` takes as well"
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R | Awaitable[R]:
        return self.function(*args, **kwargs)

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they are sent, all by position or all by name.

        Refuses what the function could not be called with, before anything is sent.
        """
        if kwargs:
            if not args and self._needed <= kwargs.keys() <= self._named:
                return args, kwargs
        elif self._fewest <= len(args) <= self._most:
            return args, kwargs
        return self._bind(args, kwargs)

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The rare cases: a mixture of both, and calls that do not fit."""
        placeholders = (None, *args) if self.takes_context else args
        try:
            bound = self._signature.bind(*placeholders, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if name not in self._signature.parameters]
            # Python tells what is missing before it tells what is too much.
            also = f", and there is no {unknown[0]!r}" if unknown else ""
            also = "" if unknown and repr(unknown[0]) in str(error) else also
            raise invalid_input("arguments", f"{self.name}: {error}{also}") from error
        if not self._by_position_only:
            given = list(bound.arguments.items())
            return (), dict(given[self.takes_context :])
        # Some have no name that a call could use, so all go by position.
        known = self._signature.parameters
        by_name = [name for name in kwargs if known[name].kind is inspect.Parameter.KEYWORD_ONLY]
        if by_name:
            problem = f"{self.name}: {by_name[0]} goes by name only, and others by position only"
            raise invalid_input("arguments", problem)
        bound.apply_defaults()
        return bound.args[self.takes_context :], {}

    def convert(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Decoded JSON as the declared types: dataclasses, structs, datetimes, sets, …"""
        types = self._converters
        positional = [
            value if wanted is Any else msgspec.convert(value, wanted)
            for value, wanted in zip(args, types.values(), strict=False)
        ]
        if len(args) > len(types):
            raise TypeError(f"{self.name} takes {len(types)} arguments, got {len(args)}")
        named = {
            name: value if types.get(name, Any) is Any else msgspec.convert(value, types[name])
            for name, value in kwargs.items()
        }
        return positional, named


def _retry(given: object) -> Retry:
    if isinstance(given, Retry):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return Retry(given)
    problem = f"must be a Retry or a number of retries, got {type(given).__name__}"
    raise ConfigError("task", problem, "retry")


def _name_of(given: object, name: object) -> str:
    """The task's name. Refuses what a worker could not run, where it is written."""
    if not callable(given):
        raise ConfigError("task", f"{given!r} is no function")
    called = getattr(given, "__name__", None)
    shown = name or called or repr(given)
    for wrong, problem in _USELESS:
        if wrong(given):
            raise ConfigError("task", f"{shown}: {problem}")
    if name is None and called in (None, "<lambda>"):
        what = "a lambda" if called else type(given).__name__
        problem = f'{what} has no name of its own: give the task one, `app.task("name")(…)`'
        raise ConfigError("task", problem, "name")
    if name == "":
        problem = "must not be empty; leave it out and the task has the function's name"
        raise ConfigError("task", problem, "name")
    return validate_execution_kind(cast("str", called if name is None else name), "name")


def _is_object(given: object) -> bool:
    """Neither a function nor something that a decorator made of one."""
    if hasattr(given, "__wrapped__") or inspect.isroutine(given):
        return False
    return not isinstance(given, functools.partial)


_STREAMS = "a generator has no result to store: return a list, or write output with `ctx.stream()`"
_USELESS: tuple[tuple[Callable[[object], bool], str], ...] = (
    (lambda given: isinstance(given, Task), "is a task already"),
    (inspect.isgeneratorfunction, _STREAMS),
    (inspect.isasyncgenfunction, _STREAMS),
    (inspect.isclass, "is a class: decorate a function that makes or uses it"),
    (inspect.isbuiltin, "is built in, and its parameters are unknown: call it in a function"),
    (_is_object, "is an object, not a function: decorate a function that calls it"),
)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    try:
        return get_type_hints(function)
    except NameError as error:
        raise ConfigError(
            "task", f"annotation of {function!r} cannot be resolved: {error}"
        ) from error
