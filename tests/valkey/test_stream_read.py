"""Range reads: pages, bounds, filters, gaps, refusals."""

from __future__ import annotations

from flowfabric.core.contracts.leases import Handle
from flowfabric.engine.valkey.streams import summary_of
from tests.conformance.test_stream_read import LARGEST, numbers, read
from tests.support.engine import Engine
from tests.support.storage import stream_key
from tests.support.streams import append


async def at(engine: Engine, handle: Handle, *ids: str) -> None:
    """Entries with ids of our choice, as the store holds them."""
    for number, entry in enumerate(ids):
        await engine.backend.transport.call(
            "XADD", stream_key(handle), entry, "t", "event", "p", str(number)
        )


async def test_milliseconds(engine: Engine) -> None:
    handle = await engine.running()
    await append(engine, handle, b"")
    await engine.backend.transport.call("DEL", stream_key(handle))
    await at(engine, handle, "5-0", "5-7", "6-0", "6-3", "7-0")
    for bounds, found in [
        ({"from_": "6"}, [2, 3, 4]),
        ({"to": "6"}, [0, 1, 2, 3]),
        ({"from_": "5", "to": "5"}, [0, 1]),
        ({"from_": "5-1", "to": "6-0"}, [1, 2]),
        ({"from_": "0", "to": "4"}, []),
        ({"from_": "8"}, []),
        ({"from_": str(LARGEST)}, []),
        ({"from_": f"{LARGEST}-{LARGEST}", "to": f"{LARGEST}-{LARGEST}"}, []),
        ({"from_": "007-0"}, [4]),
    ]:
        assert numbers(await read(engine, handle, **bounds)) == found, bounds


# --- replies of both protocols ------------------------------------------------------------------


def test_summaries_decode_from_maps_and_flat_lists() -> None:
    fields = {
        b"document": b"{}",
        b"version": b"2",
        b"patch_kind": b"json-merge-patch",
        b"last_updated_ms": b"20",
        b"first_applied_ms": b"10",
    }
    flat = [part for pair in fields.items() for part in pair]
    found = summary_of("s", fields)
    assert found is not None
    assert (found.version, found.last_updated_ms, found.first_applied_ms) == (2, 20, 10)
    assert summary_of("s", flat) == found
    assert summary_of("s", {}) is None
    assert summary_of("s", []) is None
