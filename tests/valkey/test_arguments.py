"""Arguments of the wrong type or form: `invalid_input` naming the field, nothing written.

The second half is mechanical: every parameter of every public operation, and every field of what
is passed as one, gets values of types that it does not take.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import msgspec
import pytest

from flowfabric.core.errors import FlowFabricError, ValidationError
from flowfabric.core.partition import PartitionCounts
from tests.conformance.argument_calls import CALLS, operation, parameters
from tests.conformance.test_arguments import SURROGATE, call
from tests.support.engine import Engine, prepared_backend
from tests.support.leaks import find_leaks
from tests.support.server import TestServer
from tests.support.suspension import SECRET

# --- the mechanical part ------------------------------------------------------------------------

WRONG: list[Any] = [
    *(None, 50_000, -1, 2**70, 1.5, math.nan, True, b"x", "x", SURROGATE),
    *([], [None], {}, (), object()),
]
STARRED = "wanted"
NOTED = {"invalid_token"}
OTHER_NAMES = {
    "from_": "cursor",
    "to": "cursor",
    "after": "cursor",
    "new_kid": "invalid_kid",
    "new_secret_hex": "invalid_secret_hex",
    "secret_hex": "invalid_secret_hex",
    "worker_capabilities": "invalid_capabilities",
    "required": "invalid_capabilities",
    "lanes": "lane_id",
    "key": "invalid_tag_key",
    "waitpoint_key": "invalid_waitpoint_key",
    "waitpoint_token": "invalid_token",
    "presented": "invalid_token",
}


@pytest.fixture(scope="module")
def small_server() -> Iterator[TestServer]:
    server = TestServer()
    yield server
    server.stop()


@pytest.fixture
async def small(small_server: TestServer) -> AsyncIterator[Engine]:
    """An engine of few partitions: its whole keyspace is quickly compared."""
    counts = PartitionCounts(flow=2, budget=1, quota=1)
    async with prepared_backend(small_server.url, counts) as client:
        await client.secrets.seed_at_boot(SECRET)
        yield Engine(client)
        assert await find_leaks(client) == []


def spoiled(value: Any, field: str, wrong: Any) -> Any:
    """A struct, or the one struct of a list, with one field of the wrong type."""
    if isinstance(value, list):
        return [spoiled(value[0], field, wrong)]
    return msgspec.structs.replace(value, **{field: wrong})


def fields_of(value: Any) -> tuple[str, ...]:
    """What can be spoiled inside an argument."""
    if isinstance(value, list) and value:
        value = cast("list[Any]", value)[0]
    return value.__struct_fields__ if isinstance(value, msgspec.Struct) else ()


class Sweep:
    """Calls of one operation, each with one thing wrong.

    A call that is refused has changed nothing, so what was made for it serves the next one, too.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self.given: dict[str, Any] = {}
        self._before: dict[bytes, bytes] = {}

    async def begin(self) -> None:
        self.given = await CALLS[self._name](self._engine)
        self._before = await self._engine.digest()

    async def spoil(self, parameter: str, field: str, wrong: Any) -> None:
        """Whatever becomes of the call, it is an answer, or an error of ours and no change."""
        about = f"{self._name}({parameter}{'.' if field else ''}{field}={wrong!r})"
        error = await self._error(parameter, field, wrong)
        if error is None:
            await self.begin()
            return
        assert isinstance(error, FlowFabricError), f"{about}: {error!r}"
        if isinstance(error, ValidationError) and error.code in NOTED:
            await self.begin()
            return
        assert await self._engine.digest() == self._before, about
        if not field and isinstance(error, ValidationError):
            known = (parameter, OTHER_NAMES.get(parameter, parameter))
            assert any(name in str(error) for name in known), f"{about}: {error}"

    async def _error(self, parameter: str, field: str, wrong: Any) -> Exception | None:
        given = dict(self.given)
        try:
            if field:
                given[parameter] = spoiled(given[parameter], field, wrong)
            else:
                given[parameter] = (wrong,) if parameter == STARRED else wrong
            await call(self._engine, self._name, given)
        except Exception as error:  # noqa: BLE001 - which one it is, is the question
            return error
        return None


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_wrong_types(small: Engine, name: str) -> None:
    sweep = Sweep(small, name)
    await sweep.begin()
    await call(small, name, sweep.given)
    await sweep.begin()
    for parameter in parameters(operation(small.backend, name)):
        for field in ("", *fields_of(sweep.given.get(parameter))):
            for wrong in WRONG:
                await sweep.spoil(parameter, field, wrong)
