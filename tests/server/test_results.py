"""`GET …/result`: bytes, headers, and what is not there."""

from __future__ import annotations

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.engine.valkey import keys
from tests.support.engine import Engine
from tests.support.http import Http
from tests.support.subjects import Subjects

_DAY_MS = 86_400_000


async def complete(http: Http, engine: Engine, **item: object) -> tuple[str, dict[str, object]]:
    """Complete an execution over HTTP: its path, and the row of the answer."""
    facts = await Subjects(engine, http).make("running")
    body = {"items": [{"handle": facts["handle"], "result": [1, 255], **item}]}
    answer = await http.post("/v1/remote/complete", body)
    return f"/v1/executions/{facts['id']}/result", answer.json["results"][0]


async def test_a_result_is_sent_as_it_was_stored(http: Http, engine: Engine) -> None:
    path, _ = await complete(http, engine, result_encoding="application/x; v=1")
    found = await http.get(path)
    assert (found.status, found.body) == (200, b"\x01\xff")
    assert found.headers["content-type"] == "application/octet-stream"
    assert found.headers["x-ff-payload-encoding"] == "application/x; v=1"
    assert found.headers["x-ff-public-state"] == "completed"
    head = await http.send("HEAD", path)
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "2")
    assert head.headers["x-ff-payload-encoding"] == "application/x; v=1"


async def test_an_empty_result_is_a_result(http: Http, engine: Engine) -> None:
    path, _ = await complete(http, engine, result=[])
    found = await http.get(path)
    assert (found.status, found.body) == (200, b"")
    assert found.headers["content-type"] == "application/octet-stream"
    assert found.headers["content-length"] == "0"


@pytest.mark.parametrize("encoding", ["a\r\nx-evil: 1", "a\x00", "größe", "x" * 257, "\x7f"])
async def test_encodings_are_header_values(http: Http, engine: Engine, encoding: str) -> None:
    path, row = await complete(http, engine, result_encoding=encoding)
    assert (row["status"], row["kind"]) == (400, "invalid_input")
    problem = "must be at most 256 printable ASCII characters"
    assert row["detail"] == f"result_encoding: {problem}"
    assert (await http.get(path)).kind == (404, "result_not_found")
    body = {"namespace": "default", "execution_kind": "x", "payload_encoding": encoding}
    refused = await http.post("/v1/executions", body)
    assert (refused.status, refused.json["detail"]) == (400, f"payload_encoding: {problem}")


async def test_a_stored_encoding_that_is_no_header_value_is_escaped(
    http: Http, engine: Engine
) -> None:
    """A record that something else wrote must not end the connection."""
    path, _ = await complete(http, engine, result_encoding="json")
    execution_id = ExecutionId(path.split("/")[3])
    key = keys.core(execution_id.tag, execution_id)
    stored = await engine.backend.transport.call("HGET", key, "result_encoding")
    assert stored == b"json"
    await engine.backend.transport.call("HSET", key, "result_encoding", "a\r\nx-evil: é")
    answer = await http.get(path)
    assert (answer.status, answer.body) == (200, b"\x01\xff")
    assert answer.headers["x-ff-payload-encoding"] == "a%0D%0Ax-evil: %C3%A9"
    assert "x-evil" not in answer.headers


async def test_what_is_not_there(http: Http, engine: Engine) -> None:
    subjects = Subjects(engine, http)
    unknown = (await subjects.make("unknown"))["id"]
    missing = await http.get(f"/v1/executions/{unknown}/result")
    text = f"execution result not found: {unknown}"
    assert (*missing.kind, missing.json["error"]) == (404, "execution_not_found", text)
    waiting = (await subjects.make("waiting"))["id"]
    none = await http.get(f"/v1/executions/{waiting}/result")
    assert none.kind == (404, "result_not_found")
    assert none.headers["x-ff-public-state"] == "waiting"
    late = await http.get(f"/v1/executions/{waiting}/result?wait_ms=1")
    assert (late.status, late.json) == (202, {"public_state": "waiting"})
    assert late.headers["x-ff-public-state"] == "waiting"
    without = await engine.running()
    await engine.backend.executions.complete(without)
    nothing = await http.get(f"/v1/executions/{without.execution_id}/result")
    assert nothing.kind == (404, "result_not_found")
    assert nothing.headers["x-ff-public-state"] == "completed"


async def test_a_trimmed_result_went_with_its_execution(http: Http, engine: Engine) -> None:
    path, _ = await complete(http, engine)
    execution_id = ExecutionId(path.split("/")[3])
    lane_id = (await engine.backend.reads.read_execution_info(execution_id)).lane_id
    await engine.advance(7 * _DAY_MS)
    trimmed = await engine.backend.upkeep.trim_retention(execution_id.tag, lane_id, [execution_id])
    assert trimmed == ["purged"]
    gone = await http.get(path)
    text = f"execution result not found: {execution_id}"
    assert (*gone.kind, gone.json["error"]) == (404, "execution_not_found", text)
