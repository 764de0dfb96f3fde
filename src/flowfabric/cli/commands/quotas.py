"""`flowfabric quotas`, and `quota show`, `create` and `update`."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from flowfabric.cli import options
from flowfabric.cli.errors import UsageError
from flowfabric.cli.options import Deployment, Namespaced, Target, value
from flowfabric.cli.session import NoDataYet, open_backend
from flowfabric.cli.views.screen import Cell, Row, Screen, print_json, print_result
from flowfabric.core.contracts.quotas import QuotaCreated, QuotaLimits, QuotaStatus
from flowfabric.core.ids import as_argument, quota_id
from flowfabric.core.text import clock, duration
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.paging import read_every
from flowfabric.sdk.client import Client

_NAME = "The name of the quota, or its UUID."
Quota = Annotated[str, options.argument("QUOTA", _NAME)]
_MOST = "At most N executions start per window; 0 means no limit."
_RUNNING = "At most N executions run at the same time; 0 means no limit."
_PER = options.duration("The length of the sliding window, in whole seconds.", "1s", "10000d")
_JITTER = options.duration("Spread the next checks of waiting executions over this time.")


def _client(backend: Backend, target: Target) -> Client:
    return Client(backend, target.namespace or "default")


async def quotas(target: Deployment) -> None:
    """List quotas and how much of each is used.

    With --json, prints one JSON object per line.
    """
    found: list[QuotaStatus] = []
    with suppress(NoDataYet):
        async with open_backend(target) as backend:
            found = await read_every(
                lambda cursor: backend.quotas.list_quota_policies(cursor, 1000)
            )
    if target.as_json:
        print_json(*found)
    elif found:
        ordered = sorted(found, key=lambda each: (each.name, each.quota_policy_id))
        # Names are unique only within a namespace.
        repeated = len({each.label for each in found}) < len(found)
        rows = [_row(each, with_id=repeated) for each in ordered]
        Screen().table(rows, ("NEXT START",))
    else:
        Screen().line("No quotas. Create one with: flowfabric quota create NAME --max-requests N")


def _row(quota: QuotaStatus, *, with_id: bool) -> Row:
    identity: Row = {"ID": quota.quota_policy_id} if with_id else {}
    return {
        "QUOTA": (quota.label, "bold"),
        **identity,
        "REQUESTS": _rate(quota),
        "RUNNING": _running(quota),
        "NEXT START": _next_start(quota),
    }


def _rate(quota: QuotaStatus) -> Cell:
    used, most, per = quota.window_count, quota.max_requests_per_window, duration(quota.window_ms)
    if not most:
        return f"{used:,} per {per}, no limit"
    return f"{used:,} of {most:,} per {per}", "yellow" if used >= most else ""


def _running(quota: QuotaStatus) -> Cell:
    held, most = quota.slots_held, quota.max_concurrent
    return (f"{held:,} of {most:,}", "yellow" if held >= most else "") if most else "no limit"


def _next_start(quota: QuotaStatus) -> Cell:
    if quota.retry_after_ms is None:
        return "when a running execution ends", "yellow"
    return f"in {duration(quota.retry_after_ms)}" if quota.retry_after_ms else "now"


async def _show(target: Namespaced, quota: Quota) -> None:
    """Show one quota and how much of it is used."""
    async with open_backend(target) as backend:
        status = await _client(backend, target).quota(quota)
    if target.as_json:
        print_json(status)
        return
    screen = Screen()
    screen.line(("Quota ", "bold"), (status.name or status.quota_policy_id, "bold"))
    facts: list[tuple[str, Cell]] = [
        ("id", status.quota_policy_id),
        ("requests", _rate(status)),
        ("running", _running(status)),
        ("next start", _next_start(status)),
        ("jitter", duration(status.jitter_ms) if status.jitter_ms else "none"),
        ("created", clock(status.created_at)),
    ]
    if status.oldest_entry_at is not None:
        facts.insert(3, ("oldest request", clock(status.oldest_entry_at)))
    screen.facts(facts)


async def _create(
    target: Namespaced,
    quota: Quota,
    *,
    max_requests: Annotated[int, value("N", _MOST, min=0)] = 0,
    per: Annotated[float, _PER] = "1m",  # pyright: ignore[reportArgumentType] - parsed like given ones
    max_concurrent: Annotated[int, value("N", _RUNNING, min=0)] = 0,
    jitter: Annotated[float, _JITTER] = "0s",  # pyright: ignore[reportArgumentType]
) -> None:
    """Create a quota. An existing quota keeps its limits.

    The name refers to the same quota in every process of the namespace.
    """
    async with open_backend(target, create=True) as backend:
        calls = _client(backend, target)
        outcome = await calls.create_quota(
            quota, max_requests, per, max_concurrent=max_concurrent, jitter=jitter
        )
    created = isinstance(outcome, QuotaCreated)
    told = "created" if created else "already exists; its limits were not changed"
    if not created and outcome.differs:
        change = f"flowfabric quota update {as_argument(outcome.quota_policy_id)}"
        change += f" --max-requests {max_requests} --per {per:g}s --max-concurrent {max_concurrent}"
        told = f"exists with other limits. Change them with: {change}"
    fields = {
        "quota": quota,
        "quota_policy_id": outcome.quota_policy_id,
        "created": created,
        "differs": not created and outcome.differs,
    }
    print_result(fields, (quota, "bold"), f"  {told}", as_json=target.as_json)


async def _update(
    target: Namespaced,
    quota: Quota,
    *,
    max_requests: Annotated[int | None, value("N", _MOST, min=0)] = None,
    per: Annotated[float | None, _PER] = None,
    max_concurrent: Annotated[int | None, value("N", _RUNNING, min=0)] = None,
    jitter: Annotated[float | None, _JITTER] = None,
) -> None:
    """Change limits of a quota.

    Limits that you do not pass stay unchanged. A higher limit applies at once to waiting
    executions.
    """
    if max_requests is per is max_concurrent is jitter is None:
        hint = "pass --max-requests, --per, --max-concurrent or --jitter"
        raise UsageError("usage", "nothing to change", hint)
    async with open_backend(target) as backend:
        calls = _client(backend, target)
        await calls.update_quota(
            quota, max_requests, per, max_concurrent=max_concurrent, jitter=jitter
        )
        status = await calls.quota(quota)
    names = QuotaLimits.__struct_fields__
    fields = {"quota": quota, "quota_policy_id": quota_id(quota, calls.namespace)}
    fields |= {name: getattr(status, name) for name in names}
    limits = [("  ", ""), _rate(status), (", running: ", ""), _running(status)]
    print_result(fields, (quota, "bold"), *limits, as_json=target.as_json)


quota: Mapping[str, Any] = {"show": _show, "create": _create, "update": _update}
