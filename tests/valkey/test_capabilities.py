"""`capabilities()` says what the backend can do, and the backend does it."""

from __future__ import annotations

from flowfabric.engine.api.meta import Applied, NoOp
from tests.support.engine import Engine


async def test_prepare_says_whether_it_changed_anything(engine: Engine) -> None:
    assert await engine.backend.meta.prepare() == NoOp()
    await engine.backend.transport.call("FUNCTION", "FLUSH", key="")
    done = await engine.backend.meta.prepare()
    assert isinstance(done, Applied)
    assert "function library" in done.description
