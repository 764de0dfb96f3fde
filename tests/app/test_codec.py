"""What may be an argument, a result or a payload, and what is refused."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
import pytest

import flowfabric as ff
from flowfabric.app import codec
from flowfabric.core.errors import ValidationError
from tests.support.engine import Engine
from tests.support.server import TestServer
from tests.support.waiting import parked


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    async with ff.Fabric(valkey.url) as fabric:
        yield fabric


@dataclass
class Reading:
    at: str
    level: float | None


class Series(msgspec.Struct):
    readings: list[Reading]


def shapes(x: float) -> dict[str, object]:
    """Values that hold the number, by its place in them."""
    return {
        "value": x,
        "value.a[1].b": {"a": [1, {"b": x}]},
        "value[1]": (None, x),
        "value.level": Reading("noon", x),
        "value.readings[1].level": Series([Reading("null", None), Reading("noon", x)]),
        "value.x": {"big": 2**70, "x": x},
        "value[2]": [1.0, msgspec.Raw(b"[null]"), x],
    }


def nested(depth: int, value: object) -> object:
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [400, 5_000, 100_000])
@pytest.mark.parametrize("inside", [[math.nan], [math.nan, 2**70], [None, 2**70, object()]])
def test_deep_values_are_refused(depth: int, inside: list[object]) -> None:
    with pytest.raises(ValidationError) as caught:
        codec.encode(nested(depth, inside))
    assert caught.value.code == "invalid_input"


def test_a_deep_value_that_json_can_represent() -> None:
    deep = nested(400, [None, 2**70])
    assert codec.encode(deep) == (b"[" * 401 + b"null,%d" % 2**70 + b"]" * 401, "json")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", list(shapes(0)))
def test_the_error_names_the_place_of_a_number_that_json_cannot_represent(
    where: str, number: float
) -> None:
    with pytest.raises(ValidationError) as caught:
        codec.encode(shapes(number)[where])
    assert caught.value.code == "invalid_input"
    assert caught.value.details == (
        f"{where}: is {number}, which JSON cannot represent: use None or a string",
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": None, "b": "null", "c": 1e308, "d": 2**70},
        # Text whose bytes look like a NaN in MessagePack: the closer look finds nothing.
        [None, "Ë\x7fð", b"\xcb\x7f\xf8\x00"],
        Reading("null", None),
        [msgspec.Raw(b"null")],
        [None, Decimal("NaN")],
    ],
)
def test_null_itself_passes(value: object) -> None:
    assert codec.encode(value) == (msgspec.json.encode(value), "json")


def test_bytes_stay_as_they_are() -> None:
    class Blob(bytes):
        pass

    assert codec.encode(b"null") == (b"null", "")
    assert codec.encode(Blob(b"x")) == (b"x", "")


async def test_arguments_are_refused_before_anything_is_sent(app: ff.Fabric) -> None:
    @app.task()
    async def plot(reading: Reading, scale: float = 1.0) -> None: ...

    with pytest.raises(ValidationError, match=r"arguments\[0\]\.level: is nan"):
        await app.submit(plot, Reading("noon", math.nan))
    with pytest.raises(ValidationError, match=r"arguments\.scale: is inf"):
        await app.submit(plot, reading=Reading("noon", 1.0), scale=math.inf)
    page = await (await app.client()).list()
    assert page.executions == ()


async def test_a_result_that_json_cannot_represent_fails_permanently(app: ff.Fabric) -> None:
    @app.task(retry=ff.Retry(3, backoff="1ms"))
    async def measure() -> dict[str, list[float]]:
        return {"mean": [math.nan]}

    async with app.worker():
        run = await app.submit(measure)
        with pytest.raises(ff.ExecutionFailed) as caught:
            await run.result(timeout=20)
    info = caught.value.info
    assert (info.failure_category, info.total_attempt_count) == ("permanent", 1)
    wanted = "measure: the result.mean[0] is nan, which JSON cannot represent: use None or a string"
    assert info.failure_reason == wanted


async def test_a_refused_signal_payload_does_not_end_the_wait(
    waiting_app: ff.Fabric, engine: Engine
) -> None:
    @waiting_app.task()
    async def ask(ctx: ff.Context) -> Any:
        return (await ctx.wait_for("level")).payload

    async with waiting_app.worker():
        run = await waiting_app.submit(ask)
        await parked(engine, run)
        with pytest.raises(ValidationError, match=r"payload\.level: is inf"):
            await run.signal("level", "given", {"level": math.inf})
        await run.signal("level", "given", {"level": None})
        assert await run.result(timeout=20) == {"level": None}
