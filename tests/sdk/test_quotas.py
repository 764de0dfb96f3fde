"""Quotas through the client: names, durations, the blocking form."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.core.contracts.quotas import QuotaCreated, QuotaExists
from flowfabric.core.errors import NotFoundError, ValidationError
from flowfabric.core.ids import new_uuid, quota_id
from flowfabric.sdk.client import Client
from flowfabric.sdk.sync import SyncClient
from tests.support.engine import Engine
from tests.support.server import TestServer


async def test_a_quota_by_name(engine: Engine) -> None:
    client = Client(engine.backend)
    created = await client.create_quota("openai", 500, per="2m", max_concurrent=20, jitter="200ms")
    assert created == QuotaCreated(quota_id("openai"))
    assert isinstance(await client.create_quota("openai", 1), QuotaExists)
    status = await client.quota("openai")
    assert (status.name, status.window_seconds, status.max_requests_per_window) == (
        *("openai", 120, 500),
    )
    assert (status.max_concurrent, status.jitter_ms) == (20, 200)
    await client.update_quota("openai", 7, per=30, max_concurrent=0, jitter=0)
    status = await client.quota(quota_id("openai"))
    assert (status.max_requests_per_window, status.window_seconds) == (7, 30)
    assert (status.max_concurrent, status.jitter_ms) == (0, 0)
    assert (await client.quotas()).entries == (status,)


async def test_a_quota_by_uuid_has_no_name(engine: Engine) -> None:
    client, policy_id = Client(engine.backend), new_uuid()
    await client.create_quota(policy_id.upper(), max_concurrent=1)
    assert (await client.quota(policy_id)).name == ""


async def test_a_namespace_has_names_of_its_own(engine: Engine) -> None:
    mine, other = Client(engine.backend), Client(engine.backend, "tenant")
    await other.create_quota("openai", 5)
    with pytest.raises(NotFoundError, match="quota_policy_not_found"):
        await mine.quota("openai")
    assert (await other.quota("openai")).quota_policy_id == quota_id("openai", "tenant")


@pytest.mark.parametrize("per", ["1500ms", 0, "0s", 0.5])
async def test_a_window_is_in_whole_seconds(engine: Engine, per: Any) -> None:
    client = Client(engine.backend)
    with pytest.raises(ValidationError, match="per: must be one or more whole seconds"):
        await client.create_quota("openai", 5, per=per)
    with pytest.raises(ValidationError, match="per: must be one or more whole seconds"):
        await client.update_quota("openai", per=per)


@pytest.mark.parametrize("name", ["", 5, None, "a\nb"])
async def test_names_are_checked(engine: Engine, name: Any) -> None:
    client = Client(engine.backend)
    for call in (client.create_quota, client.quota, client.update_quota):
        with pytest.raises(ValidationError, match="quota: must"):
            await call(name)


def test_without_an_event_loop(engine: Engine, valkey: TestServer) -> None:
    with SyncClient.connect(valkey.url) as client:
        name = new_uuid()
        client.create_quota(name, 5)
        client.update_quota(name, max_concurrent=2)
        assert client.quota(name).max_concurrent == 2
        assert name in [each.quota_policy_id for each in client.quotas(limit=1000).entries]
