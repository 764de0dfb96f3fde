"""The deployment itself: secrets, scanners, capabilities (10 §3.6, §3.7)."""

import asyncio
import contextlib
import logging
import time
from typing import Any

import msgspec

from flowfabric.core.contracts.suspension import HmacKids, Rotation, RotationSummary
from flowfabric.core.errors import EngineError, NotFoundError
from flowfabric.core.ids import new_uuid
from flowfabric.engine.api.meta import Capabilities
from flowfabric.engine.api.secrets import check_rotation, rotations_reported
from flowfabric.scanners.settings import INTERVALS_S
from flowfabric.server.bodies import U32
from flowfabric.server.calls import Call
from flowfabric.server.problems import Problem
from flowfabric.server.queries import NoQuery
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import (
    Listed,
    RotationAnswer,
    RotationState,
    RotationStatus,
    ScannerRow,
)
from flowfabric.server.wire import Reply, answer, encode, tagged

log = logging.getLogger(__name__)
audit = logging.getLogger("flowfabric.audit")
routes = Routes()
ROTATION_TIMEOUT_S = 120.0
_KEPT_MS = 86_400_000
_PROGRESS_EVERY_S = 0.25
_ALIVE_MS = 60_000
"""How long a rotation counts as running without a sign of its process."""


@routes.get("/v1/capabilities", scope="read", answers={200: Capabilities})
async def read_capabilities(call: Call[None, NoQuery]) -> Reply:
    """List the operations that this deployment supports."""
    return answer(call.backend.meta.capabilities())


class RotateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The new secret and its name."""

    new_kid: str
    new_secret_hex: str


@routes.post(
    "/v1/admin/rotate-waitpoint-secret",
    scope="admin",
    answers={200: RotationAnswer},
    errors=(409, 503, 504),
)
async def rotate_waitpoint_secret(call: Call[RotateRequest, NoQuery]) -> Reply:
    """Sign waitpoint tokens with a new secret. The old one stays valid for a grace period."""
    call.require_all_namespaces()
    body, grace_ms = call.body, call.services.config.hmac_grace_ms
    check_rotation(body.new_kid, body.new_secret_hex, grace_ms)
    rotation = _Rotation(call, new_uuid())
    # Hold the permit while the rotation runs, which may take longer than the request.
    call.services.rotations.__enter__()
    task = call.services.run(rotation.run(), "ff-rotation")
    _, late = await asyncio.wait([task], timeout=ROTATION_TIMEOUT_S)
    if late:
        extra = {"action": "waitpoint_hmac_rotation_timeout_http_504", "new_kid": body.new_kid}
        extra |= {"timeout_s": ROTATION_TIMEOUT_S, "caller": call.caller.token_id}
        audit.error("the rotation continues in the background", extra=extra)
        text = (
            f"rotation exceeded {ROTATION_TIMEOUT_S:g}s server-side timeout; retry is safe and "
            "converges with the same pair"
        )
        fields = {"rotation_id": rotation.rotation_id}
        raise Problem("timeout", "rotate_waitpoint_secret", error=text, fields=fields)
    summary: RotationSummary = task.result()
    if not summary.rotated:
        if all(entry.status == "conflict" for entry in summary.entries):
            raise Problem("rotation_conflict", body.new_kid)
        raise Problem(
            "unavailable", "no partition was rotated", error="backend op unavailable: rotate"
        )
    return answer(
        RotationAnswer(
            rotated=summary.rotated,
            failed=list(summary.failed),
            new_kid=summary.new_kid,
            in_progress=[],
            rotation_id=rotation.rotation_id,
        )
    )


class _Rotation:
    """One rotation, whose state other replicas can read."""

    def __init__(self, call: Call[RotateRequest, NoQuery], rotation_id: str) -> None:
        self.rotation_id = rotation_id
        self._call = call
        self._started_at = round(time.time() * 1000)
        self._ended: list[Rotation] = []
        self._changed = asyncio.Event()

    async def run(self) -> RotationSummary:
        """Rotate every partition."""
        try:
            # Write the mark first: without it, a running rotation counts as dead.
            await self._mark_alive()
            await self._note("running")
            summary = await self._rotate()
        except EngineError:
            await self._note("failed")
            raise
        else:
            await self._note("done" if summary.rotated else "failed")
            return summary
        finally:
            self._call.services.rotations.__exit__()

    async def _rotate(self) -> RotationSummary:
        body, grace_ms = self._call.body, self._call.services.config.hmac_grace_ms
        reports = [asyncio.create_task(each()) for each in (self._stay_alive, self._show_progress)]
        try:
            with rotations_reported(self._add):
                return await self._call.backend.secrets.rotate_waitpoint_hmac_secret_all(
                    body.new_kid, body.new_secret_hex, grace_ms
                )
        finally:
            for report in reports:
                report.cancel()
            # An earlier progress report must not be stored after the final one.
            await asyncio.wait(reports)

    def _add(self, entry: Rotation) -> None:
        self._ended.append(entry)
        self._changed.set()

    async def _stay_alive(self) -> None:
        """Keep marking this rotation as alive."""
        while True:
            await asyncio.sleep(_ALIVE_MS / 3000)
            await self._mark_alive()

    async def _mark_alive(self) -> None:
        with contextlib.suppress(EngineError):
            await self._call.backend.notes.put_note(_mark(self.rotation_id), b"1", _ALIVE_MS)

    async def _show_progress(self) -> None:
        """Store the counts while the rotation runs, a few times per second at most."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._note("running")
            await asyncio.sleep(_PROGRESS_EVERY_S)

    async def _note(self, status: RotationStatus) -> None:
        summary = RotationSummary(new_kid=self._call.body.new_kid, entries=tuple(self._ended))
        left = set(range(self._call.backend.counts.flow))
        left.difference_update(entry.partition for entry in summary.entries)
        state = RotationState(
            rotation_id=self.rotation_id,
            new_kid=summary.new_kid,
            status=status,
            rotated=summary.rotated,
            failed=sorted(summary.failed),
            in_progress=sorted(left),
            started_at=self._started_at,
            finished_at=None if status == "running" else round(time.time() * 1000),
        )
        try:
            notes = self._call.backend.notes
            await notes.put_note(f"rotation:{self.rotation_id}", encode(state), _KEPT_MS)
        except EngineError as error:
            # The rotation matters more than its record.
            extra = {"action": "rotation_not_stored", "error": str(error)}
            log.warning("cannot store the state of a rotation: %s", error, extra=extra)


@routes.get("/v1/admin/rotations/{id}", scope="admin", answers={200: RotationState}, errors=(404,))
async def read_rotation(call: Call[None, NoQuery]) -> Reply:
    """Read the state of a rotation; it is kept for a day."""
    rotation_id = call.uuid("rotation_id")
    notes = call.backend.notes
    found = await notes.get_note(f"rotation:{rotation_id}")
    if found is None:
        raise Problem("rotation_not_found", rotation_id)
    state = msgspec.json.decode(found, type=RotationState)
    if state.status == "running" and await notes.get_note(_mark(rotation_id)) is None:
        # Its process died. A retry with the same pair rotates the rest.
        state = msgspec.structs.replace(state, status="failed")
    return answer(state)


def _mark(rotation_id: str) -> str:
    return f"rotation:{rotation_id}:alive"


@routes.get("/v1/admin/waitpoint-kids", scope="admin", answers={200: HmacKids})
async def list_kids(call: Call[None, NoQuery]) -> Reply:
    """List the keys that verify waitpoint tokens, without their secrets."""
    return answer(await call.backend.secrets.list_waitpoint_hmac_kids())


@routes.get("/v1/admin/scanners", scope="admin", answers={200: Listed("scanners", ScannerRow)})
async def list_scanners(call: Call[None, NoQuery]) -> Reply:
    """List the scanners of this process."""
    scanners = call.services.scanners
    found = {} if scanners is None else scanners.status()
    now, wall = asyncio.get_running_loop().time(), time.time()
    rows: list[ScannerRow] = []
    for name, interval_s in INTERVALS_S.items():
        status = found.get(name)
        seen = None if status is None else status.last_progress_at
        rows.append(
            ScannerRow(
                name=name,
                enabled=status is not None,
                interval_ms=round((status.interval_s if status else interval_s) * 1000),
                last_cycle_at=None if seen is None else round((wall - now + seen) * 1000),
                last_duration_ms=round(status.last_duration_s * 1000) if status else 0,
                processed=status.processed if status else 0,
                errors=status.errors if status else 0,
                restarts=status.restarts if status else 0,
            )
        )
    return answer({"scanners": rows, "next_cursor": None})


class RunScanner(msgspec.Struct, frozen=True, kw_only=True):
    """The partition to scan; all by default."""

    partition: U32 | None = None


@routes.post(
    "/v1/admin/scanners/{name}/run",
    scope="admin",
    optional_body=True,
    answers={200: dict[str, dict[str, int]]},
    errors=(404,),
)
async def run_scanner(call: Call[RunScanner, NoQuery]) -> Reply:
    """Run one cycle of a scanner now."""
    call.require_all_namespaces()
    name, scanners = call.value("name"), call.services.scanners
    if scanners is None:
        raise Problem("scanner_not_found", name[:80])
    try:
        result = await scanners.scan_once(name, call.body.partition)
    except NotFoundError:
        raise Problem("scanner_not_found", name[:80]) from None
    counts: dict[str, Any] = {"processed": result.processed, "errors": result.errors}
    return answer(tagged("ran", counts))
