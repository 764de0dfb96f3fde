"""What `@app.task` takes, and how calls are fitted to a signature."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.app import codec
from flowfabric.app.tasks import SUBMIT_OPTIONS
from flowfabric.core.errors import ValidationError

URL = "valkey://127.0.0.1:1"


@pytest.fixture
def app() -> ff.Fabric:
    """Never connected."""
    return ff.Fabric(URL)


def test_the_options_of_submit_are_known() -> None:
    for face in (ff.Fabric, ff.SyncFabric):
        parameters = inspect.signature(face.submit).parameters.values()
        named = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
        assert named == SUBMIT_OPTIONS


def function_with(parameters: str) -> Any:
    """A function with these parameters."""
    space: dict[str, Any] = {"Context": ff.Context}
    exec(f"def ship({parameters}): ...", space)
    return space["ship"]


@pytest.mark.parametrize("option", sorted(SUBMIT_OPTIONS))
def test_a_parameter_that_submit_would_take_for_itself_is_refused(
    app: ff.Fabric, option: str
) -> None:
    for parameters in (f"order, {option}", f"order, *, {option}=1"):
        with pytest.raises(ff.ConfigError, match="rename the parameter") as caught:
            app.task()(function_with(parameters))
        assert (caught.value.field, app.tasks) == (option, {})
    # By position only, there is no doubt whose it is.
    app.task()(function_with(f"{option}, /, order"))


def test_a_number_of_retries_is_a_retry_policy(app: ff.Fabric) -> None:
    short = app.task("short", retry=3)(function_with(""))
    long = app.task("long", retry=ff.Retry(3))(function_with(""))
    assert short.policy is not None
    assert short.policy == long.policy


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
    ("a, b=2", [], {}, "missing a required argument: 'a'"),
    ("a, b=2", [1, 2, 3], {}, "too many positional arguments"),
    ("a, b=2", [1], {"a": 3}, "multiple values for argument 'a'"),
    ("a, b=2", [], {"b": 3}, "missing a required argument: 'a'"),
    ("a, b=2", [1], {"z": 3}, "got an unexpected keyword argument 'z'"),
    ("a, *, b", [1], {}, "missing a required (keyword-only )?argument: 'b'"),
    ("a, *, b", [1, 2], {}, "too many positional arguments"),
    (
        "a, /, b=2",
        [],
        {"a": 3},
        "'a' parameter is positional only|positional-only arguments .*: 'a'",
    ),
    ("a, /, b=2, *, c=3", [1], {"c": 5}, "c goes by name only, and others by position only"),
]


@pytest.mark.parametrize("first", ["", "ctx: Context, "])
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
    assert task.takes_context is bool(first)
    kind, _, payload, _ = app.call(task, tuple(args), kwargs)
    assert kind == "ship"
    assert codec.decode_call(payload) == sent
    # The handler can be called with what was sent.
    named = sent[1]
    task(*(None for _ in range(task.takes_context)), *sent[0], **named)


@pytest.mark.parametrize("first", ["", "ctx: Context, "])
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
        app.call(task, tuple(args), kwargs)
    (detail,) = caught.value.details
    assert detail.startswith("arguments: ship: ")
    # Python's own words, which change from one version to the next.
    assert re.search(problem, detail)


def test_a_call_by_name_of_the_task_cannot_be_fitted(app: ff.Fabric) -> None:
    with pytest.raises(ValidationError, match="all by position or all by name"):
        app.call("ship", (1,), {"b": 2})
