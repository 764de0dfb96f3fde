"""Why work waits: what the live workers of its lane and namespace lack (02 §12, 01 §8)."""

from __future__ import annotations

import pytest

from tests.conformance.test_reads_coverage import NEEDS, lacking, register
from tests.support.engine import Engine


async def test_every_page_of_the_registry_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.valkey.pages._CHUNK", 2)
    execution_id = await engine.create(policy=NEEDS)
    for instance in ("a", "b", "c", "d"):
        await register(engine, instance)
    await register(engine, "e", "cuda", "gpu")
    assert await lacking(engine, execution_id) == (("ssd",), 5)
