"""Calls of tasks: arguments checked against the parameters, and batches of calls."""

import asyncio
import functools
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar, cast, get_args, get_type_hints

from flowfabric.app.context import Context, SyncContext
from flowfabric.core.annotations import annotation
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.errors import (
    ConfigError,
    ConflictError,
    EngineError,
    FlowFabricError,
    PayloadMismatch,
    ValidationError,
    invalid_input,
)
from flowfabric.core.ids import ExecutionId, is_list
from flowfabric.core.text import plural
from flowfabric.engine.api.executions import in_parts

T = TypeVar("T")

_PARTS_AT_ONCE = 3

Calls = Sequence[Sequence[Any] | Mapping[str, Any]]
"""A batch: for each call a list of positional arguments, or a mapping of named ones."""

Keys = Sequence[str] | None
"""Idempotency keys of a batch, one per call; None for none."""

_Call = tuple[tuple[Any, ...], dict[str, Any]]


class Arguments:
    """The parameters and the return type of a task's function."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._name = name
        self._signature = inspect.signature(function)
        hints = _hints(function, name)
        parameters = list(self._signature.parameters.values())
        for position, parameter in enumerate(parameters):
            hint = hints.get(parameter.name)
            problem = _problem(parameter, position, hint, inspect.iscoroutinefunction(function))
            if problem:
                raise ConfigError("task", f"{name}(): {problem}", parameter.name)
        self.returns: Any = hints.get("return", Any)
        self._refuse("the result", "return", self.returns)
        self.takes_context = bool(parameters) and hints.get(parameters[0].name) in _CONTEXTS
        # What `bind` needs: `Signature.bind` takes 2 µs per call.
        given = parameters[self.takes_context :]
        self._types = {each.name: annotation(hints.get(each.name, Any)) for each in given}
        for parameter, kind in self._types.items():
            self._refuse(f"the parameter {parameter!r}", parameter, kind.hint)
        positional = [each for each in given if each.kind is not each.KEYWORD_ONLY]
        needed = [each for each in given if each.default is each.empty]
        only = [each for each in given if each.kind is each.POSITIONAL_ONLY]
        self._most = len(positional)
        # Positional arguments never fill a required keyword-only parameter.
        by_position = all(each in positional for each in needed)
        self._fewest = len(needed) if by_position else len(given)
        self._by_position_only = bool(only)
        self._named = frozenset(each.name for each in given if each not in only)
        self._needed = frozenset(each.name for each in needed)

    def _refuse(self, what: str, field: str, hint: Any) -> None:
        """Reject a type that cannot be encoded when the task is defined, not when it runs."""
        kind = annotation(hint)
        if kind.problem:
            raise ConfigError("task", f"{self._name}(): {what} ({kind}) {kind.problem}", field)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """The arguments as they are sent: all by position or all by name.

        Raises an error if the function does not accept the call.
        """
        if kwargs:
            if not args and self._needed <= kwargs.keys() <= self._named:
                return args, kwargs
        elif self._fewest <= len(args) <= self._most:
            return args, kwargs
        return self._bind(args, kwargs)

    def normal_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """The call in one canonical form, however it was written: by position where possible."""
        args, kwargs = self.bind(args, kwargs)
        positional, named = list(args), dict(kwargs)
        for name in list(self._types)[len(args) : self._most]:
            if name not in named:
                break
            positional.append(named.pop(name))
        return tuple(positional), named

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """The slow path of `bind`: calls that mix both forms, and calls that do not fit."""
        placeholders = (None, *args) if self.takes_context else args
        try:
            bound = self._signature.bind(*placeholders, **kwargs)
        except TypeError as error:
            raise self._mismatch(args, kwargs, error) from error
        if not self._by_position_only:
            given = list(bound.arguments.items())
            return (), dict(given[self.takes_context :])
        # Some parameters are positional-only, so all are sent by position.
        known = self._signature.parameters
        by_name = [name for name in kwargs if known[name].kind is inspect.Parameter.KEYWORD_ONLY]
        if by_name:
            problem = (
                f"{self._name}() takes {by_name[0]!r} by name only and others by position only. "
                "A submission cannot mix the two."
            )
            raise invalid_input("arguments", problem)
        bound.apply_defaults()
        return bound.args[self.takes_context :], {}

    def _misfits(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[str], list[str]]:
        """The arguments that a call lacks, and those that it has no parameter for."""
        given = {*list(self._types)[: len(args)], *kwargs}
        missing = [name for name in self._types if name in self._needed and name not in given]
        return missing, [name for name in kwargs if name not in self._types]

    def misfit(self, args: Sequence[Any], kwargs: dict[str, Any], error: TypeError) -> str:
        """Why a stored call does not fit the function."""
        missing, unknown = self._misfits(args, kwargs)
        problems = [f"the argument {missing[0]!r} is missing"] if missing else []
        problems += [f"there is no parameter {unknown[0]!r}"] if unknown else []
        return " and ".join(problems) or str(error)

    def _mismatch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError
    ) -> Exception:
        missing, unknown = self._misfits(args, kwargs)
        problems = [f"is missing the argument {missing[0]!r}"] if missing else []
        problems += [f"has no parameter {unknown[0]!r}"] if unknown else []
        problem = " and ".join(problems) or f"does not accept this call: {error}"
        return invalid_input("arguments", f"{self._name}() {problem}.")

    @property
    def names(self) -> list[str]:
        """The parameters of a submission, in order."""
        return list(self._types)

    def convert(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Decoded JSON as the declared types: dataclasses, models, datetimes, sets, …"""
        types = self._types
        if len(args) > len(types):
            raise PayloadMismatch(f"takes {plural(len(types), 'argument')}, got {len(args)}")
        # The function itself rejects unknown names.
        known = kwargs.keys() & types.keys()
        try:
            given = zip(types.values(), args, strict=False)
            positional = [kind.convert(value) for kind, value in given]
            named = kwargs | {name: types[name].convert(kwargs[name]) for name in known}
        except Exception:
            for name, value in (*zip(types, args, strict=False), *kwargs.items()):
                if name in types:
                    types[name].fit(value, f"the argument {name!r}")
            raise
        return positional, named


_CONTEXTS = (Context, SyncContext)


def _mentions_context(hint: Any) -> bool:
    return hint in _CONTEXTS or any(map(_mentions_context, get_args(hint)))


def _problem(parameter: inspect.Parameter, position: int, hint: Any, is_async: bool) -> str:  # noqa: FBT001
    """Why a parameter cannot be filled, by a submission or with a context; empty if it can."""
    kind, right = ("an async def", Context) if is_async else ("a def", SyncContext)
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return "*args and **kwargs cannot be submitted."
    if hint is None and parameter.name == "ctx":
        return f'ctx has no annotation. Write "ctx: {right.__name__}".'
    if not _mentions_context(hint):
        return ""
    if position or parameter.kind is parameter.KEYWORD_ONLY or get_args(hint):
        return "a context must be the first parameter, and its annotation the context type alone."
    if hint is right:
        return ""
    way = f'Write "{parameter.name}: {right.__name__}"'
    otherwise = "" if is_async else ", or define it with async def"
    return f"{kind} function takes a {right.__name__}. {way}{otherwise}."


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, AttributeError) as error:
        # Covers names that are imported only for type checkers.
        problem = f"an annotation cannot be resolved: {error}. Import or define it before the task"
        raise ConfigError("task", f"{name}(): {problem}.") from error


def scoped_key(kind: str, key: str) -> str:
    """The idempotency key that the engine stores: keys are scoped to their task."""
    return f"{kind}\x1f{key}"


class IdempotencyConflict(ConflictError):
    """The idempotency key belongs to an execution with other arguments; nothing was stored.

    >>> try:
    ...     run = await resize.options(idempotency_key="order-1").submit("cat.png", 300)
    ... except IdempotencyConflict as error:
    ...     run = app.get_run(error.existing_id, resize)
    """

    def __init__(self, kind: str, key: str, existing_id: str, refused_id: str) -> None:
        super().__init__("idempotency_conflict", key, existing_id, op="create_execution")
        self.args = (kind, key, existing_id, refused_id)
        self.kind = kind
        """The task."""
        self.key = key
        self.existing_id = ExecutionId(existing_id)
        """The execution that has the key."""
        self.refused_id = ExecutionId(refused_id)
        """The id that this submission would have had."""

    @property
    def explanation(self) -> str:
        return (
            f"the key {self.key!r} of task {self.kind} belongs to execution "
            f"{self.existing_id.compact}, which was submitted with other arguments or to another "
            "lane. The new call was not stored"
        )


def refusal(error: EngineError, new: NewExecution) -> EngineError:
    """Why an execution was not stored, with the caller's own key."""
    if error.code != "idempotency_conflict":
        return error
    kind, existing_id = new.execution_kind, error.details[1]
    key = new.idempotency_key.removeprefix(scoped_key(kind, ""))
    return IdempotencyConflict(kind, key, existing_id, new.execution_id)


class SubmitManyError(FlowFabricError):
    """A batch was stored in part. Keys are positions in `calls`.

    Submit again only the calls in `errors`, and those in `unsure` that were not stored: for them
    `await run.state()` raises `execution_not_found`.

    >>> try:
    ...     runs = await app.submit_many(greet, calls)
    ... except SubmitManyError as error:
    ...     again = [calls[position] for position in error.errors]
    """

    def __init__(
        self,
        runs: Mapping[int, Any],
        errors: Mapping[int, EngineError],
        unsure: Mapping[int, Any],
    ) -> None:
        super().__init__(runs, errors, unsure)
        self.runs = dict(runs)
        """Handles on the calls that were stored."""
        self.errors = dict(errors)
        """Why the engine refused the others."""
        self.unsure = dict(unsure)
        """Handles on calls that may or may not have been stored: the reply was lost."""

    def with_runs(self, wrap: Callable[[Any], Any]) -> Self:
        """The same error with other handles."""
        runs = {position: wrap(run) for position, run in self.runs.items()}
        unsure = {position: wrap(run) for position, run in self.unsure.items()}
        return type(self)(runs, self.errors, unsure)

    def __str__(self) -> str:
        parts = [f"{len(self.runs)} calls were stored"]
        if self.errors:
            position, error = next(iter(self.errors.items()))
            parts.append(f"{len(self.errors)} were refused, the first calls[{position}]: {error}")
        if self.unsure:
            why = f" ({self.__cause__})" if self.__cause__ is not None else ""
            parts.append(
                f"{len(self.unsure)} may or may not have been stored{why}: "
                "check each with `run.state()`"
            )
        return "; ".join(parts)


def arguments_of(calls: object) -> list[_Call]:
    """The arguments of each call of a batch."""
    if not isinstance(calls, Iterable):
        raise invalid_input("calls", f"must be a list of calls, got {type(calls).__name__}")
    given = cast("Iterable[object]", calls)
    return [_arguments_of(call, position) for position, call in enumerate(given)]


def payloads_of(
    encode: Callable[[tuple[Any, ...], dict[str, Any]], bytes], calls: Iterable[_Call]
) -> list[bytes]:
    """The encoded arguments of each call of a batch; errors name the position of the call."""
    payloads: list[bytes] = []
    for position, (args, kwargs) in enumerate(calls):
        try:
            payloads.append(encode(args, kwargs))
        except ValidationError as error:
            about, *more = error.details
            about = f"calls[{position}]: {about}"
            raise ValidationError(
                error.code, about, *more, op=error.op, undecodable=error.undecodable
            ) from error
    return payloads


def keys_of(keys: object, count: int) -> list[str]:
    """An idempotency key for each call of a batch."""
    if not is_list(keys):
        problem = f"must be a list of keys, one per call, got {type(keys).__name__}"
        raise invalid_input("idempotency_keys", problem)
    found = [cast("str", key) for key in keys]
    if len(found) != count:
        problem = f"has {plural(len(found), 'key')} for {plural(count, 'call')}; pass one per call"
        raise invalid_input("idempotency_keys", problem)
    return found


def _arguments_of(call: object, position: int) -> _Call:
    if isinstance(call, (list, tuple)):
        return tuple(cast("Sequence[Any]", call)), {}
    if isinstance(call, Mapping):
        return (), dict(cast("Mapping[str, Any]", call))
    if isinstance(call, Iterable) and not isinstance(call, (str, bytes, bytearray, memoryview)):
        return tuple(cast("Iterable[Any]", call)), {}
    problem = f"must be a list of arguments or a mapping of named ones: write [{call!r:.60}]"
    raise invalid_input(f"calls[{position}]", problem)


def check_sizes(payloads: Sequence[bytes], limit: int) -> None:
    """Refuse the batch if one payload is too large: the engine would store the others."""
    for position, payload in enumerate(payloads):
        if len(payload) > limit:
            problem = f"calls[{position}] has {len(payload)} bytes, the limit is {limit}"
            raise ValidationError("payload_too_large", problem)


async def sent(
    sizes: list[int], send: Callable[[Sequence[int]], Awaitable[Sequence[T]]]
) -> list[T]:
    """What `send` returns for each position; prepares the next parts while one is being stored.

    `sizes` are the payload sizes by position.
    """
    parts = deque(in_parts(list(range(len(sizes))), sizes))
    answers: dict[int, T] = {}

    async def send_some() -> None:
        try:
            while parts:
                part = parts.popleft()
                answers.update(zip(part, await send(part), strict=True))
        except BaseException:
            parts.clear()
            raise

    for failure in await asyncio.gather(
        *(send_some() for _ in range(min(_PARTS_AT_ONCE, len(parts)))), return_exceptions=True
    ):
        if failure is not None:
            raise failure
    return [answers[position] for position in range(len(sizes))]


def created(items: Mapping[int, NewExecution], answers: Sequence[T | EngineError]) -> list[T]:
    """The handles of a batch. Raises `SubmitManyError` if only some calls were stored."""
    runs: dict[int, T] = {}
    errors: dict[int, EngineError] = {}
    for position, answer in enumerate(answers):
        if isinstance(answer, EngineError):
            errors[position] = refusal(answer, items[position])
        else:
            runs[position] = answer
    if errors and not runs:
        raise next(iter(errors.values()))
    if errors:
        raise SubmitManyError(runs, errors, {})
    return list(runs.values())
