"""What callers get wrong: refused typed, at the place where it went wrong, and nowhere else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.core.errors import ConfigError, ValidationError
from flowfabric.sdk.client import Client
from flowfabric.sdk.config import WorkerConfig
from flowfabric.sdk.runtime import RunSummary
from flowfabric.sdk.task import ClaimedTask
from flowfabric.sdk.worker import Worker
from tests.sdk.conftest import MakeWorker
from tests.support.engine import Engine
from tests.support.proxy import FaultProxy
from tests.support.sdk import info, serving, submit, until

RETRY_SOON = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 1}}}
RETURNS = "a handler returns bytes, None, or (bytes, encoding label), not"
NO_LISTS: list[Any] = ["gpu", b"gpu", bytearray(b"gpu"), {"gpu": 1}, 5, None]


async def test_an_unusable_result_is_one_handlers_failure_and_nobody_elses(
    engine: Engine, make_worker: MakeWorker
) -> None:
    together = asyncio.Barrier(3)
    answers: dict[str, Any] = {"number": (5, "json"), "label": (b"x", "\ud800"), "fine": b"ok"}

    async def handler(task: ClaimedTask) -> Any:
        await together.wait()
        return answers[task.execution_kind]

    ids = {k: (await submit(engine.backend, kind=k, policy=RETRY_SOON))[0] for k in answers}
    worker = await make_worker(max_concurrent_tasks=3)
    async with serving(worker, dict.fromkeys(answers, handler)) as runtime:
        await until(lambda: runtime.summary.completed + runtime.summary.failed == 3, "all ends")
    ends = {kind: await info(engine.backend, each) for kind, each in ids.items()}
    assert ends["fine"].public_state.value == "completed"
    for kind in ("number", "label"):
        assert ends[kind].failure_category == "permanent"
        assert RETURNS in (ends[kind].failure_reason or "")
    assert runtime.summary == RunSummary(completed=1, failed=2)


# --- before anything is dialled -----------------------------------------------------------------


@pytest.mark.parametrize("variable", ["FF_MAX_PAYLOAD_BYTES", "FF_MAX_CONCURRENT_STREAM_OPS"])
@pytest.mark.parametrize("what", ["client", "worker"])
async def test_a_wrong_variable_is_reported_without_a_server(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, variable: str, what: str
) -> None:
    monkeypatch.setenv(variable, "plenty")
    connect = (
        Client.connect(proxy.url) if what == "client" else Worker.connect(WorkerConfig(), proxy.url)
    )
    with pytest.raises(ConfigError, match=variable):
        await connect
    assert proxy.accepted == 0


async def test_a_wrong_namespace_is_reported_without_a_server(proxy: FaultProxy) -> None:
    with pytest.raises(ValidationError, match="namespace"):
        await Client.connect(proxy.url, "{mine}")
    assert proxy.accepted == 0


# --- lists of capabilities and lanes ------------------------------------------------------------


@pytest.mark.parametrize("given", NO_LISTS)
def test_a_task_requires_a_list_of_capabilities(given: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        ff.Fabric().task(capabilities=given)
    assert (caught.value.code, caught.value.detail) == (
        "invalid_capabilities",
        "required:not_array",
    )
    assert '["gpu"]' in str(caught.value)


@pytest.mark.parametrize("given", NO_LISTS)
def test_a_worker_offers_a_list_of_capabilities(given: Any) -> None:
    app = ff.Fabric()

    @app.task()
    async def nothing() -> None: ...

    for make in (WorkerConfig, app.worker):
        with pytest.raises(ConfigError, match=r"capabilities: it must be a list\.") as refused:
            make(capabilities=given)
        assert refused.value.field == "capabilities"
        assert '["gpu"]' in str(refused.value)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("emails", "must be a list: write ['emails']"),
        (b"emails", "must be a list of lane names, got bytes"),
        ({"emails": 1}, "must be a list of lane names, got dict"),
        (5, "must be a list of lane names, got int"),
    ],
)
def test_a_worker_serves_a_list_of_lanes(given: Any, problem: str) -> None:
    app = ff.Fabric()

    @app.task()
    async def nothing() -> None: ...

    for make in (WorkerConfig, app.worker):
        with pytest.raises(ConfigError) as caught:
            make(lanes=given)
        assert (caught.value.field, caught.value.message) == ("lanes", problem)


def test_settings_are_kept_as_they_were_checked() -> None:
    made = WorkerConfig(lanes=iter(["a", "b"]), capabilities=iter(["gpu", "cuda"]))  # pyright: ignore[reportArgumentType]
    assert (made.lanes, made.capabilities) == (("a", "b"), ("cuda", "gpu"))
    assert made.capabilities_csv == "cuda,gpu"


async def test_the_registry_takes_lists_only(engine: Engine) -> None:
    who: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
    for given in NO_LISTS:
        with pytest.raises(ValidationError) as caught:
            await engine.backend.workers.register_worker(**who, lanes=["a"], capabilities=given)
        assert caught.value.detail == "worker:not_array"
    with pytest.raises(ValidationError, match="lanes: must be a list"):
        await engine.backend.workers.register_worker(**who, lanes="emails")
    assert await engine.backend.workers.list_workers() == []


# --- submissions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tags": ["a"]}, "tags"),
        ({"tags": []}, "tags"),
        ({"tags": ""}, "tags"),
        ({"tags": {"a": 1}}, "tags"),
        ({"policy": "{}"}, "policy"),
        ({"policy": {}}, "policy"),
        ({"policy": {"priority": 1}}, "policy"),
        ({"lane": 5}, "lane"),
        ({"lane": "\ud800"}, "lane"),
        ({"payload_encoding": None}, "payload_encoding"),
        ({"idempotency_key": 0}, "idempotency_key"),
        ({"creator_identity": 0}, "creator_identity"),
        ({"priority": "high"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"delay_until": "soon"}, "delay_until"),
        ({"delay_ms": 1.5}, "delay_ms"),
        ({"execution_deadline_at": "never"}, "execution_deadline_at"),
        ({"execution_id": "x"}, "execution_id"),
        ({"execution_id": 5}, "execution_id"),
        ({"kind": ""}, "execution_kind"),
        ({"kind": 5}, "execution_kind"),
        ({"payload": "text"}, "input_payload"),
        ({"payload": None}, "input_payload"),
    ],
)
async def test_a_submission_of_the_wrong_type_names_its_field(
    engine: Engine, options: dict[str, Any], field: str
) -> None:
    given: dict[str, Any] = {"kind": "job", **options}
    with pytest.raises(ValidationError) as caught:
        await Client(engine.backend).submit(**given)
    assert caught.value.code == "invalid_input"
    assert caught.value.detail.startswith(f"{field}: "), caught.value
    page = await engine.backend.listings.list_executions()
    assert page.executions == ()


async def test_an_id_given_as_text_is_as_good(engine: Engine) -> None:
    wanted = engine.new_id()
    text: Any = str(wanted)
    created = await Client(engine.backend).submit("job", execution_id=text)
    assert created.execution_id == wanted


async def test_the_limits_of_a_budget_are_checked_by_name(engine: Engine) -> None:
    client = Client(engine.backend)
    for hard, problem in (
        (["tokens"], "hard: must be a Mapping, got list"),
        ({"tokens": "5"}, r"hard\.tokens: must be a whole number, got str"),
    ):
        with pytest.raises(ValidationError, match=problem):
            await client.create_budget("team", hard)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
