"""Operations that a backend leaves out raise `unavailable`."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.errors import UnavailableError
from flowfabric.engine.api.places import Lanes


class OneLane(Lanes):
    """A store that can list lanes and no more."""

    async def list_lanes(self, *_: Any, **__: Any) -> Any:
        return ["default"], None


async def test_an_operation_left_out_is_unavailable_by_its_name() -> None:
    lanes = OneLane()  # pyright: ignore[reportAbstractUsage] - what it leaves out is the point
    assert await lanes.list_lanes() == (["default"], None)
    with pytest.raises(UnavailableError) as caught:
        await lanes.set_lane_state("default", "paused")
    assert (caught.value.code, caught.value.op) == ("unavailable", "set_lane_state")
