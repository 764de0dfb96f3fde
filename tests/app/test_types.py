"""The types of arguments, results, signals and frames, and what is refused where it is defined."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, NewType, NoReturn, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest

import flowfabric as ff
from tests.support.engine import Engine
from tests.support.server import TestServer
from tests.support.waiting import parked

UserId = NewType("UserId", int)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1


class Access(Flag):
    READ = 1
    WRITE = 2


class Size(StrEnum):
    BIG = "big"


@dataclass
class Item:
    name: str
    price: Decimal
    made: date | None = None
    parts: list[Item] = field(default_factory=list["Item"])


class Point(NamedTuple):
    x: int
    y: float


class Options(TypedDict, total=False):
    width: int
    until: datetime


class Cat(msgspec.Struct, tag=True):
    lives: int


class Dog(msgspec.Struct, tag=True):
    tricks: set[str]


class Address(pydantic.BaseModel):
    street: str = pydantic.Field(alias="streetName")
    since: date

    @pydantic.computed_field
    @property
    def label(self) -> str:
        return f"{self.street}!"


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    kind: Literal["order"] = "order"
    total: Decimal
    at: datetime
    colours: set[Colour] = set()
    address: Address | None = None


class Refund(pydantic.BaseModel):
    kind: Literal["refund"] = "refund"
    reason: str


class Temperature:
    """Not known to pydantic: its validator and its serializer convert it."""

    def __init__(self, kelvin: float) -> None:
        self.kelvin = kelvin

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Temperature) and other.kelvin == self.kelvin

    def __hash__(self) -> int:
        return hash(self.kelvin)


class Weather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    now: Annotated[
        Temperature,
        pydantic.BeforeValidator(lambda it: it if isinstance(it, Temperature) else Temperature(it)),
        pydantic.PlainSerializer(lambda it: it.kelvin, return_type=float),
    ]


ADDRESS = Address(streetName="Main St", since=date(2020, 2, 29))
NOW = datetime(2026, 3, 1, 12, 30, 0, 123456, tzinfo=UTC)
ORDER = Order(total=Decimal("9.90"), at=NOW, colours={Colour.RED}, address=ADDRESS)

CARRIED: list[tuple[Any, Any]] = [
    (int, 2**70),
    (float, 1.5),
    (bytes, b"\x00\xff"),
    (list[bytes], [b"\x00\xff", b""]),
    (bytearray, bytearray(b"\x00\xff")),
    (datetime, NOW),
    (datetime, NOW.replace(tzinfo=None)),
    (date, date(2026, 3, 1)),
    (time, time(1, 2, 3, 4)),
    (timedelta, timedelta(days=-1, microseconds=7)),
    (Decimal, Decimal("1.10")),
    (UUID, UUID(int=7)),
    (Path, Path("photos/Zoë.png")),
    (PurePosixPath, PurePosixPath("/srv")),
    (UserId, UserId(7)),
    (Colour, Colour.BLUE),
    (Level, Level.LOW),
    (Access, Access.READ | Access.WRITE),
    (dict[Size, Level], {Size.BIG: Level.LOW}),
    (dict[int, set[UUID]], {7: {UUID(int=7)}}),
    (dict[date, timedelta], {date(2026, 3, 1): timedelta(1)}),
    (dict[str, object], {"a": [1, {"b": None}]}),
    (set[tuple[int, str]], {(1, "a"), (2, "b")}),
    (frozenset[int], frozenset({1, 2})),
    (tuple[int, ...], (1, 2, 3)),
    (Sequence[Point], [Point(1, 2.5)]),
    (Mapping[str, Options], {"a": {"width": 3, "until": NOW}}),
    (Item, Item("cup", Decimal("3.50"), date(2026, 3, 1), [Item("handle", Decimal(1))])),
    (Item | None, None),
    (Item | list[Item] | int, [Item("cup", Decimal(1))]),
    (int | str | None, "7"),
    (int | Decimal, Decimal(7)),
    (list[Cat | Dog], [Dog({"sit"}), Cat(9)]),
    (Literal["fast", "slow", 3], 3),
    (Annotated[int, msgspec.Meta(gt=0)], 7),
    (Order, ORDER),
    (list[Order] | None, [ORDER]),
    (dict[str, Address], {"home": ADDRESS}),
    (Weather, Weather(now=Temperature(280.5))),
    (Order | Refund, Refund(reason="late")),
    (list[Order | Refund | str], [ORDER, "text", Refund(reason="late")]),
    (Annotated[Order | Refund, pydantic.Field(discriminator="kind")], ORDER),
    (list[Order | bytes], [ORDER, b"\xfb\xff\xfe"]),
]


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    async with ff.Fabric(valkey.url) as fabric:
        yield fabric


def offline() -> ff.Fabric:
    """An application that is never connected."""
    return ff.Fabric("valkey://127.0.0.1:1")


def echo(hint: Any) -> Callable[..., Any]:
    """A function that takes a value of this type and returns it."""

    async def same(value: Any, other: Any = None) -> Any:
        assert other is None or other == value
        seen.append(value)
        return value

    seen: list[Any] = []
    same.__annotations__ = {"value": hint, "other": hint | None, "return": hint}
    return same


async def test_types_arrive_as_they_were_sent(app: ff.Fabric) -> None:
    tasks = [app.task(f"echo_{n}")(echo(hint)) for n, (hint, _) in enumerate(CARRIED)]
    async with app.worker():
        sent = [await task.submit(value) for task, (_, value) in zip(tasks, CARRIED, strict=True)]
        by_name = [
            await task.submit(value=value, other=value)
            for task, (_, value) in zip(tasks, CARRIED, strict=True)
        ]
        for runs in (sent, by_name):
            for run, (hint, value) in zip(runs, CARRIED, strict=True):
                result = await run.result(timeout=20)
                assert (result, type(result)) == (value, type(value)), hint


class Plain:
    pass


class Mixed(Enum):
    A = 1
    B = "b"


@dataclass
class Nested:
    inside: list[Plain]


class Holder(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    inside: list[Plain]


class Hook(pydantic.BaseModel):
    call: Callable[[], int]


REFUSED: list[tuple[Any, str]] = [
    (Holder, "contains Plain, which JSON cannot represent. Take or return a dataclass"),
    (list[Order | Holder], "contains Plain, which JSON cannot represent"),
    (Hook, "contains a function or a class, which JSON cannot represent"),
    (Plain, "contains Plain, which is not supported. Take or return a dataclass, a pydantic"),
    (Nested, "(Nested) contains Plain"),
    (Plain | None, "contains Plain"),
    (complex, "contains complex"),
    (Fraction, "contains Fraction"),
    (re.Pattern[str], "contains Pattern"),
    (Callable[[], int], "contains Callable"),
    (Exception, "contains Exception"),
    (Iterable[int], "contains Iterable, which is not supported. Use list instead."),
    (deque[int], "contains deque, which is not supported. Use list instead."),
    (Counter[str], "contains Counter, which is not supported. Use dict instead."),
    (OrderedDict[str, int], "Use dict instead."),
    (dict[tuple[int, int], str], "has dictionary keys that JSON cannot represent. Use keys"),
    (dict[int | str, str], "has dictionary keys that JSON cannot represent"),
    (dict[str, dict[bool, str]], "has dictionary keys that JSON cannot represent"),
    (str | bytes, "has types that JSON cannot tell apart: Type unions may not contain more than"),
    (Item | Nested, "Use tagged msgspec.Struct classes, pydantic models, or only one of these"),
    (Item | Plain, "has types that JSON cannot tell apart"),
    (Mixed, "is not supported: Enums must contain either all str or all int values"),
    (Literal[b"a"], "is not supported: Literal may only contain"),
    (list[Order | Plain], "is not supported: "),
    (pydantic.HttpUrl, "contains HttpUrl"),
    (msgspec.Raw, "contains msgspec.Raw"),
]


@pytest.mark.parametrize(("hint", "problem"), REFUSED, ids=lambda each: str(each)[:30])
def test_what_cannot_be_carried_is_refused_where_the_task_is_defined(
    hint: Any, problem: str
) -> None:
    def takes(size: int, value: Any) -> None: ...

    def returns() -> Any: ...

    app = offline()
    takes.__annotations__["value"] = returns.__annotations__["return"] = hint
    for function, what, name in (
        (takes, "the parameter 'value' (", "value"),
        (returns, "the result (", "return"),
    ):
        with pytest.raises(ff.ConfigError, match=re.escape(problem)) as caught:
            app.task(function)
        assert caught.value.message.startswith(f"{function.__name__}(): {what}")
        assert caught.value.field == name
    assert app.tasks == {}


def test_annotations_that_promise_nothing_are_accepted() -> None:
    app = offline()

    @app.task
    def stop(anything: Any, thing: object, untyped=None) -> NoReturn:  # type: ignore[no-untyped-def] # pyright: ignore[reportMissingParameterType]
        raise SystemExit

    assert stop.arguments.convert([1, [2], None], {}) == ([1, [2], None], {})


MISFITS: list[tuple[str, bytes, str]] = [
    ("size", b'["big"]', "the argument 'size' does not fit int: Expected `int`, got `str`"),
    ("size", b'{"size": null}', "the argument 'size' does not fit int: Expected `int`, got `null`"),
    ("size", b"[1, 2]", "takes 1 argument, got 2"),
    ("size", b"{}", "the argument 'size' is missing"),
    ("size", b'{"scale": 2}', "the argument 'size' is missing and there is no parameter 'scale'"),
    ("size", b"{not json", "JSON is malformed"),
    ("item", b'[{"name": "x"}]', "the argument 'item' does not fit Item: Object missing required"),
    ("picky", b"[-1]", "the argument 'number' does not fit Picky: KeyError: -1"),
    (
        "order",
        b'[{"secret": "4711"}]',
        "Order: total: Field required; at: Field required; secret: ",
    ),
    ("either", b'[{"kind": "gift"}]', "the argument 'what' does not fit Order | Refund: Input tag"),
]


class Picky(pydantic.RootModel[int]):
    @pydantic.field_validator("root")
    @classmethod
    def _check(cls, number: int) -> int:
        if number < 0:
            raise KeyError(number)
        return number


async def test_a_payload_that_does_not_fit_fails_once(app: ff.Fabric) -> None:
    retry = ff.Retry(5, backoff="1ms", categories=("extractor_payload_decode", "handler_error"))

    @app.task(retry=retry)
    async def size(size: int) -> None: ...

    @app.task(retry=retry)
    def item(item: Item) -> None: ...

    @app.task(retry=retry)
    async def picky(number: Picky) -> None: ...

    @app.task(retry=retry)
    async def order(order: Order) -> None: ...

    @app.task(retry=retry)
    async def either(
        what: Annotated[Order | Refund, pydantic.Field(discriminator="kind")],
    ) -> None: ...

    async with app.worker():
        client = await app.client()
        for name, payload, problem in MISFITS:
            policy = app.tasks[name].shared.policy
            stored = await client.submit(name, payload, policy=policy)
            with pytest.raises(ff.ExecutionFailed) as caught:
                await app.get_run(stored.execution_id).result(timeout=20)
            info = caught.value.info
            assert (info.failure_category, info.total_attempt_count) == (
                "extractor_payload_decode",
                1,
            )
            assert problem in (info.failure_reason or ""), payload
            assert "4711" not in (info.failure_reason or "")


async def test_a_result_that_does_not_fit_names_the_model(app: ff.Fabric) -> None:
    @app.task(name="order")
    async def older() -> dict[str, str]:
        return {"total": "1"}

    other = offline()

    @other.task(name="order")
    async def newer() -> Order: ...

    async with app.worker():
        run = await older.submit()
        await run.result(timeout=20)
        with pytest.raises(ff.UnexpectedResult, match="does not fit Order: at: Field required"):
            await app.get_run(run.id, newer).result(timeout=20)


async def test_models_in_signals_and_frames(waiting_app: ff.Fabric, engine: Engine) -> None:
    app = waiting_app

    @app.task(retry=ff.Retry(5, backoff="1ms"))
    async def ship(ctx: ff.Context) -> Order:
        answer = await ctx.wait_for("order")
        await ctx.stream([ADDRESS])
        return answer.payload_as(Order)

    async with app.worker():
        run, other = await ship.submit(), await ship.submit()
        await parked(engine, run)
        await run.signal("order", "given", ORDER)
        assert await run.result(timeout=20) == ORDER
        [frame] = [frame async for frame in run.stream()]
        assert frame.json(list[Address]) == [ADDRESS]
        assert frame.json() == [{"street": "Main St", "since": "2020-02-29"}]
        with pytest.raises(ff.PayloadMismatch, match=r"frame .* does not fit Order: "):
            frame.json(Order)

        await parked(engine, other)
        await other.signal("order", "given", {"total": 1})
        with pytest.raises(ff.ExecutionFailed, match="the payload of 'given' does not fit Order: "):
            await other.result(timeout=20)
        info = await other.info()
        assert info.failure_category == "extractor_payload_decode"
        assert info.total_attempt_count == 1


def test_pydantic_is_not_imported_for_programs_without_it() -> None:
    program = (
        "import sys, flowfabric as ff\n"
        "app = ff.Fabric('valkey://127.0.0.1:1')\n"
        "@app.task\n"
        "def add(a: int, b: list[int] | None = None) -> int: return a\n"
        "assert add.encode((1, [2]), {}) == b'[1,[2]]'\n"
        "assert add.arguments.convert([1, [2]], {}) == ([1, [2]], {})\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
