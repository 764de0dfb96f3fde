"""Finding the execution that a person means."""

from __future__ import annotations

import re

from flowfabric.cli.errors import CliError, UsageError
from flowfabric.core.catalogue import CATALOGUE
from flowfabric.core.errors import EngineError
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.backend import Backend

__all__ = ["resolve"]

_MIN_PREFIX = 4
_UUID_LENGTH = 36
_SHOWN = 10
_is_prefix = re.compile(r"[0-9a-f-]{1,36}").fullmatch


async def resolve(backend: Backend, text: str, namespace: str | None = None) -> ExecutionId:
    """The execution named by a full id, a UUID, or a beginning of one that fits no other."""
    found = await _candidates(backend, text.strip().lower())
    if namespace is not None:
        found = [each for each in found if await _lives_in(backend, each, namespace)]
    if not found:
        raise _unknown(text, namespace)
    if len(found) > 1:
        raise await _ambiguous(backend, text, found)
    return found[0]


async def _candidates(backend: Backend, text: str) -> list[ExecutionId]:
    if text.startswith("{"):
        try:
            exact = backend.checked(ExecutionId.parse(text))
        except EngineError as error:
            raise _refused(error.explanation) from error
        known = await backend.get_execution_namespace(exact)
        return [] if known is None else [exact]
    if not _is_prefix(text):
        raise _refused(f"{text!r} is neither an execution id nor a UUID")
    if len(text) < _MIN_PREFIX:
        raise _refused(f"{text!r} is too short: give at least {_MIN_PREFIX} characters")
    return await backend.find_executions(text, _SHOWN + 1)


def _unknown(text: str, namespace: str | None) -> CliError:
    how = "has the id" if len(text.strip()) >= _UUID_LENGTH else "has an id that begins with"
    where = "" if namespace is None else f" in namespace {namespace}"
    code = "execution_not_found"
    return CliError(code, f"no execution{where} {how} {text!r}", CATALOGUE[code].hint, text)


def _refused(problem: str) -> UsageError:
    return UsageError("invalid_input", problem, "`flowfabric ps` lists executions and their ids")


async def _lives_in(backend: Backend, execution_id: ExecutionId, namespace: str) -> bool:
    return await backend.get_execution_namespace(execution_id) == namespace


async def _ambiguous(backend: Backend, text: str, found: list[ExecutionId]) -> CliError:
    lines: list[str] = []
    for execution_id in found[:_SHOWN]:
        try:
            info = await backend.read_execution_info(execution_id)
            lines.append(f"{execution_id}  {info.execution_kind}  {info.public_state.value}")
        except EngineError:
            lines.append(str(execution_id))
    if len(found) > _SHOWN:
        lines.append("…")
    listed = "".join(f"\n  {line}" for line in lines)
    return CliError(
        "ambiguous_id",
        f"{text!r} is the beginning of more than one id:{listed}",
        "give more of the id",
        *(str(each) for each in found[:_SHOWN]),
    )
