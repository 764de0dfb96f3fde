"""`flowfabric budgets` and `flowfabric budget`."""

from __future__ import annotations

import shlex

from flowfabric.core.ids import budget_id
from flowfabric.sdk.client import Client
from tests.support.budgets import hold
from tests.support.command import Cli
from tests.support.engine import Engine

TEAM = budget_id("team")


async def test_a_budget_from_its_creation_to_its_end(cli: Cli, engine: Engine) -> None:
    assert (await cli("budgets")).out.startswith("No budgets. Create one with: flowfabric budget")
    done = await cli("budget", "create", "team", "tokens=1_000", "--soft", "tokens=800")
    assert done.out == "team  created\n"
    assert (await cli("budget", "create", "team", "tokens=1000", "--soft", "tokens=800")).out == (
        "team  exists\n"
    )
    other = await cli("budget", "create", "team", "tokens=5", "--json")
    assert other.objects[0] == {"budget_id": TEAM, "outcome": "already_satisfied", "differs": True}
    client = Client(engine.backend)
    await client.report_usage("team", {"tokens": 1000})
    await client.report_usage("team", {"tokens": 1})
    header, row = (await cli("budgets")).lines
    assert header.split() == [
        *("BUDGET", "DIMENSION", "USED", "HELD", "LIMIT", "BREACHES", "NEXT", "RESET"),
    ]
    assert row.split() == ["team", "tokens", "1,000", "0", "1,000", "1", "-"]
    raised = await cli("budget", "raise", "team", "tokens=5000", "calls=7")
    assert raised.out.startswith("team  limits changed: tokens=5,000, calls=7. ")
    await hold(engine.backend.budgets, await engine.running(), TEAM, tokens=40)
    shown = await cli("budget", "show", "team")
    assert shown.lines[0] == "team"
    assert f"id           {TEAM}" in shown.out
    assert "refuses; on a breach: fail" in shown.out
    assert "1 hard, 2 soft" in shown.out
    assert "tokens at 20" in shown.out
    table = [line.split() for line in shown.lines[-3:]]
    assert table == [
        ["DIMENSION", "USED", "HELD", "SOFT", "LIMIT", "HARD", "LIMIT"],
        ["calls", "0", "0", "-", "7"],
        ["tokens", "1,000", "40", "800", "5,000"],
    ]
    assert (await cli("budget", "reset", "team")).out == "team  reset\n"
    status = (await cli("budget", "show", TEAM, "--json")).objects[0]
    assert (status["usage"], status["reserved"]) == ({"tokens": 0}, {"tokens": 40})
    assert (status["hard_limits"], status["reset_count"]) == ({"calls": 7, "tokens": 5000}, 1)
    assert status["last_reset_at_iso"].endswith("Z")
    assert [each["budget_id"] for each in (await cli("budgets", "--json")).objects] == [TEAM]
    refused = await cli("budget", "delete", "team")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert (await cli("budget", "delete", "team", "--yes")).out == "team  deleted\n"
    gone = await cli("budget", "show", "team")
    assert gone.code == 1
    assert "budget_not_found" in gone.err


async def test_the_advice_names_the_budget_as_the_shell_needs_it(cli: Cli) -> None:
    create = ("budget", "create", "team pot", "--namespace", "tenant")
    await cli(*create, "tokens=5")
    other = await cli(*create, "tokens=6")
    assert "flowfabric budget raise 'team pot' --namespace tenant tokens=6" in other.out


async def test_only_a_soft_limit_is_changed(cli: Cli) -> None:
    await cli("budget", "create", "team", "tokens=100", "calls=5")
    changed = await cli("budget", "raise", "team", "--soft", "tokens=80")
    assert changed.out == "team  limits changed: tokens=80 (soft)\n"
    status = (await cli("budget", "show", "team", "--json")).objects[0]
    assert status["hard_limits"] == {"calls": 5, "tokens": 100}
    assert status["soft_limits"] == {"calls": 0, "tokens": 80}
    refused = await cli("budget", "raise", "team")
    assert refused.code == 2
    assert "nothing to change\nhint: pass a limit such as tokens=1000" in refused.err


async def test_how_long_a_budget_remembers_keys(cli: Cli) -> None:
    await cli("budget", "create", "day")
    await cli("budget", "create", "week", "--dedup-ttl", "7d")
    found = {each["scope_id"]: each for each in (await cli("budgets", "--json")).objects}
    assert found["day"]["dedup_ttl_ms"] == 86_400_000
    assert found["week"]["dedup_ttl_ms"] == 7 * 86_400_000
    wrong = await cli("budget", "create", "month", "--dedup-ttl", "30d")
    assert wrong.code == 2
    assert "must be 1ms to 7d, got 30d" in wrong.err


async def test_an_existing_budget_with_other_limits_names_the_command(cli: Cli) -> None:
    await cli("budget", "create", "my team", "tokens=5")
    other = await cli("budget", "create", "my team", "tokens=7")
    command = shlex.split(other.out.partition("flowfabric ")[2])
    assert command == ["budget", "raise", "my team", "tokens=7"]
    assert (await cli(*command)).out == "my team  limits changed: tokens=7\n"


async def test_recurring_budgets_and_waiting_work(cli: Cli, engine: Engine) -> None:
    await cli(
        "budget", "create", "daily", "cents=5", "--every", "24h", "--on-hard-limit", "suspend"
    )
    daily = budget_id("daily")
    assert "next reset" in (await cli("budget", "show", "daily")).out
    done = await cli("budget", "reset", "daily", "--json")
    assert done.objects[0]["next_reset_at"] > await engine.now()
    assert "the next reset is at" in (await cli("budget", "reset", "daily")).out
    ids = [await engine.create() for _ in range(4)]
    await engine.backend.budgets.note_blocked(daily, ids)
    waiting = next(
        line for line in (await cli("budget", "show", "daily")).lines if "waiting" in line
    )
    assert waiting.split()[1:3] == ["4", "executions:"]
    assert waiting.endswith("…")
    await engine.backend.budgets.note_blocked(daily, [engine.new_id() for _ in range(996)])
    assert "  1,000 executions: " in (await cli("budget", "show", "daily")).out
    await engine.backend.budgets.note_blocked(daily, [engine.new_id()])
    assert "  more than 1,000 executions: " in (await cli("budget", "show", "daily")).out


async def test_namespaces_and_mistakes(cli: Cli, engine: Engine) -> None:
    await cli("budget", "create", "team", "a=1", "--namespace", "acme", "--warn-only")
    status = (await cli("budget", "show", "team", "--namespace", "acme", "--json")).objects[0]
    assert status["budget_id"] == budget_id("team", "acme")
    assert status["enforcement_mode"] == "warn"
    assert "only warns" in (await cli("budget", "show", "team", "--namespace", "acme")).out
    wrong_limits = ("tokens", "tokens=", "tokens=x", "=5", "tokens=-1", "tokens=_5", "tokens=1__0")
    for wrong in wrong_limits:
        failed = await cli("budget", "raise", "team", wrong)
        assert failed.code == 2
        assert "such as tokens=1000" in failed.err


async def test_without_data_there_are_none(cli: Cli) -> None:
    del cli.environment["FF_URL"]
    assert (await cli("budgets")).out.startswith("No budgets. Create one with: flowfabric budget")
    assert not (cli.folder / ".flowfabric").exists()


async def test_a_misspelt_action_dimension_or_name(cli: Cli) -> None:
    create = ("budget", "create", "team", "tokens=10")
    refused = await cli(*create, "--on-hard-limit", "suspnd")
    assert refused.code == 2
    assert "expected one of fail, suspend, reject, got 'suspnd'" in refused.err
    await cli(*create)
    raised = await cli("budget", "raise", "team", "tokenz=20")
    assert "tokenz had no limit before; check the name. Other limits: tokens" in raised.out
    assert "before" not in (await cli("budget", "raise", "team", "tokens=20")).out
    missing = await cli("budget", "show", "tem")
    assert "budget_not_found: tem" in missing.err


async def test_the_same_name_in_two_namespaces(cli: Cli) -> None:
    create = ("budget", "create", "team", "a=1")
    await cli(*create)
    await cli(*create, "--namespace", "acme")
    header, *rows = [line.split() for line in (await cli("budgets")).lines]
    assert header[1] == "ID"
    names = {(row[0], row[1]) for row in rows}
    assert names == {("team", budget_id("team", each)) for each in ("default", "acme")}
