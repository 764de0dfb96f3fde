"""Which functions become tasks, and which are refused where they are written."""

from __future__ import annotations

import functools
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.errors import ValidationError


@pytest.fixture
def app() -> ff.Fabric:
    """Never connected."""
    return ff.Fabric("valkey://:secret@127.0.0.1:1", namespace="shop")


def test_the_decorator_needs_no_parentheses(app: ff.Fabric) -> None:
    @app.task
    async def greet(name: str) -> str:
        return f"Hello, {name}!"

    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    assert isinstance(greet, ff.Task)
    assert app.tasks == {"greet": greet, "add": add}
    assert (greet.is_async, greet.returns) == (True, str)
    assert add(1, 2) == 3


def numbers() -> Iterator[int]:
    yield 1


async def later_numbers() -> AsyncIterator[int]:
    yield 1


class Report:
    def __call__(self) -> None: ...


def pair(a: int, b: int = 2) -> int:
    return a + b


WRONG: list[tuple[Any, str]] = [
    (numbers, "numbers: a generator has no result to store: return a list"),
    (later_numbers, "later_numbers: a generator has no result to store"),
    (Report, "Report: is a class: decorate a function"),
    (len, "len: is built in"),
    (Report(), "is an object, not a function"),
    (lambda: None, r'a lambda has no name of its own: give the task one, `app.task\("name"\)'),
    (functools.partial(pair, 1), "partial has no name of its own"),
    (5, "5 is not a function"),
]


@pytest.mark.parametrize(("function", "problem"), WRONG)
def test_what_cannot_work_is_refused_where_it_is_written(
    app: ff.Fabric, function: Any, problem: str
) -> None:
    with pytest.raises(ff.ConfigError, match=problem):
        app.task()(function)
    assert app.tasks == {}


def test_a_name_is_given_or_left_out(app: ff.Fabric) -> None:
    with pytest.raises(ff.ConfigError, match=r"task\.name: must not be empty"):
        app.task("")(pair)
    with pytest.raises(ff.ConfigError, match="pair: is already a task"):
        app.task()(app.task()(pair))
    assert app.task("nothing")(lambda: None).name == "nothing"
    task: Any = app.task("three")(functools.partial(pair, b=3))
    assert (task.returns, task(1)) == (int, 4)


@functools.cache
def cached(a: int) -> int:
    return a


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def test_what_decorators_make_stays_a_function(app: ff.Fabric) -> None:
    assert app.task()(cached).name == "cached"
    assert app.task()(decorated(pair)).name == "pair"


def test_no_time_at_all_is_no_deadline(app: ff.Fabric) -> None:
    with pytest.raises(ff.ConfigError, match=r"task\.deadline: must be more than 0; None means"):
        app.task(deadline="0s")(pair)
    # The engine's word for "no limit" (`attempt_timeout_ms`).
    assert app.task(timeout=0)(pair).shared.policy is not None


def test_what_is_unexpected_is_said_beside_what_is_missing(app: ff.Fabric) -> None:
    @app.task
    def one(x: int) -> None: ...

    with pytest.raises(ValidationError) as caught:
        one.encode((), {"y": 1})
    assert "one() is missing the argument 'x' and has no parameter 'y'." in str(caught.value)
    with pytest.raises(ValidationError) as caught:
        one.encode((1,), {"y": 1})
    assert "one() has no parameter 'y'." in str(caught.value)
    with pytest.raises(ValidationError) as caught:
        one.encode((1,), {"priority": 5})
    assert "write one.options(priority=…).submit(…)." in str(caught.value)


def test_representations_are_short_and_tell_no_secret(app: ff.Fabric) -> None:
    task = app.task(lane="mails")(pair)
    assert repr(task) == "Task('pair', lane='mails')"
    assert repr(app) == "Fabric(127.0.0.1:1, namespace='shop', 1 task)"
    kept = "86-1a2b1268-b662-4711-b95c-649666dadb1d"
    assert repr(app.get_run(kept, task)) == f"Run({kept}, task='pair')"
    assert repr(app.get_run(kept)) == f"Run({kept})"
    with ff.SyncFabric(app) as sync:
        assert repr(sync.get_run(kept, "pair")) == f"SyncRun({kept}, task='pair')"


def test_pickling_says_what_to_send_instead(app: ff.Fabric) -> None:
    task = app.task()(pair)
    with pytest.raises(TypeError, match=r"'pair' cannot be pickled\. Send its name"):
        pickle.dumps(task)
    run = app.get_run("{fp:86}:1a2b1268-b662-4711-b95c-649666dadb1d")
    with ff.SyncFabric(app) as sync:
        for handle in (run, sync.get_run(run.id)):
            with pytest.raises(TypeError, match=r"Send `str\(run\.id\)`"):
                pickle.dumps(handle)


def test_dir_shows_what_there_is() -> None:
    assert dir(ff) == sorted(ff.__all__)
