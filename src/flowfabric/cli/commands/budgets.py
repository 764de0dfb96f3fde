"""`flowfabric budgets`, and `budget show`, `create`, `raise`, `reset` and `delete`."""

import re
from contextlib import suppress
from typing import Annotated, cast, get_args

import typer

from flowfabric.cli import options
from flowfabric.cli.errors import UsageError
from flowfabric.cli.options import Deployment, Namespaced, Target, argument, flag, value
from flowfabric.cli.session import NoDataYet, open_backend
from flowfabric.cli.views.budgets import COUNTED, print_budget, print_budgets
from flowfabric.cli.views.screen import print_json, print_result
from flowfabric.core.contracts.budgets import BudgetCreated, BudgetStatus
from flowfabric.core.ids import as_argument, budget_id
from flowfabric.core.text import clock
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.paging import read_every
from flowfabric.sdk.spending import BudgetCalls, HardLimitAction

_DEFAULT = "default"
_limit = re.compile(r".+=[0-9]+(_[0-9]+)*")


def _parse_limit(text: str) -> str:
    """`<dimension>=<whole number>`."""
    if _limit.fullmatch(text) is None:
        raise typer.BadParameter(f"expected a limit such as tokens=1000, got {text!r}")
    return text


def _parse_action(text: str) -> str:
    """What a task does at a hard limit."""
    known = get_args(HardLimitAction)
    if text not in known:
        raise typer.BadParameter(f"expected one of {', '.join(known)}, got {text!r}")
    return text


def _limits(given: list[str] | None) -> dict[str, int]:
    pairs = (text.rpartition("=") for text in given or ())
    return {name: int(number) for name, _, number in pairs}


Name = Annotated[str, argument("BUDGET", "The name of the budget, or its UUID.")]
Hard = Annotated[
    list[str] | None,
    argument("DIMENSION=LIMIT", "Hard limits, such as tokens=1000000.", parser=_parse_limit),
]
Soft = Annotated[
    list[str] | None,
    value("DIMENSION=LIMIT", "A soft limit. Repeatable.", "--soft", parser=_parse_limit),
]


class _Budgets(BudgetCalls):
    """The budgets of the namespace that the command uses."""

    def __init__(self, backend: Backend, target: Target) -> None:
        self.backend = backend
        self.namespace = target.namespace or _DEFAULT


async def budgets(target: Deployment) -> None:
    """List budgets with their usage.

    Shows the usage and the hard limit of each dimension. With --json, prints one JSON object per
    line.
    """
    found: list[BudgetStatus] = []
    with suppress(NoDataYet):
        async with open_backend(target) as backend:
            found = await read_every(lambda after: backend.budgets.list_budgets(after=after))
    if target.as_json:
        print_json(*found)
    else:
        print_budgets(found)


async def _show(target: Namespaced, name: Name) -> None:
    """Show one budget with its usage, holds and limits.

    Also shows breaches and the next reset.
    """
    async with open_backend(target) as backend:
        status = await _Budgets(backend, target).budget(name)
        waiting = await backend.budgets.blocked(status.budget_id, limit=COUNTED + 1)
    if target.as_json:
        print_json(status)
    else:
        print_budget(status, waiting)


async def _create(
    target: Namespaced,
    name: Name,
    limits: Hard = None,
    *,
    soft: Soft = None,
    every: Annotated[
        float | None, options.duration("Reset usage to 0 at this interval.", "1s", "3650d")
    ] = None,
    on_hard_limit: Annotated[
        str,
        value(
            "ACTION",
            "What happens to a task that exceeds a hard limit: fail, suspend or reject.",
            parser=_parse_action,
        ),
    ] = "fail",
    warn_only: Annotated[
        bool, flag("--warn-only", "Report exceeded hard limits, but refuse nothing.")
    ] = False,
    dedup_ttl: Annotated[
        float, options.duration("How long to remember the dedup keys of reports.", "1ms", "7d")
    ] = "24h",  # pyright: ignore[reportArgumentType] - parsed like given ones
) -> None:
    """Create a budget. An existing budget is not changed."""
    async with open_backend(target, create=True) as backend:
        made = await _Budgets(backend, target).create_budget(
            name,
            _limits(limits),
            soft=_limits(soft),
            every=every,
            on_hard_limit=cast("HardLimitAction", on_hard_limit),
            mode="warn" if warn_only else "strict",
            dedup_ttl=dedup_ttl,
        )
    fields: dict[str, object] = {"budget_id": made.budget_id, "outcome": made.kind}
    text = "created"
    if not isinstance(made, BudgetCreated):
        fields["differs"] = made.differs
        text = "exists"
        if made.differs:
            given = " ".join(f"{each}={limit}" for each, limit in _limits(limits).items())
            change = f"budget raise {as_argument(made.budget_id)} {given or 'DIMENSION=LIMIT'}"
            text += f" with other settings. Change limits with: flowfabric {change}"
    print_result(fields, f"{name}  ", text, as_json=target.as_json)


async def _raise(
    target: Namespaced,
    name: Name,
    limits: Annotated[
        list[str] | None,
        argument("DIMENSION=LIMIT", "New hard limits; 0 removes a limit.", parser=_parse_limit),
    ] = None,
    *,
    soft: Soft = None,
) -> None:
    """Change limits of a budget. Executions that wait for it start if the new limits allow it.

    Usage and other limits stay unchanged.
    """
    hard, lower = _limits(limits), _limits(soft)
    if not hard and not lower:
        raise UsageError(
            "usage", "nothing to change", "pass a limit such as tokens=1000, or --soft tokens=800"
        )
    async with open_backend(target) as backend:
        calls = _Budgets(backend, target)
        before = await calls.budget(name)
        await calls.update_budget(name, hard or None, soft=lower or None)
        status = await calls.budget(name)
    known = [f"{each}={status.hard_limits[each]:,}" for each in hard]
    known += [f"{each}={status.soft_limits[each]:,} (soft)" for each in lower]
    new = sorted(hard.keys() - before.hard_limits.keys() - before.usage.keys())
    told = f"limits changed: {', '.join(known)}"
    if new and before.hard_limits:
        others = ", ".join(before.hard_limits)
        told += f". {', '.join(new)} had no limit before; check the name. Other limits: {others}"
    fields = {
        "budget_id": status.budget_id,
        "hard_limits": status.hard_limits,
        "soft_limits": status.soft_limits,
    }
    print_result(fields, f"{name}  ", told, as_json=target.as_json)


async def _reset(target: Namespaced, name: Name) -> None:
    """Reset all usage of a budget to 0. Executions that wait for it can then start."""
    async with open_backend(target) as backend:
        done = await _Budgets(backend, target).reset_budget(name)
    following = f"; the next reset is at {clock(done.next_reset_at)}" if done.next_reset_at else ""
    fields = {
        "budget_id": budget_id(name, target.namespace or _DEFAULT),
        "next_reset_at": done.next_reset_at or None,
    }
    print_result(fields, f"{name}  ", f"reset{following}", as_json=target.as_json)


async def _delete(
    target: Namespaced,
    name: Name,
    *,
    force: Annotated[
        bool, flag("--force", "Delete it even if executions wait for it. They can then start.")
    ] = False,
    yes: options.Yes = False,
) -> None:
    """Delete a budget. Executions that name it are no longer limited by it."""
    options.confirm(f"Delete budget {name}?", yes=yes, problem=f"this would delete budget {name}")
    async with open_backend(target) as backend:
        await _Budgets(backend, target).delete_budget(name, force=force)
    fields = {"budget_id": budget_id(name, target.namespace or _DEFAULT), "outcome": "deleted"}
    print_result(fields, f"{name}  ", "deleted", as_json=target.as_json)


budget = {
    "show": _show,
    "create": _create,
    "raise": _raise,
    "reset": _reset,
    "delete": _delete,
}
"""The commands of `flowfabric budget`."""
