"""Batches of calls: checks before sending, and the error for a batch that was stored in part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from flowfabric.core.contracts.executions import CreateOutcome
from flowfabric.core.errors import EngineError, FlowFabricError, ValidationError, invalid_input

T = TypeVar("T")

Calls = Sequence[Sequence[Any] | Mapping[str, Any]]
"""A batch: for each call a list of positional arguments, or a mapping of named ones."""

_NO_CALLS = (str, bytes, bytearray, memoryview)


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

    def with_runs(self, wrap: Callable[[Any], Any]) -> SubmitManyError:
        """The same error with other handles."""
        runs = {position: wrap(run) for position, run in self.runs.items()}
        unsure = {position: wrap(run) for position, run in self.unsure.items()}
        return SubmitManyError(runs, self.errors, unsure)

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


def arguments_of(call: object, position: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and named arguments of one call of a batch."""
    if isinstance(call, (list, tuple)):
        return tuple(cast("Sequence[Any]", call)), {}
    if isinstance(call, Mapping):
        return (), dict(cast("Mapping[str, Any]", call))
    if isinstance(call, Iterable) and not isinstance(call, _NO_CALLS):
        return tuple(cast("Iterable[Any]", call)), {}
    problem = f"must be a list of arguments or a mapping of named ones: write [{call!r:.60}]"
    raise invalid_input(f"calls[{position}]", problem)


def at_position(error: ValidationError, position: int) -> ValidationError:
    """The same error with the position of the call."""
    return ValidationError(
        error.code,
        f"calls[{position}]: {error.details[0]}",
        *error.details[1:],
        op=error.op,
        undecodable=error.undecodable,
    )


def check_sizes(payloads: Sequence[bytes], limit: int) -> None:
    """Refuse the batch if one payload is too large: the engine would store the others."""
    for position, payload in enumerate(payloads):
        if len(payload) > limit:
            problem = f"calls[{position}] has {len(payload)} bytes, the limit is {limit}"
            raise ValidationError("payload_too_large", problem)


def created(
    outcomes: Sequence[CreateOutcome | EngineError], handle: Callable[[CreateOutcome], T]
) -> list[T]:
    """A handle for each outcome. Raises `SubmitManyError` if only some calls were stored."""
    runs: dict[int, T] = {}
    errors: dict[int, EngineError] = {}
    for position, outcome in enumerate(outcomes):
        if isinstance(outcome, EngineError):
            errors[position] = outcome
        else:
            runs[position] = handle(outcome)
    if errors and not runs:
        raise next(iter(errors.values()))
    if errors:
        raise SubmitManyError(runs, errors, {})
    return list(runs.values())
