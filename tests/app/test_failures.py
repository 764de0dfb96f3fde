"""What a failure tells its caller, and which failures are retried."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pydantic
import pytest

import flowfabric as ff
from flowfabric.app import codec
from flowfabric.core.errors import ValidationError
from tests.support.engine import Engine
from tests.support.sdk import until
from tests.support.server import TestServer


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    async with ff.Fabric(valkey.url) as fabric:
        yield fabric


async def failure(run: ff.Run[Any]) -> ff.ExecutionFailed:
    with pytest.raises(ff.ExecutionFailed) as caught:
        await run.result(timeout=20)
    return caught.value


class CardDeclined(Exception):
    pass


def connect() -> None:
    raise ConnectionError("no route\nto host")


def charge_card() -> None:
    try:
        connect()
    except ConnectionError as error:
        raise CardDeclined("try another") from error


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_failure_has_the_exception_and_its_place(app: ff.Fabric, threaded: bool) -> None:
    async def charge() -> None:
        charge_card()

    task: Any = app.task("charge", retry=ff.Retry(2, backoff="1ms"))
    task = task(charge_card if threaded else charge)
    async with app.worker():
        error = await failure(await task.submit())
    assert (error.exception_type, error.attempts, error.category) == (
        "CardDeclined",
        3,
        "handler_error",
    )
    reason = "CardDeclined: try another: ConnectionError: no route\nto host"
    assert error.reason == reason
    assert str(error) == f"charge failed after 3 attempts: {reason.splitlines()[0]}"
    trace = (error.traceback or "").splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert __file__ in trace[1]
    assert trace[-3].strip() == 'raise CardDeclined("try another") from error'
    assert "\n".join(trace[-2:]) == reason
    assert "flowfabric/sdk" not in "".join(trace)


async def test_other_failures_have_no_exception(app: ff.Fabric) -> None:
    @app.task
    async def greet(name: str) -> None: ...

    async with app.worker():
        error = await failure(await app.submit("greet", 7))
    assert (error.exception_type, error.traceback, error.attempts) == (None, None, 1)
    assert error.reason.startswith("greet: the argument 'name' does not fit str")


class LostRow(LookupError):
    pass


ON = ff.Retry(1, backoff="1ms", on=(ConnectionError, "LookupError"))
NEVER = ff.Retry(1, backoff="1ms", never=[ValueError, "tests.app.test_failures.LostRow"])
BOTH = ff.Retry(1, backoff="1ms", on=OSError, never=FileNotFoundError)
RETRIED: list[tuple[ff.Retry, Exception, bool]] = [
    (ON, ConnectionResetError(), True),
    (ON, LostRow(), True),
    (ON, OSError(), False),
    (ON, ff.RetryableError("later"), True),
    (ON, ff.TransportError("transport", "gone"), True),
    (ON, ExceptionGroup("all", [ConnectionError(), LostRow()]), True),
    (ON, ExceptionGroup("all", [ConnectionError(), OSError()]), False),
    (NEVER, UnicodeError(), False),
    (NEVER, LostRow(), False),
    (NEVER, LookupError(), True),
    (NEVER, ExceptionGroup("all", [ExceptionGroup("in", [ValueError()])]), False),
    (BOTH, OSError(), True),
    (BOTH, FileNotFoundError(), False),
]


async def test_exceptions_decide_whether_a_task_is_retried(app: ff.Fabric) -> None:
    tasks: list[Any] = []
    for number, (retry, error, _) in enumerate(RETRIED):

        async def fail(error: Any = error) -> None:
            raise error

        tasks.append(app.task(f"fail_{number}", retry=retry)(fail))
    async with app.worker():
        runs = [await task.submit() for task in tasks]
        for run, (retry, raised, again) in zip(runs, RETRIED, strict=True):
            error = await failure(run)
            assert error.attempts == (2 if again else 1), (retry, raised)
            assert error.exception_type == type(raised).__name__
            assert again or error.category == "permanent"


@pytest.mark.parametrize("wrong", [("",), (7,), (int,), KeyboardInterrupt, ValueError("x"), None])
def test_only_exceptions_are_taken(wrong: Any) -> None:
    for name in ("on", "never"):
        with pytest.raises(ValidationError, match=rf"retry\.{name}: must be exception classes"):
            ff.Retry(3, **{name: wrong})


async def test_a_backoff_that_grows(app: ff.Fabric) -> None:
    backoff = ff.ExponentialBackoff(initial_delay_ms=3_600_000, multiplier=3.0, max_delay_ms=10**8)

    @app.task(retry=ff.Retry(3, backoff=backoff))
    async def fail() -> None:
        raise ConnectionError

    before = datetime.now(UTC)

    async def failed_once() -> bool:
        return (await run.info()).retry_count == 1

    async with app.worker():
        run = await fail.submit()
        await until(failed_once, "the first failure")
    info = await run.info()
    due = datetime.fromtimestamp((info.delay_until or 0) / 1000, UTC)
    assert timedelta(0) <= due - before - timedelta(hours=1) < timedelta(seconds=30)


async def test_a_start_at_a_time(app: ff.Fabric) -> None:
    @app.task
    async def greet() -> str:
        return "hello"

    moment = datetime(2100, 1, 1, 12, 0, 0, 1, tzinfo=timezone(timedelta(hours=2)))
    later = await greet.options(at=moment).submit()
    assert await later.state() == "delayed"
    assert (await later.info()).delay_until == 4_102_480_800_001
    async with app.worker():
        for past in (datetime.now(UTC), datetime(1960, 1, 1, tzinfo=UTC)):
            run = await app.submit(greet.options(at=past))
            assert await run.result(timeout=20) == "hello"
    assert (await app.named("greet", at=None).submit()).id


def test_times_that_are_refused() -> None:
    app = ff.Fabric("valkey://127.0.0.1:1")
    wrong: Any = "tomorrow"
    with pytest.raises(ValidationError, match=r"at: has no time zone\. Add tzinfo=UTC, or pass"):
        app.named("greet", at=datetime(2030, 1, 1))  # noqa: DTZ001
    with pytest.raises(ValidationError, match="at: must be a datetime, got str"):
        app.named("greet", at=wrong)
    with pytest.raises(ValidationError, match="at: cannot be combined with delay"):
        app.named("greet", at=datetime.now(UTC), delay=5)


class Numbers(pydantic.BaseModel):
    all: set[int]


def test_a_model_with_a_set_has_one_digest() -> None:
    # Two equal sets that Python iterates in different orders.
    first, second = Numbers(all={0, 8}), Numbers(all={8, 0})
    assert list(first.all) != list(second.all)
    assert codec.digest(first) == codec.digest(second)
