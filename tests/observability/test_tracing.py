"""Spans from the submit to the end, across workers, and nothing at all when tracing is off."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import flowfabric as ff
from flowfabric.core.contracts.budgets import NewBudget
from flowfabric.core.contracts.flows import AlreadySubmitted
from flowfabric.core.contracts.suspension import Accepted
from flowfabric.core.errors import ConfigError
from flowfabric.core.ids import new_uuid
from flowfabric.core.tags import TRACE_TAG
from flowfabric.engine.layers import tracing
from flowfabric.engine.layers.tracing import Tracing
from flowfabric.engine.valkey import keys
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.server.conftest import serving
from tests.support.engine import Engine, prepared_backend, refused
from tests.support.flows import graph, submitted
from tests.support.http_engine import over_http
from tests.support.sdk import until
from tests.support.server import TestServer
from tests.support.suspension import Waits

REMOTE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@cache
def exporter() -> InMemorySpanExporter:
    """What the one tracer provider of this process records."""
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    return memory


class Spans:
    """The spans of a test."""

    def all(self, name: str) -> list[ReadableSpan]:
        return [span for span in exporter().get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.all(name)
        return span

    def names(self) -> list[str]:
        return [span.name for span in exporter().get_finished_spans()]


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.fixture
def traced() -> Iterator[Tracing]:
    exporter().clear()
    yield tracing.enable()
    tracing.disable()


@pytest.fixture
def spans(traced: Tracing) -> Spans:
    return Spans()


@pytest.fixture
async def backend(valkey: TestServer, traced: Tracing) -> AsyncIterator[ValkeyBackend]:
    async with prepared_backend(valkey.url) as prepared:
        yield prepared


@pytest.fixture
async def app(engine: Engine, valkey: TestServer) -> AsyncIterator[ff.Fabric]:
    fabric = ff.Fabric(valkey.url)
    yield fabric
    await fabric.aclose()


async def test_one_trace_from_submit_to_complete(app: ff.Fabric, spans: Spans) -> None:
    @app.task
    async def child() -> str:
        return "done"

    @app.task
    async def parent() -> None:
        await child.submit()

    run = await parent.submit()
    async with app.worker():
        await run.result(timeout=10)
        await until(lambda: len(spans.all("ff.complete_execution")) == 2, "both ends")
    first, second = spans.all("ff.create_execution")
    ran, ran_child = spans.one("ff.run parent"), spans.one("ff.run child")
    assert parent_of(first) is None
    assert parent_of(ran) == id_of(first)
    assert parent_of(second) == id_of(ran)
    assert parent_of(ran_child) == id_of(second)
    claims = spans.all("ff.claim_execution")
    assert {parent_of(claim) for claim in claims} == {id_of(first), id_of(second)}
    ends = spans.all("ff.complete_execution")
    assert {parent_of(end) for end in ends} == {id_of(ran), id_of(ran_child)}
    every = [first, second, ran, ran_child, *claims, *ends]
    assert len({span.context.trace_id for span in every if span.context is not None}) == 1
    found = attributes(ran)
    assert found["ff.task"] == "parent"
    assert found["ff.attempt"] == 1
    assert found["ff.execution_id"].endswith(run.id.rpartition(":")[2])
    assert ran.kind is trace.SpanKind.CONSUMER
    assert first.kind is trace.SpanKind.PRODUCER


async def test_every_attempt_of_a_retried_execution_is_in_its_trace(
    app: ff.Fabric, spans: Spans
) -> None:
    @app.task(retry=ff.Retry(1, backoff=ff.FixedBackoff(10)))
    async def flaky(ctx: ff.Context) -> None:
        if ctx.attempt == 1:
            raise ConnectionError("no route to host")

    run = await flaky.submit()
    async with app.worker():
        await run.result(timeout=20)
        await until(lambda: bool(spans.all("ff.complete_execution")), "the end")
    created = spans.one("ff.create_execution")
    first, second = spans.all("ff.run flaky")
    assert parent_of(first) == parent_of(second) == id_of(created)
    assert first.status.status_code is trace.StatusCode.ERROR
    assert first.status.description == "failed: ConnectionError: no route to host"
    assert second.status.status_code is trace.StatusCode.UNSET
    assert not first.links
    assert [link.context.span_id for link in second.links] == [id_of(created)]
    assert parent_of(spans.one("ff.fail_execution")) == id_of(first)


async def test_a_wait_and_what_resumed_it(app: ff.Fabric, spans: Spans, engine: Engine) -> None:
    await Waits.open(engine)

    @app.task
    async def ask(ctx: ff.Context) -> str:
        return (await ctx.wait_for("answer")).name

    run = await ask.submit()
    client = await app.client()
    async with app.worker():
        wait = await client.wait_until_suspended(run.id, timeout=10)
        await client.backend.signals.deliver_approval_signal(
            run.id, wait.waitpoints[0].waitpoint_id, "answer", decided_by="ada"
        )
        assert await run.result(timeout=10) == "answer"
    created = spans.one("ff.create_execution")
    before, after = spans.all("ff.run ask")
    assert parent_of(before) == parent_of(after) == id_of(created)
    assert parent_of(spans.one("ff.suspend")) == id_of(before)
    assert parent_of(spans.one("ff.claim_resumed_execution")) == id_of(created)
    assert attributes(after)["ff.resumed_by"] == "signal"
    assert [link.context.span_id for link in after.links] == [id_of(created)]
    signalled = spans.one("ff.deliver_approval_signal")
    assert attributes(signalled)["ff.execution_id"] == str(run.id)
    assert not any("ada" in str(value) for value in attributes(signalled).values())


async def test_members_of_a_flow_belong_to_its_submit(engine: Engine, spans: Spans) -> None:
    flow = await submitted(engine, "a>b")
    span = spans.one("ff.submit_flow")
    assert attributes(span) == {"ff.flow_id": flow.flow_id, "ff.count": 2}
    for execution_id in flow.nodes.values():
        stored = await engine.backend.reads.get_execution_tag(execution_id, TRACE_TAG)
        assert stored is not None
        assert stored.split("-")[2] == f"{id_of(span):016x}"


async def test_a_flow_that_is_submitted_again_is_the_same(engine: Engine, spans: Spans) -> None:
    twice = graph("a>b")
    await engine.backend.flows.submit_flow(twice)
    outcome = await engine.backend.flows.submit_flow(twice)
    assert isinstance(outcome, AlreadySubmitted)
    assert len(spans.all("ff.submit_flow")) == 2


async def test_a_flow_that_grows(engine: Engine, spans: Spans) -> None:
    flow, more = await submitted(engine, "a"), graph("b>c")
    for _ in range(2):
        await engine.backend.flows.extend_flow(flow.flow_id, more.nodes, more.edges)
    first, _ = spans.all("ff.extend_flow")
    page = await engine.backend.flows.list_members(flow.flow_id)
    (added,) = [one.execution_id for one in page.entries if one.node == "b"]
    stored = await engine.backend.reads.get_execution_tag(added, TRACE_TAG)
    assert stored is not None
    assert stored.split("-")[2] == f"{id_of(first):016x}"


async def test_a_batch_shares_one_span(engine: Engine, app: ff.Fabric, spans: Spans) -> None:
    @app.task
    async def noop() -> None: ...

    runs = await app.submit_many(noop, [()] * 3)
    assert attributes(spans.one("ff.create_many")) == {"ff.count": 3}
    tags = {await engine.backend.reads.get_execution_tag(run.id, TRACE_TAG) for run in runs}
    assert len(tags) == 1
    assert None not in tags


async def test_a_context_that_the_submitter_gives_is_kept(engine: Engine, spans: Spans) -> None:
    execution_id = await engine.create(tags={TRACE_TAG: REMOTE})
    assert await engine.backend.reads.get_execution_tag(execution_id, TRACE_TAG) == REMOTE


async def test_a_malformed_context_is_refused(engine: Engine) -> None:
    await refused(engine.create(tags={TRACE_TAG: "nonsense"}), "invalid_input")
    await refused(engine.create(tags={"ff.other": REMOTE}), "invalid_tag_key")


async def test_full_tags_leave_no_room_for_the_context(engine: Engine, spans: Spans) -> None:
    full = {f"app.t{number}": "x" for number in range(128)}
    execution_id = await engine.create(tags=full)
    assert await engine.backend.reads.get_execution_tags(execution_id) == full


async def test_a_refused_call_names_only_its_code(engine: Engine, spans: Spans) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle)
    await refused(
        engine.backend.executions.fail(handle, "a secret", "boom"), "execution_not_active"
    )
    span = spans.one("ff.fail_execution")
    assert span.status.description == "execution_not_active"
    assert attributes(span) == {
        "ff.backend": "valkey",
        "ff.code": "execution_not_active",
        "ff.execution_id": str(handle.execution_id),
        "ff.attempt_id": handle.attempt_id,
        "ff.lease_epoch": handle.lease_epoch,
    }
    assert not span.events


async def test_ids_passed_by_position_are_attributes(engine: Engine, spans: Spans) -> None:
    await Waits.open(engine)
    backend, handle = engine.backend, await engine.running()
    execution_id = handle.execution_id
    point = await backend.waitpoints.create_waitpoint(handle, "k", 60_000)
    token, waitpoint_id = point.waitpoint_token, point.waitpoint_id
    sent = await backend.signals.deliver_signal(execution_id, waitpoint_id, token, "go")
    assert isinstance(sent, Accepted)
    await backend.streams.read_stream(execution_id, 0)
    budget = new_uuid()
    limits: dict[str, Any] = {"hard_limits": (9, 9), "soft_limits": (0, 0)}
    await backend.budgets.create_budget(
        NewBudget(budget_id=budget, dimensions=("tokens", "usd"), **limits)
    )
    await backend.budgets.report_usage(handle, budget, {"tokens": 1, "usd": 2})
    submission = graph("a")
    await backend.flows.submit_flow(submission)
    await backend.flows.cancel_flow(submission.flow_id, "test")
    common = {"ff.backend": "valkey", "ff.execution_id": str(execution_id)}
    held = common | {"ff.attempt_id": handle.attempt_id, "ff.lease_epoch": 1}
    made = {"ff.waitpoint_id": waitpoint_id}
    assert attributes(spans.one("ff.create_waitpoint")) == held | made
    assert attributes(spans.one("ff.deliver_signal")) == (
        common | made | {"ff.signal_id": sent.signal_id}
    )
    assert attributes(spans.one("ff.read_stream")) == common | {"ff.attempt_index": 0}
    assert attributes(spans.one("ff.report_usage")) == (
        held | {"ff.budget_id": budget, "ff.dimensions": 2}
    )
    cancelled = attributes(spans.one("ff.cancel_flow"))
    assert cancelled == {"ff.backend": "valkey", "ff.flow_id": submission.flow_id}


async def test_a_block_continues_the_trace_of_a_request(engine: Engine, spans: Spans) -> None:
    with tracing.continued(REMOTE.encode()):
        await engine.create()
    with tracing.continued(None):
        await engine.create()
    first, second = spans.all("ff.create_execution")
    assert parent_of(first) == int(REMOTE.split("-")[2], 16)
    assert parent_of(second) is None


async def test_a_client_of_a_server_continues_its_trace(engine: Engine, spans: Spans) -> None:
    async with over_http(engine) as through:
        execution_id = await through.create()
    server, client = spans.all("ff.create_execution")
    assert parent_of(client) is None
    assert parent_of(server) == id_of(client)
    stored = await engine.backend.reads.get_execution_tag(execution_id, TRACE_TAG)
    assert stored is not None
    # Workers continue the span of the submitter.
    assert int(stored.split("-")[2], 16) == id_of(client)


async def test_a_trace_goes_through_the_server_to_the_worker(
    app: ff.Fabric, engine: Engine, spans: Spans
) -> None:
    @app.task
    async def resize() -> str:
        return "done"

    body = {"namespace": "default", "execution_kind": "resize", "input_payload_b64": ""}
    async with serving(engine) as http, app.worker():
        made = await http.post("/v1/executions", body, traceparent=REMOTE)
        execution_id = made.json["Created"]["execution_id"]
        state = await http.get(f"/v1/executions/{execution_id}/state?wait_ms=10000")
        assert state.json == "completed"
        await until(lambda: bool(spans.all("ff.complete_execution")), "the end")
    names = ("ff.create_execution", "ff.claim_execution", "ff.run resize", "ff.complete_execution")
    created, claimed, ran, completed = map(spans.one, names)
    assert f"{parent_of(created):016x}" == REMOTE.split("-")[2]
    assert parent_of(claimed) == parent_of(ran) == id_of(created)
    assert parent_of(completed) == id_of(ran)
    for span in (created, claimed, ran, completed):
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == REMOTE.split("-")[1]
        assert attributes(span)["ff.execution_id"] == execution_id


@pytest.mark.parametrize("header", ["", "nonsense", "00-0-0-01", "\xff" * 50])
async def test_a_request_without_a_usable_context_starts_its_own_trace(
    engine: Engine, spans: Spans, header: str
) -> None:
    async with serving(engine) as http:
        body = {"namespace": "default", "execution_kind": "resize"}
        assert (await http.post("/v1/executions", body, traceparent=header)).status == 201
    assert parent_of(spans.one("ff.create_execution")) is None


async def test_a_server_without_tracing_ignores_the_header(valkey: TestServer) -> None:
    tracing.disable()
    async with prepared_backend(valkey.url) as plain:
        async with serving(Engine(plain)) as http:
            body = {"namespace": "default", "execution_kind": "resize"}
            made = await http.post("/v1/executions", body, traceparent=REMOTE)
            path = f"/v1/executions/{made.json['Created']['execution_id']}"
            assert (await http.get(f"{path}/tags")).json == {}
        assert isinstance(tracing.continued(REMOTE.encode()), nullcontext)


async def test_without_tracing_nothing_is_stored_or_wrapped(valkey: TestServer) -> None:
    exporter().clear()
    async with prepared_backend(valkey.url) as plain:
        engine = Engine(plain)
        execution_id = await engine.create()
        assert "create_execution" not in vars(plain.executions)
        core = await plain.transport.call("HGETALL", keys.core(execution_id.tag, execution_id))
        assert b"tagged" not in core
        assert not await plain.transport.call("EXISTS", keys.tags(execution_id.tag, execution_id))
    assert exporter().get_finished_spans() == ()


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("FF_TRACING", value)
    tracing.disable()
    try:
        assert (tracing.active() is not None) == on
    finally:
        tracing.disable()


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_TRACING", "ja")
    tracing.disable()
    with pytest.raises(ConfigError, match="FF_TRACING"):
        tracing.active()
    tracing.disable()


def test_an_application_turns_it_on() -> None:
    try:
        ff.Fabric(tracing=True)
        assert tracing.active() is not None
    finally:
        tracing.disable()
