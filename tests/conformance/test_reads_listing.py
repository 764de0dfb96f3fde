"""What listings refuse: a wrong filter would look like an empty deployment (02 §12.1)."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.state import PublicState
from flowfabric.engine.api.reads import Filter
from tests.support.engine import LANE, Engine, refused


async def test_an_unknown_state_is_refused_with_the_known_ones(engine: Engine) -> None:
    call = engine.backend.listings.list_executions(where=Filter(state="nonsense"))
    error = await refused(call, "invalid_input")
    for state in PublicState:
        assert state.value in error.detail
    call = engine.backend.listings.list_lane(LANE, "nonsense", partition=0)
    assert "eligible, delayed, active" in (await refused(call, "invalid_input")).detail


@pytest.mark.parametrize("state", list(PublicState))
async def test_every_public_state_is_a_filter(engine: Engine, state: PublicState) -> None:
    waiting = await engine.create()
    page = await engine.backend.listings.list_executions(where=Filter(state=state.value))
    found = [row.execution_id for row in page.executions]
    assert found == ([waiting] if state is PublicState.WAITING else [])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"partition": "x"}, "partition"),
        ({"partition": True}, "partition"),
        ({"partition": 256}, "partition"),
        ({"partition": -1}, "partition"),
        ({"partition": 1.0}, "partition"),
        ({"limit": None}, "limit"),
        ({"limit": "5"}, "limit"),
        ({"limit": True}, "limit"),
        ({"where": {"lane": "x"}}, "where"),
        ({"where": Filter(state=5)}, "state"),  # pyright: ignore[reportArgumentType]
        ({"where": Filter(lane="")}, "lane"),
        ({"where": Filter(lane=5)}, "lane"),  # pyright: ignore[reportArgumentType]
        ({"where": Filter(namespace="a b")}, "namespace"),
        ({"where": Filter(kind=5)}, "kind"),  # pyright: ignore[reportArgumentType]
        ({"where": Filter(tags=["a"])}, "tags"),  # pyright: ignore[reportArgumentType]
        ({"where": Filter(tags={"a": 5})}, "tags"),  # pyright: ignore[reportArgumentType]
    ],
)
async def test_wrong_arguments(engine: Engine, options: dict[str, Any], field: str) -> None:
    await engine.create()
    error = await refused(engine.backend.listings.list_executions(**options), "invalid_input")
    assert error.detail.startswith(f"{field}: ")


@pytest.mark.parametrize("cursor", [5, b"x", ["a"]])
@pytest.mark.parametrize("partition", [None, 3])
async def test_a_cursor_is_text(engine: Engine, cursor: Any, partition: int | None) -> None:
    call = engine.backend.listings.list_executions(cursor=cursor, partition=partition)
    await refused(call, "invalid_cursor")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"partition": None}, "partition"),
        ({"partition": "x"}, "partition"),
        ({"limit": None}, "limit"),
    ],
)
async def test_wrong_arguments_of_a_lane(
    engine: Engine, options: dict[str, Any], field: str
) -> None:
    given: dict[str, Any] = {"partition": 0, **options}
    call = engine.backend.listings.list_lane(LANE, "eligible", **given)
    assert (await refused(call, "invalid_input")).detail.startswith(f"{field}: ")
    wrong: Any = ["eligible"]
    await refused(engine.backend.listings.list_lane(LANE, wrong, partition=0), "invalid_input")
