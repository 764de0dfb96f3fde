"""Submit, serve with two workers, kill one of them mid-task, and show that nothing is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flowfabric as ff
from examples.demo.app import Order, app, exchange_rate, statement
from examples.demo.proof import verify
from examples.demo.screen import Screen
from examples.demo.watch import Row, Watch
from examples.demo.worker import LEASE_SECONDS, WorkerProcess

_LOOK_EVERY = 0.1
_GIVE_UP_AFTER = 40.0
_CURRENCIES = ("EUR", "USD", "GBP")
_CUSTOMERS = ("Ada", "Grace", "Barbara", "Katherine", "Radia", "Frances", "Hedy", "Joan", "Sophie")
_ORDERS = (Order("tea", 2, 450), Order("cups", 6, 1290), Order("kettle", 1, 3995))


async def play(folder: Path) -> int:
    """Run the demo; return 0 if every promise was kept. Worker logs go to the folder."""
    async with app:
        # The first client starts the embedded Valkey. This one stays open longer than both workers.
        await app.client()
        workers = [WorkerProcess(name, folder) for name in ("alpha", "beta")]
        screen = Screen(workers)
        try:
            broken = await _perform(workers, screen)
        except Exception:
            for worker in workers:
                screen.note(worker.log_text())
            raise
        finally:
            exits = {worker.name: worker.close() for worker in workers}
        if exits["beta"] != 0:
            broken.append(f"beta did not exit cleanly: its status is {exits['beta']}")
    for sentence in broken:
        screen.note(f"broken promise: {sentence}")
    return 1 if broken else 0


async def _perform(workers: Sequence[WorkerProcess], screen: Screen) -> list[str]:
    """Run the demo; return the broken promises."""
    victim, survivor = workers
    for worker in workers:
        await asyncio.to_thread(worker.wait_ready)
    watch = Watch(await app.client(), await _submit())
    with screen:
        await _until_mid_task(watch, screen, victim.name)
        victim.kill()
        killed_at = time.monotonic()
        lost = [row.label for row in await watch.rows() if row.runs_on(victim.name)]
        screen.say(f"kill -9 {victim.process.pid}: {victim.name} dies holding {', '.join(lost)}")
        reclaimed_at = await _until_all_ended(watch, screen, lost)
    rows = await watch.rows()
    retried = [row.label for row in rows if any(a.attempt_type == "retry" for a in row.attempts)]
    results = sum(bool(row.result) for row in rows)
    successes = sum(a.attempt_state == "ended_success" for row in rows for a in row.attempts)
    screen.note(
        f"\n{len(rows)} submitted, {results} results from {successes} successful attempts\n"
        f"{len(lost)} held by {victim.name} when it was killed with SIGKILL\n"
        f"{len(lost)} reclaimed by {survivor.name}, the first {reclaimed_at - killed_at:.1f} s "
        f"after the kill (a lease lasts {LEASE_SECONDS} s)\n"
        f"{len(retried)} retried after an error: {', '.join(retried)}"
    )
    return verify(rows, lost, victim.name)


async def _submit() -> list[tuple[str, ff.Run[Any]]]:
    """The month's work: exchange rates first, then a statement per customer."""
    rates = await exchange_rate.options(priority=10).submit_many([[c] for c in _CURRENCIES])
    calls = [
        {"customer": customer, "orders": [*_ORDERS, Order("sugar", number, 199)]}
        for number, customer in enumerate(_CUSTOMERS)
    ]
    statements = await app.submit_many(statement, calls)
    return [
        *((f"exchange_rate {c}", run) for c, run in zip(_CURRENCIES, rates, strict=True)),
        *((f"statement {c}", run) for c, run in zip(_CUSTOMERS, statements, strict=True)),
    ]


async def _until_mid_task(watch: Watch, screen: Screen, worker: str) -> None:
    """Return when the worker is in the middle of at least two statements."""
    async with asyncio.timeout(_GIVE_UP_AFTER):
        while True:
            rows = await watch.rows()
            screen.show(rows)
            if sum(row.runs_on(worker) and bool(row.progress) for row in rows) >= 2:
                return
            await asyncio.sleep(_LOOK_EVERY)


async def _until_all_ended(watch: Watch, screen: Screen, lost: Sequence[str]) -> float:
    """Wait until all executions have ended; return when a lost one first ran again."""
    reclaimed_at = 0.0
    async with asyncio.timeout(_GIVE_UP_AFTER):
        while True:
            rows = await watch.rows()
            screen.show(rows)
            if not reclaimed_at and any(_runs_again(row, lost) for row in rows):
                reclaimed_at = time.monotonic()
            if all(row.ended for row in rows):
                return reclaimed_at
            await asyncio.sleep(_LOOK_EVERY)


def _runs_again(row: Row, lost: Sequence[str]) -> bool:
    return row.label in lost and row.attempts[-1].attempt_type == "reclaim"
