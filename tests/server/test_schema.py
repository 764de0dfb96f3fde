"""Requests made up from the OpenAPI document: no failure, and every answer is as documented."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any, cast

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis import checks as known_checks
from schemathesis.core.failures import FailureGroup

from flowfabric.core.contracts.budgets import NewBudget
from flowfabric.core.ids import new_uuid
from flowfabric.server.openapi import document
from flowfabric.server.routes.table import all_routes
from tests.support.engine import Engine
from tests.support.flows import submitted
from tests.support.http import Http
from tests.support.sdk import seeded
from tests.support.streams import append
from tests.support.suspension import GO, Waits

CHECKED = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance"),
)
CHECKS: list[Any] = [getattr(known_checks, name) for name in CHECKED]
WAITING = frozenset({"wait_ms", "block_ms", "wait"})
"""Parameters that would only make the run slow."""
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


class EventSession(requests.Session):
    """Reads the first line of an endless answer, and leaves."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        answer = super().send(request, **options | {"stream": True})
        # 204 has none.
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            if "/v1/events" not in answer.url:
                assert next(answer.iter_lines(chunk_size=1)) == b"event: state", answer.url
            answer.close()
            answer._content = b""
        assert answer.content is not None
        return answer


@schemathesis.serializer("application/x-ndjson")
def as_lines(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="ignore")


class Known:
    """Ids of things that exist, so that requests reach more than `not found`."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}

    def add(self, name: str, *values: str) -> None:
        self.values.setdefault(name, []).extend(values)

    def turns(self) -> dict[str, Iterator[str]]:
        return {name: itertools.cycle(values) for name, values in self.values.items()}


async def furnished(engine: Engine) -> Known:
    """One of everything: executions in every phase, a flow, a budget, a quota, a worker."""
    known, backend = Known(), engine.backend
    waiting = await engine.create()
    active, done, broken = [await engine.running() for _ in range(3)]
    await append(engine, active, b"frame")
    await backend.executions.complete(done, b"result")
    await backend.executions.fail(broken, "boom", "permanent")
    waits = await Waits.open(engine)
    parked = await waits.park(GO)
    flow = await submitted(engine, "a>b c")
    await flow.end("a")
    handles = (active, done, broken, parked.handle)
    known.add("execution", waiting, flow.nodes["b"], *(each.execution_id for each in handles))
    known.add("waitpoint", parked.details.waitpoint_id)
    known.add("flow", flow.flow_id)
    budget = NewBudget(
        budget_id=new_uuid(),
        scope_type="lane",
        scope_id="default",
        enforcement_mode="strict",
        on_hard_limit="fail",
        on_soft_limit="warn",
        reset_interval_ms=0,
        dimensions=("tokens",),
        hard_limits=(10,),
        soft_limits=(5,),
    )
    await backend.budgets.create_budget(budget)
    known.add("budget", budget.budget_id)
    quota = new_uuid()
    await backend.quotas.create_quota_policy(
        quota, window_seconds=60, max_requests_per_window=10, max_concurrent=2
    )
    known.add("quota", quota)
    await backend.workers.register_worker(
        worker_id="w", worker_instance_id="w-1", lanes=["default"]
    )
    return known


def noun_of(path: str, name: str) -> str:
    if name in ("waitpoint_id", "execution_id"):
        return name.removesuffix("_id")
    for noun in ("execution", "flow", "budget", "quota"):
        if name == "id" and f"/{noun}s/" in path:
            return noun
    return {"lane": "lane", "instance": "instance", "idx": "idx"}.get(name, "")


def strict(schema: Any) -> Any:
    """The schema without fields that it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {name: strict(each) for name, each in schema.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(found.get("properties"), dict) and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


def run(address: tuple[str, int], known: Known, examples: int, seed: int | None) -> list[str]:
    """Send made-up requests to every route; what is wrong with the answers."""
    made = strict(document(all_routes()))
    for operation in (each for path in made["paths"].values() for each in path.values()):
        # Every status must be named: only faults of the server are not.
        del operation["responses"]["default"]
    schema = schemathesis.openapi.from_dict(made)
    known.add("lane", "default", "nope")
    known.add("instance", "w-1")
    known.add("idx", "0", "7")
    turns, wrong = known.turns(), list[str]()
    with EventSession() as session:
        session.trust_env = False
        for found in cast("Any", schema).get_all_operations():
            operation = found.ok()
            for mode in MODES:
                for i, case in enumerate(cases_of(operation, mode, examples, seed)):
                    if i % 2 == 0 or mode is GenerationMode.POSITIVE:
                        for name in case.path_parameters:
                            noun = noun_of(operation.path, name)
                            if noun in turns:
                                case.path_parameters[name] = next(turns[noun])
                    for name in WAITING & case.query.keys():
                        del case.query[name]
                    wrong += problems(case, session, address)
    return wrong


def cases_of(operation: Any, mode: Any, examples: int, seed: int | None) -> list[Any]:
    cases: list[Any] = []

    @hypothesis.settings(
        max_examples=examples,
        database=None,
        derandomize=seed is None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
    )
    @hypothesis.given(data=st.data())
    def collect(data: st.DataObject) -> None:
        cases.append(data.draw(operation.as_strategy(generation_mode=mode)))

    if seed is not None:
        collect = hypothesis.seed(seed)(collect)
    try:
        collect()
    except Unsatisfiable:
        # A route without parameters has no wrong ones.
        assert mode is GenerationMode.NEGATIVE
    return cases


def problems(case: Any, session: requests.Session, address: tuple[str, int]) -> list[str]:
    answer = case.call(base_url="http://{}:{}".format(*address), session=session, timeout=20)
    try:
        case.validate_response(answer, checks=CHECKS)
    except FailureGroup as group:
        told = [f"{type(each).__name__}: {each}" for each in group.exceptions]
        asked = f"{case.method} {case.path}: {case.formatted_path} {case.query} {case.body!r:.300}"
        return [f"{asked}\n{told}"]
    return []


def report(wrong: list[str]) -> str:
    """The first problem of each route."""
    return "\n\n".join({each.partition(": ")[0]: each for each in reversed(wrong)}.values())


@pytest.mark.corrupts
@pytest.mark.timeout(180)
async def test_answers_are_as_documented(http: Http, engine: Engine) -> None:
    known = await furnished(engine)
    wrong = await asyncio.to_thread(run, http.address, known, 2, None)
    assert not wrong, report(wrong)


@pytest.mark.chaos
@pytest.mark.corrupts
@pytest.mark.timeout(1800)
async def test_many_more_answers_are_as_documented(http: Http, engine: Engine) -> None:
    known, seed = await furnished(engine), seeded("requests from the document").randrange(2**32)
    wrong = await asyncio.to_thread(run, http.address, known, 60, seed)
    assert not wrong, report(wrong)
