from tests.support.engine import Engine


async def test_create_claim_complete(engine: Engine) -> None:
    execution_id = await engine.create(input_payload=b"\x00\xff")
    claim = await engine.claim()
    assert claim.input_payload == b"\x00\xff"
    await engine.backend.executions.complete(claim.handle, b"\xff\x00")
    assert await engine.backend.reads.get_execution_result(execution_id) == b"\xff\x00"
    assert [event.type for event in await engine.events(execution_id)] == ["acquired", "completion"]
