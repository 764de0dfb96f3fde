"""Spans of OpenTelemetry across processes: submit, claim, handler, complete.

The context of the call that submits an execution is stored with it, in the tag `ff.traceparent`.
Off by default: without tracing a backend is not wrapped, nothing is stored, and OpenTelemetry is
not imported.
"""

import copy
import functools
import inspect
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.flows import FlowGraph, GraphNode
from flowfabric.core.contracts.leases import Claim, Handle
from flowfabric.core.environment import flag
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.core.tags import MAX_TAGS, TRACE_TAG
from flowfabric.core.version import __version__
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.api.concern import Refusal

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

Method = Callable[..., Any]
Tagged = TypeVar("Tagged", NewExecution, GraphNode)

VARIABLE = "FF_TRACING"
_CLAIM_NAMES = {"resumed": "ff.claim_resumed_execution", "reclaimed": "ff.reclaim_execution"}
_SPANS = {
    "executions": (
        *("complete_execution", "fail_execution", "cancel_execution", "delay_execution"),
        *("move_to_waiting_children", "replay_execution"),
    ),
    "claims": ("claim_execution", "claim_resumed_execution", "reclaim_execution"),
    "leases": ("renew_lease", "revoke_lease"),
    "suspensions": ("suspend", "resume_execution", "list_suspended"),
    "waitpoints": ("create_waitpoint", "close_waitpoint", "observe_signals"),
    "signals": ("deliver_signal", "deliver_approval_signal"),
    "streams": ("append_frames", "read_stream", "tail_stream", "read_summary"),
    "flows": ("cancel_flow", "replay_flow"),
    "budgets": ("report_usage", "record_spend", "release_budget"),
}
"""The operations that have a span `ff.<operation>`, by noun."""
_IDS = ("execution_id", "flow_id", "waitpoint_id", "budget_id", "signal_id")
"""Arguments that become attributes; others may contain secrets or payloads."""
_MADE = ("waitpoint_id", "signal_id")
"""Ids of a result that become attributes: the engine may have made them."""


class Tracing:
    """Makes spans with the tracer provider of the program."""

    def __init__(self) -> None:
        from opentelemetry import trace  # noqa: PLC0415 - only where tracing is wanted
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        self.api = trace
        self._propagator = TraceContextTextMapPropagator()

    @property
    def tracer(self) -> "Tracer":
        # Looked up each time, because programs may set a provider after importing FlowFabric.
        return self.api.get_tracer("flowfabric", __version__)

    def traceparent(self, span: "Span") -> str | None:
        """The context of a span as text; None without a tracer provider."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self.api.set_span_in_context(span))
        return carrier.get("traceparent")

    @property
    def current(self) -> str | None:
        """The context of the current span, as text."""
        return self.traceparent(self.api.get_current_span())

    def context(self, traceparent: str | None) -> "Context | None":
        """Parse a stored context."""
        if traceparent is None:
            return None
        return self._propagator.extract({"traceparent": traceparent})

    @contextmanager
    def span(self, name: str, attributes: Mapping[str, Any], **more: Any) -> Generator["Span"]:
        """A span around a block; an engine error marks it with its code."""
        # Exception messages are left out, because they may quote payloads.
        quiet = {"record_exception": False, "set_status_on_exception": False}
        with self.tracer.start_as_current_span(
            name, attributes=attributes, **quiet, **more
        ) as span:
            try:
                yield span
            except EngineError as error:
                span.set_attribute("ff.code", error.code)
                self.fail(span, error.code)
                raise
            except Exception as error:
                self.fail(span, type(error).__name__)
                raise

    def fail(self, span: "Span", why: str) -> None:
        """Mark a span as failed."""
        span.set_status(self.api.Status(self.api.StatusCode.ERROR, why))


_active: Tracing | None = None
_decided = False


def enable() -> Tracing:
    """Start tracing. Call it before connecting."""
    global _active, _decided
    if _active is None:
        _active, _decided = Tracing(), True
    return _active


def active() -> Tracing | None:
    """The `Tracing` of this process; None while tracing is off."""
    global _decided  # noqa: PLW0603
    if not _decided:
        _decided = True
        if flag(os.environ, VARIABLE):
            enable()
    return _active


def disable() -> None:
    """Stop tracing, for tests."""
    global _active, _decided
    _active, _decided = None, False


def continued(traceparent: bytes | None) -> AbstractContextManager[object]:
    """Let the spans of a block continue the trace that an HTTP header names."""
    if _active is None or traceparent is None:
        return nullcontext()
    return _attached(_active.context(traceparent.decode("latin-1")))


@contextmanager
def _attached(context: "Context | None") -> Generator[None]:
    from opentelemetry.context import attach, detach  # noqa: PLC0415

    token = attach(context) if context is not None else None
    try:
        yield
    finally:
        if token is not None:
            detach(token)


def trace(backend: Backend, tracing: Tracing) -> None:
    """Add spans to a backend's operations, and store the trace context with submissions."""
    wraps: dict[str, dict[str, Callable[[Method, Tracing], Method]]] = {
        noun: dict.fromkeys(names, _traced) for noun, names in _SPANS.items()
    }
    wraps["executions"] |= {"create_execution": _created, "create_many": _created_many}
    wraps["flows"] |= {
        "submit_flow": _submitted,
        "extend_flow": _grown,
        "spawn_children": _grown,
    }
    for noun, methods in wraps.items():
        concern = copy.copy(getattr(backend, noun))
        for name, wrap in methods.items():
            method = getattr(concern, name, None)
            if method is not None and not isinstance(method, Refusal):
                setattr(concern, name, wrap(method, tracing))
        setattr(backend, noun, concern)


def _attributes(args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The ids that a call names: of its execution, attempt and lease."""
    found: dict[str, Any] = {"ff.backend": "valkey"}
    for value in (*args, *options.values()):
        if isinstance(value, Handle):
            found["ff.execution_id"] = str(value.execution_id)
            found["ff.attempt_id"] = value.attempt_id
            found["ff.lease_epoch"] = value.lease_epoch
        elif isinstance(value, ExecutionId):
            found.setdefault("ff.execution_id", str(value))
    for name in _IDS:
        if isinstance(options.get(name), str):
            found.setdefault(f"ff.{name}", str(options[name]))
    if isinstance(options.get("attempt_index"), int):
        found["ff.attempt_index"] = options["attempt_index"]
    amounts = options.get("dimensions", options.get("deltas"))
    if isinstance(amounts, Sized):
        found["ff.dimensions"] = len(amounts)
    return found


def _traced(method: Method, tracing: Tracing) -> Method:
    name = {"append_frames": "append_frame"}.get(method.__name__, method.__name__)
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def call(*args: Any, **options: Any) -> Any:
        # By name, because callers may pass ids by position; a wrong call fails below.
        given = dict(zip(signature.parameters, args, strict=False)) | options
        with tracing.span(f"ff.{name}", _attributes((), given)) as span:
            outcome = await method(*args, **options)
            for made in _MADE:
                if isinstance(value := getattr(outcome, made, None), str):
                    span.set_attribute(f"ff.{made}", value)
            return outcome

    return call


def _tag(item: Tagged, traceparent: str | None) -> Tagged:
    """The item with the trace context, unless it has one already or its tags are full."""
    if traceparent is None or TRACE_TAG in item.tags or len(item.tags) >= MAX_TAGS:
        return item
    return msgspec.structs.replace(item, tags={**item.tags, TRACE_TAG: traceparent})


def _created(method: Method, tracing: Tracing) -> Method:
    @functools.wraps(method)
    async def call(new: NewExecution) -> Any:
        about = {"ff.execution_id": str(new.execution_id), "ff.task": new.execution_kind}
        with tracing.span("ff.create_execution", about, kind=_producer(tracing)) as span:
            return await method(_tag(new, tracing.traceparent(span)))

    return call


def _created_many(method: Method, tracing: Tracing) -> Method:
    @functools.wraps(method)
    async def call(items: Sequence[NewExecution]) -> Any:
        about = {"ff.count": len(items)}
        with tracing.span("ff.create_many", about, kind=_producer(tracing)) as span:
            traceparent = tracing.traceparent(span)
            return await method([_tag(item, traceparent) for item in items])

    return call


def _submitted(method: Method, tracing: Tracing) -> Method:
    @functools.wraps(method)
    async def call(graph: FlowGraph, **options: Any) -> Any:
        about = {"ff.flow_id": graph.flow_id, "ff.count": len(graph.nodes)}
        with tracing.span("ff.submit_flow", about, kind=_producer(tracing)) as span:
            traceparent = tracing.traceparent(span)
            nodes = tuple(_tag(node, traceparent) for node in graph.nodes)
            return await method(msgspec.structs.replace(graph, nodes=nodes), **options)

    return call


def _grown(method: Method, tracing: Tracing) -> Method:
    """Calls whose second argument, or `nodes`, lists new members."""
    name = method.__name__

    @functools.wraps(method)
    async def call(*args: Any, **options: Any) -> Any:
        given: Sequence[GraphNode] = args[1] if len(args) > 1 else options.get("nodes", ())
        about = _attributes(args, options) | {"ff.count": len(given)}
        with tracing.span(f"ff.{name}", about, kind=_producer(tracing)) as span:
            traceparent = tracing.traceparent(span)
            nodes = [_tag(node, traceparent) for node in given]
            if len(args) > 1:
                args = (args[0], nodes, *args[2:])
            else:
                options["nodes"] = nodes
            return await method(*args, **options)

    return call


def _producer(tracing: Tracing) -> Any:
    return tracing.api.SpanKind.PRODUCER


class AttemptTrace:
    """The spans of one attempt in a worker: its claim, its handler, its end."""

    def __init__(self, tracing: Tracing, claim: Claim, since: float) -> None:
        self._tracing = tracing
        self._claim = claim
        self._parent = tracing.context(claim.tags.get(TRACE_TAG))
        self._span: Span | None = None
        self._queued: tuple[str, int] | None = None
        handle = claim.handle
        self._about = {
            "ff.execution_id": str(handle.execution_id),
            "ff.task": claim.execution_kind,
            "ff.lane": handle.lane_id,
            "ff.attempt": handle.attempt_index + 1,
            "ff.attempt_id": handle.attempt_id,
            "ff.lease_epoch": handle.lease_epoch,
        }
        if claim.flow_id is not None:
            self._about["ff.flow_id"] = claim.flow_id
        asked = time.time_ns() - round((time.monotonic() - since) * 1e9)
        name = _CLAIM_NAMES.get(handle.kind, "ff.claim_execution")
        self._short_span(name, self._parent, asked)

    @contextmanager
    def running(self) -> Generator[None]:
        """The span of the handler; what the handler submits belongs to it."""
        api, about, links = self._tracing.api, self._about, []
        if self._claim.resume_cause is not None:
            about = about | {"ff.resumed_by": self._claim.resume_cause.trigger}
        if self._claim.handle.kind != "fresh" or self._claim.attempt_index:
            # A later part of the same execution.
            links = [api.Link(api.get_current_span(self._parent).get_span_context())]
        with self._tracing.tracer.start_as_current_span(
            f"ff.run {self._claim.execution_kind}",
            context=self._parent,
            kind=api.SpanKind.CONSUMER,
            attributes=about,
            links=links,
        ) as self._span:
            yield

    def failed(self, why: str) -> None:
        """Mark the handler's span as failed."""
        if self._span is not None:
            self._tracing.fail(self._span, why)

    def queued(self, op: str = "complete") -> None:
        """Called when the handler has ended and its result or failure is about to be stored."""
        self._queued = op, time.time_ns()

    def finished(self, how: str) -> None:
        """Called when the result or failure was stored or given up."""
        if self._queued is not None and self._span is not None:
            inside = self._tracing.api.set_span_in_context(self._span)
            op, queued_at = self._queued
            error = "" if how == op else how
            self._short_span(f"ff.{op}_execution", inside, queued_at, error)

    def _short_span(self, name: str, parent: "Context | None", began: int, error: str = "") -> None:
        span = self._tracing.tracer.start_span(
            name, context=parent, attributes=self._about, start_time=began
        )
        if error:
            self._tracing.fail(span, error)
        span.end()
