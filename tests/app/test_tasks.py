"""What `@app.task` takes, and how calls are fitted to a signature."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.app import codec
from flowfabric.app.tasks import SubmitOptions
from flowfabric.core.errors import ValidationError

URL = "valkey://127.0.0.1:1"


@pytest.fixture
def app() -> ff.Fabric:
    """Never connected."""
    return ff.Fabric(URL)


def function_with(parameters: str) -> Callable[..., None]:
    """A function with these parameters."""
    space: dict[str, Any] = {"SyncContext": ff.SyncContext}
    exec(f"def ship({parameters}): ...", space)
    return space["ship"]


@pytest.mark.parametrize("option", sorted(SubmitOptions.__annotations__))
def test_a_parameter_may_have_the_name_of_an_option(app: ff.Fabric, option: str) -> None:
    task = app.task(function_with(f"order, {option}"))
    sent = codec.decode_call(task.encode((7,), {option: "x"}))
    assert sent == ([], {"order": 7, option: "x"})


REFUSED: list[tuple[str, str]] = [
    ("def ship(ctx: Context): ...", 'a def function takes a SyncContext. Write "ctx: SyncContext"'),
    (
        "async def ship(ctx: SyncContext): ...",
        'an async def function takes a Context. Write "ctx: C',
    ),
    ("def ship(ctx): ...", 'ctx has no annotation. Write "ctx: SyncContext"'),
    ("async def ship(ctx, order): ...", 'ctx has no annotation. Write "ctx: Context"'),
    ("async def ship(order, ctx): ...", "ctx has no annotation"),
    ("async def ship(order, ctx: Context): ...", "a context must be the first parameter"),
    ("async def ship(order: int, *, info: Context): ...", "a context must be the first parameter"),
    ("async def ship(*, ctx: Context): ...", "a context must be the first parameter"),
    ("async def ship(ctx: Context | None): ...", "its annotation the context type alone"),
]


@pytest.mark.parametrize(("source", "problem"), REFUSED)
def test_a_misplaced_context_is_refused_where_it_is_defined(
    app: ff.Fabric, source: str, problem: str
) -> None:
    space: dict[str, Any] = {"Context": ff.Context, "SyncContext": ff.SyncContext}
    exec(source, space)
    with pytest.raises(ff.ConfigError, match=re.escape(problem)):
        app.task(space["ship"])
    assert app.tasks == {}


def test_a_number_of_retries_is_a_retry_policy(app: ff.Fabric) -> None:
    short = app.task("short", retry=3)(function_with(""))
    long = app.task("long", retry=ff.Retry(3))(function_with(""))
    assert short.shared.policy is not None
    assert short.shared.policy == long.shared.policy


@pytest.mark.parametrize("retry", [True, "3", 1.5])
def test_other_retries_are_refused(app: ff.Fabric, retry: Any) -> None:
    with pytest.raises(ff.ConfigError, match=r"task\.retry: must be a Retry or a number"):
        app.task(retry=retry)(function_with(""))


FITTING: list[tuple[str, list[Any], dict[str, Any], tuple[list[Any], dict[str, Any]]]] = [
    ("", [], {}, ([], {})),
    ("a, b=2", [3], {}, ([3], {})),
    ("a, b=2", [3, 4], {}, ([3, 4], {})),
    ("a, b=2", [], {"a": 3}, ([], {"a": 3})),
    ("a, b=2", [3], {"b": 4}, ([], {"a": 3, "b": 4})),
    ("a, b=2, c=3", [1], {"c": 5}, ([], {"a": 1, "c": 5})),
    ("a, *, b", [1], {"b": 5}, ([], {"a": 1, "b": 5})),
    ("a, *, b", [], {"a": 1, "b": 5}, ([], {"a": 1, "b": 5})),
    ("a, *, b=2", [1], {}, ([1], {})),
    ("a, /, b=2, c=3", [1], {"c": 5}, ([1, 2, 5], {})),
    ("a=1, /, b=2", [], {"b": 5}, ([], {"b": 5})),
    ("a, /, b=2, *, c=3", [1], {"b": 5}, ([1, 5], {})),
]
UNFIT: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("", [1], {}, "too many positional arguments"),
    ("a, b=2", [], {}, "is missing the argument 'a'"),
    ("a, b=2", [1, 2, 3], {}, "too many positional arguments"),
    ("a, b=2", [1], {"a": 3}, "multiple values for argument 'a'"),
    ("a, b=2", [], {"b": 3}, "is missing the argument 'a'"),
    ("a, b=2", [1], {"z": 3}, "has no parameter 'z'"),
    ("a, *, b", [1], {}, "is missing the argument 'b'"),
    ("a, *, b", [1, 2], {}, "too many positional arguments"),
    (
        "a, /, b=2",
        [],
        {"a": 3},
        "'a' parameter is positional only|positional-only arguments?( .*)?: 'a'",
    ),
    ("a, /, b=2, *, c=3", [1], {"c": 5}, "takes 'c' by name only"),
]


@pytest.mark.parametrize("first", ["", "ctx: SyncContext, "])
@pytest.mark.parametrize(("parameters", "args", "kwargs", "sent"), FITTING)
def test_calls_are_fitted_to_the_signature(
    app: ff.Fabric,
    first: str,
    parameters: str,
    args: list[Any],
    kwargs: dict[str, Any],
    sent: tuple[list[Any], dict[str, Any]],
) -> None:
    task = app.task()(function_with(first + parameters))
    takes_context = task.arguments.takes_context
    assert takes_context is bool(first)
    assert codec.decode_call(task.encode(tuple(args), kwargs)) == sent
    # The handler can be called with what was sent.
    named = sent[1]
    function: Callable[..., None] = task.function
    function(*(None for _ in range(takes_context)), *sent[0], **named)


@pytest.mark.parametrize("first", ["", "ctx: SyncContext, "])
@pytest.mark.parametrize(("parameters", "args", "kwargs", "problem"), UNFIT)
def test_calls_that_do_not_fit_are_refused(
    app: ff.Fabric,
    first: str,
    parameters: str,
    args: list[Any],
    kwargs: dict[str, Any],
    problem: str,
) -> None:
    task = app.task()(function_with(first + parameters))
    with pytest.raises(ValidationError) as caught:
        task.encode(tuple(args), kwargs)
    (detail,) = caught.value.details
    assert detail.startswith("arguments: ship() ")
    # Some are Python's own words, which change from one version to the next.
    assert re.search(problem, detail)


def test_a_call_by_name_of_the_task_cannot_be_fitted(app: ff.Fabric) -> None:
    with pytest.raises(ValidationError, match="all by position or all by name"):
        app.named("ship").encode((1,), {"b": 2})
