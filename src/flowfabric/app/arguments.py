"""The parameters of a task: checks calls against them and converts decoded arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast, get_args, get_type_hints

import msgspec

from flowfabric.app.context import Context, SyncContext
from flowfabric.core.errors import ConfigError, invalid_input

_Call = tuple[tuple[Any, ...], dict[str, Any]]


class Arguments:
    """The parameters and the return type of a task's function."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._name = name
        self._signature = inspect.signature(function)
        hints = _hints(function)
        self.returns: Any = hints.get("return", Any)
        self.takes_context = self._takes_context(hints, inspect.iscoroutinefunction(function))
        names = list(self._signature.parameters)[self.takes_context :]
        self._types: dict[str, Any] = {each: hints.get(each, Any) for each in names}
        self._shape([self._signature.parameters[each] for each in names])

    def _takes_context(self, hints: dict[str, Any], is_async: bool) -> bool:  # noqa: FBT001
        """Whether the worker passes a context; refuses parameters that cannot be submitted."""
        found = False
        for position, parameter in enumerate(self._signature.parameters.values()):
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise self._refusal(parameter, "*args and **kwargs cannot be submitted.")
            hint = hints.get(parameter.name)
            if hint is None and parameter.name == "ctx" and "ctx" not in hints:
                context = "Context" if is_async else "SyncContext"
                raise self._refusal(parameter, f'ctx has no annotation. Write "ctx: {context}".')
            if not _mentions_context(hint):
                continue
            if position or parameter.kind is parameter.KEYWORD_ONLY or get_args(hint):
                problem = "a context must be the first parameter, annotated with nothing else."
                raise self._refusal(parameter, problem)
            if hint is Context and not is_async:
                problem = (
                    "a def function takes a SyncContext. "
                    f'Write "{parameter.name}: SyncContext", or define it with async def.'
                )
                raise self._refusal(parameter, problem)
            if hint is SyncContext and is_async:
                problem = (
                    f'an async def function takes a Context. Write "{parameter.name}: Context".'
                )
                raise self._refusal(parameter, problem)
            found = True
        return found

    def _refusal(self, parameter: inspect.Parameter, problem: str) -> ConfigError:
        return ConfigError("task", f"{self._name}(): {problem}", parameter.name)

    def _shape(self, parameters: list[inspect.Parameter]) -> None:
        """Precompute what `bind` needs: `Signature.bind` takes 2 µs per call."""
        positional = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
        needed = [each for each in parameters if each.default is each.empty]
        only = [each for each in parameters if each.kind is each.POSITIONAL_ONLY]
        self._most = len(positional)
        # Positional arguments never fill a required keyword-only parameter.
        by_position = all(each in positional for each in needed)
        self._fewest = len(needed) if by_position else len(parameters)
        self._by_position_only = bool(only)
        self._named = frozenset(each.name for each in parameters if each not in only)
        self._needed = frozenset(each.name for each in needed)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """The arguments as they are sent: all by position or all by name.

        Refuses a call that the function does not accept, before anything is sent.
        """
        if kwargs:
            if not args and self._needed <= kwargs.keys() <= self._named:
                return args, kwargs
        elif self._fewest <= len(args) <= self._most:
            return args, kwargs
        return self._bind(args, kwargs)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Calls that mix both forms, and calls that do not fit."""
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

    def _mismatch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError
    ) -> Exception:
        given = {*list(self._types)[: len(args)], *kwargs}
        missing = [name for name in self._types if name in self._needed and name not in given]
        unknown = [name for name in kwargs if name not in self._types]
        problems = [f"is missing the argument {missing[0]!r}"] if missing else []
        problems += [f"has no parameter {unknown[0]!r}"] if unknown else []
        problem = " and ".join(problems) or f"does not accept this call: {error}"
        return invalid_input("arguments", f"{self._name}() {problem}.")

    def convert(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Decoded JSON as the declared types: dataclasses, structs, datetimes, sets, …"""
        types = self._types
        positional = [
            value if hint is Any else msgspec.convert(value, hint)
            for value, hint in zip(args, types.values(), strict=False)
        ]
        if len(args) > len(types):
            raise TypeError(f"{self._name} takes {len(types)} arguments, got {len(args)}")
        named = {
            name: value if types.get(name, Any) is Any else msgspec.convert(value, types[name])
            for name, value in kwargs.items()
        }
        return positional, named


def _mentions_context(hint: Any) -> bool:
    return hint in (Context, SyncContext) or any(map(_mentions_context, get_args(hint)))


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    try:
        return get_type_hints(function)
    except NameError as error:
        problem = f"an annotation of {function!r} cannot be resolved: {error}"
        raise ConfigError("task", problem) from error
