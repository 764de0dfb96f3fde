"""Changing executions from the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flowfabric.cli.errors import CliError, exit_code, report
from flowfabric.cli.options import Target
from flowfabric.cli.resolve import resolve
from flowfabric.cli.screen import Screen, print_json, state_style
from flowfabric.cli.session import opened
from flowfabric.cli.user import user
from flowfabric.core.errors import EngineError, FlowFabricError, TransportError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.backend import Backend

__all__ = ["cancel", "replay"]

_HINTS = {
    "execution_not_active": "it has ended, so there is nothing to cancel; `flowfabric replay` "
    "runs it again",
    "execution_not_terminal": "only one that has ended can be replayed; cancel it first, or wait",
}


def cancel(target: Target, ids: Sequence[str], reason: str, *, as_json: bool) -> int:
    """Cancel each; one that cannot be cancelled does not keep the others. The exit code."""
    return asyncio.run(_cancel_all(target, ids, reason, as_json=as_json))


async def _cancel_all(target: Target, ids: Sequence[str], reason: str, *, as_json: bool) -> int:
    code = 0
    async with opened(target.url) as backend:
        for text in dict.fromkeys(ids):
            try:
                execution_id = await resolve(backend, text, target.namespace)
                try:
                    done = await backend.cancel_execution(execution_id, reason)
                except EngineError as error:
                    raise await _told(backend, execution_id, error) from error
            except TransportError:
                raise
            except FlowFabricError as error:
                code = max(code, exit_code(error))
                report(error, as_json=as_json)
            else:
                _say(execution_id, done.public_state.value, as_json=as_json)
    return code


async def _told(backend: Backend, execution_id: ExecutionId, error: EngineError) -> FlowFabricError:
    """A refusal for the wrong state, with the state it is in and what can be done there."""
    hint = _HINTS.get(error.code)
    if hint is None:
        return error
    state = (await backend.read_execution_state(execution_id)).value
    return CliError(error.code, f"{execution_id} is {state}", hint, *error.details)


def _miscounted(
    execution_id: ExecutionId, error: EngineError, expected: int | None
) -> FlowFabricError:
    return CliError(
        error.code,
        f"{execution_id} was replayed {error.detail} times, not {expected}: it was left alone",
        f"if one more replay is wanted, repeat with --expected-replay-count {error.detail}",
        *error.details,
    )


def replay(target: Target, text: str, reason: str, expected: int | None, *, as_json: bool) -> None:
    """Replay one execution."""
    asyncio.run(_replay(target, text, reason, expected, as_json=as_json))


async def _replay(
    target: Target, text: str, reason: str, expected: int | None, *, as_json: bool
) -> None:
    async with opened(target.url) as backend:
        execution_id = await resolve(backend, text, target.namespace)
        try:
            done = await backend.replay_execution(
                execution_id,
                reason=reason,
                requested_by=user(),
                expected_replay_count=expected,
            )
        except EngineError as error:
            if error.code == "replay_not_allowed":
                raise _miscounted(execution_id, error, expected) from error
            raise await _told(backend, execution_id, error) from error
    _say(execution_id, done.public_state.value, as_json=as_json)


def _say(execution_id: ExecutionId, state: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"execution_id": str(execution_id), "public_state": state})
    else:
        Screen().line(f"{execution_id}  ", (state, state_style(state)))
