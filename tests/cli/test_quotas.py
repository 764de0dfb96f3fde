"""`flowfabric quotas` and `quota`."""

from __future__ import annotations

import pytest

from flowfabric.core.ids import new_uuid, quota_id
from tests.support.command import Cli
from tests.support.engine import Engine
from tests.support.quotas import admit

OPENAI = quota_id("openai")


async def test_create_update_and_show(cli: Cli, engine: Engine) -> None:
    await engine.freeze(await engine.now())
    done = await cli("quota", "create", "openai", "--max-requests", "500", "--max-concurrent", "20")
    assert done.out == "openai  created\n"
    await admit(engine, OPENAI)
    shown = await cli("quota", "show", "openai")
    assert [line.split(maxsplit=1) for line in shown.lines[:4]] == [
        ["Quota", "openai"],
        ["id", OPENAI],
        ["requests", "1 of 500 per 1m"],
        ["running", "1 of 20"],
    ]
    assert "next start      now" in shown.out
    assert "jitter          none" in shown.out
    updated = await cli("quota", "update", "openai", "--max-concurrent", "1", "--per", "90s")
    assert updated.out == "openai  1 of 500 per 1m 30s, running: 1 of 1\n"
    (status,) = (await cli("quota", "show", OPENAI, "--json")).objects
    assert status["created_at_iso"]
    assert {name: status[name] for name in ("name", "window_seconds", "max_concurrent")} == {
        "name": "openai",
        "window_seconds": 90,
        "max_concurrent": 1,
    }
    assert status["retry_after_ms"] == 5500


async def test_an_existing_quota_stays(cli: Cli) -> None:
    await cli("quota", "create", "openai", "--max-requests", "5")
    same = await cli("quota", "create", "openai", "--max-requests", "5")
    assert same.out == "openai  already exists; its limits were not changed\n"
    other = await cli("quota", "create", "openai", "--max-requests", "6")
    assert "exists with other limits" in other.out
    command = other.out.partition("flowfabric ")[2].split()
    assert command[:4] == ["quota", "update", "openai", "--max-requests"]
    assert (await cli(*command)).out == "openai  0 of 6 per 1m, running: no limit\n"
    assert (await cli("quota", "update", "openai")).code == 2
    (told,) = (await cli("quota", "create", "openai", "--json")).objects
    assert told == {
        "quota": "openai",
        "quota_policy_id": OPENAI,
        "created": False,
        "differs": True,
    }


async def test_the_advice_names_the_quota_as_the_shell_needs_it(cli: Cli) -> None:
    create = ("quota", "create", "open ai", "--namespace", "tenant", "--max-requests")
    await cli(*create, "5")
    other = await cli(*create, "6")
    assert "flowfabric quota update 'open ai' --namespace tenant --max-" in other.out


async def test_a_namespace_has_names_of_its_own(cli: Cli) -> None:
    await cli("quota", "create", "openai", "--max-requests", "5", "--namespace", "tenant")
    missing = await cli("quota", "show", "openai")
    assert "quota_policy_not_found" in missing.err
    found = await cli("--namespace", "tenant", "quota", "show", "openai", "--json")
    assert found.objects[0]["quota_policy_id"] == quota_id("openai", "tenant")


async def test_the_list(cli: Cli, engine: Engine) -> None:
    assert "No quotas. Create one with: flowfabric quota create" in (await cli("quotas")).out
    nameless = new_uuid()
    await cli("quota", "create", "openai", "--max-requests", "1", "--jitter", "2s")
    await cli("quota", "create", "maps", "--max-concurrent", "1", "--per", "1h")
    await cli("quota", "create", nameless)
    await engine.freeze(await engine.now())
    busy = engine.new_id()
    await admit(engine, quota_id("maps"), busy)
    await engine.backend.quotas.confirm_admission(quota_id("maps"), busy)
    await admit(engine, OPENAI)
    header, *rows = (await cli("quotas")).lines
    assert header.split("  ")[0] == "QUOTA"
    assert [" ".join(row.split()) for row in rows] == [
        f"{nameless} 0 per 1m, no limit no limit now",
        "maps 1 per 1h, no limit 1 of 1 when a running execution ends",
        "openai 1 of 1 per 1m no limit in 1m",
    ]
    found = (await cli("quotas", "--json")).objects
    assert sorted(each["name"] for each in found) == ["", "maps", "openai"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["create", "openai", "--per", "1500ms"], "must be one or more whole seconds"),
        (["create", "openai", "--per", "0s"], "must be 1s to"),
        (["create", "openai", "--max-requests", "-1"], "must be at least 0"),
        (["create", ""], "must not be empty"),
        (["update", "openai"], "nothing to change\nhint: pass --max-requests, --per"),
        (["update", "nope", "--max-requests", "1"], "quota_policy_not_found"),
    ],
)
async def test_what_is_refused(cli: Cli, arguments: list[str], problem: str) -> None:
    done = await cli("quota", *arguments)
    assert done.code != 0
    assert problem in done.err


async def test_the_same_name_in_two_namespaces(cli: Cli) -> None:
    create = ("quota", "create", "openai")
    await cli(*create)
    await cli(*create, "--namespace", "acme")
    header, *rows = [line.split() for line in (await cli("quotas")).lines]
    assert header[1] == "ID"
    names = {(row[0], row[1]) for row in rows}
    assert names == {("openai", quota_id("openai", each)) for each in ("default", "acme")}
