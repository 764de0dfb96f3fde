"""Every operation takes the compact spelling of an id; what is stored and answered is canonical."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.executions import Created, NewExecution
from tests.conformance.argument_calls import CALLS, methods_with
from tests.conformance.test_arguments import call
from tests.support.engine import Engine
from tests.support.suspension import SECRET


@pytest.mark.parametrize("name", methods_with("execution_id"))
async def test_an_operation_on_an_execution(engine: Engine, name: str) -> None:
    await engine.backend.secrets.seed_at_boot(SECRET)
    given = await CALLS[name](engine)
    compact = given["execution_id"].compact
    answer = await call(engine, name, given | {"execution_id": compact})
    assert compact not in repr(answer)
    assert compact.encode() not in b" ".join(await engine.dump())


async def test_a_creation(engine: Engine) -> None:
    named, untouched = engine.new_id(), engine.new_id()
    compact: Any = named.compact
    items = [
        NewExecution(execution_id=compact, execution_kind="job", partition_id=named.partition),
        NewExecution(execution_id=untouched, execution_kind="job"),
    ]
    outcomes = await engine.backend.executions.create_many(items)
    assert [type(outcome) for outcome in outcomes] == [Created, Created]
    listed = await engine.backend.listings.list_executions()
    assert {row.execution_id for row in listed.executions} == {named, untouched}
    assert items[0].execution_id == compact


async def test_a_position_in_a_listing(engine: Engine) -> None:
    ids = sorted([await engine.create() for _ in range(3)])
    listings, partition = engine.backend.listings, ids[0].partition
    page = await listings.list_executions(partition=partition, cursor=ids[0].compact)
    assert [row.execution_id for row in page.executions] == ids[1:]
