"""Answering as an operator from the command line."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric.cli.errors import CliError
from flowfabric.cli.options import Target
from flowfabric.cli.resolve import resolve
from flowfabric.cli.screen import Screen, print_json
from flowfabric.cli.session import opened
from flowfabric.cli.signal_target import find_waitpoint, read_payload, say, too_late
from flowfabric.cli.user import user
from flowfabric.cli.waiting_words import OPERATOR_ONLY, TIMEOUT_ONLY, wanted
from flowfabric.cli.words import clean
from flowfabric.core.contracts.suspension import OpenWaitpoint
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.backend import Backend

__all__ = ["Decision", "decide"]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator says, as it was typed."""

    waitpoint: str | None
    by: str | None
    name: str
    named: bool
    """Whether the name was given, so that it is sent even if nothing asks for it."""
    payload: str | None


def decide(target: Target, text: str, decision: Decision, *, as_json: bool) -> None:
    """Deliver a decision and say what came of it."""
    payload = read_payload(decision.payload)
    asyncio.run(_decide(target, text, decision, payload, as_json=as_json))


async def _decide(
    target: Target, text: str, decision: Decision, payload: bytes | None, *, as_json: bool
) -> None:
    async with opened(target.url) as backend:
        execution_id = await resolve(backend, text, target.namespace)
        waitpoint = await find_waitpoint(backend, execution_id, decision.waitpoint)
        try:
            if waitpoint.required_signal_names == (OPERATOR_ONLY,):
                await _resume(backend, execution_id, decision, as_json=as_json)
                return
            _check(waitpoint, decision)
            outcome = await backend.deliver_approval_signal(
                execution_id,
                waitpoint.waitpoint_id,
                decision.name,
                decided_by=user() if decision.by is None else decision.by,
                payload=payload,
            )
        except EngineError as error:
            raise await too_late(backend, execution_id, error.code) or error from error
    say(execution_id, waitpoint, decision.name, outcome, as_json=as_json)


def _check(waitpoint: OpenWaitpoint, decision: Decision) -> None:
    """A name that nothing asks for is a slip, unless it was typed."""
    names = waitpoint.required_signal_names
    if names == (TIMEOUT_ONLY,):
        raise CliError(
            "not_asked",
            f"{clean(waitpoint.waitpoint_key)} waits for its time only; no answer ends it",
            "`flowfabric cancel` ends the execution",
        )
    if names and decision.name not in names and not decision.named:
        raise CliError(
            "not_asked",
            f"{clean(waitpoint.waitpoint_key)} does not ask for {decision.name!r} but for "
            f"{wanted(waitpoint)}",
            "choose one of them with --name",
            *names,
        )


async def _resume(
    backend: Backend, execution_id: ExecutionId, decision: Decision, *, as_json: bool
) -> None:
    """A pause that only an operator ends has no signal to send."""
    if decision.name != "approved" or decision.payload is not None:
        raise CliError(
            "not_asked",
            "the execution waits for an operator to let it go on; it takes no other answer",
            "leave the options out to let it go on, or `flowfabric cancel` it",
        )
    done = await backend.resume_execution(execution_id, trigger_type="operator")
    if as_json:
        print_json(
            {
                "execution_id": execution_id,
                "outcome": "resumed",
                "public_state": done.public_state.value,
                "resumed": True,
            }
        )
    else:
        Screen().line(f"{execution_id}  ", ("it goes on", "green"))
