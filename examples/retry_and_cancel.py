"""What happens when things go wrong: retries, permanent failures, timeouts, cancellation, replay.

Run it with `python -m examples.retry_and_cancel`; it uses FF_URL, or an embedded Valkey.
"""

from __future__ import annotations

import asyncio
from typing import Any

import flowfabric as ff

app = ff.Fabric()
broken = {"printer"}
started = asyncio.Event()


@app.task(lane="trouble", retry=ff.Retry(3, backoff="100ms"))
async def call_bank(ctx: ff.Context) -> int:
    """Fails twice: any exception is a failed attempt, and the policy decides what follows."""
    if ctx.attempt < 3:
        raise ConnectionError("the bank hung up")
    return ctx.attempt


@app.task(lane="trouble", retry=ff.Retry(3, backoff="100ms"))
async def pay(amount: int) -> None:
    """Some failures are final, whatever the policy allows."""
    if amount > 1000:
        raise ff.PermanentError("over the limit")


@app.task(lane="trouble", timeout="300ms")
async def hang() -> None:
    """Never ends by itself; the attempt's timeout ends it."""
    await asyncio.Event().wait()


@app.task(lane="trouble")
async def long_job() -> None:
    """Runs until it is cancelled."""
    started.set()
    await asyncio.Event().wait()


@app.task(lane="trouble")
def print_label(device: str) -> str:
    """Works after the device has been repaired."""
    if device in broken:
        raise OSError(f"{device} is out of paper")
    return f"printed on {device}"


async def retried() -> None:
    """Three attempts, one result."""
    run = await app.submit(call_bank)
    assert await run.result(timeout=20) == 3
    attempts = await (await app.client()).backend.reads.read_attempts(run.id)
    assert [a.attempt_type for a in attempts] == ["initial", "retry", "retry"]
    reasons = [a.failure_reason.splitlines()[0] for a in attempts if a.failure_reason]
    assert reasons == ["ConnectionError: the bank hung up"] * 2
    print("retry:", ", then ".join(reasons), "and then a result")


async def failure(run: ff.Run[Any]) -> ff.RunError:
    """Return the error that `result()` raises."""
    try:
        await run.result(timeout=20)
    except ff.RunError as error:
        return error
    raise AssertionError(f"{run} has a result")


async def failed_for_good() -> None:
    """A permanent failure ends the execution at once, whatever its retry policy."""
    error = await failure(await app.submit(pay, 5000))
    assert isinstance(error, ff.ExecutionFailed)
    assert error.attempts == 1
    print("permanent:", error)


async def timed_out() -> None:
    """An attempt that takes too long ends the execution, unless its policy retries."""
    error = await failure(await app.submit(hang))
    assert isinstance(error, ff.ExecutionExpired)
    print("timeout:", error)


async def cancelled() -> None:
    """Cancelling works in any state; a running handler is stopped."""
    run = await app.submit(long_job)
    await asyncio.wait_for(started.wait(), 20)
    await run.cancel("no longer needed")
    error = await failure(run)
    assert isinstance(error, ff.ExecutionCancelled)
    assert error.info.cancellation_reason == "no longer needed"
    print("cancel:", error)


async def replayed() -> None:
    """After the cause is repaired, the same execution runs again under the same id."""
    run = await app.submit(print_label, "printer")
    assert (await run.wait(timeout=20)).state == "failed"
    broken.clear()
    await (await app.client()).replay(run.id, "refilled")
    assert await run.result(timeout=20) == "printed on printer"
    info = await run.info()
    assert info.replay_count == 1
    print("replay: attempt", info.total_attempt_count, "gave a result")


async def main() -> None:
    """Run all parts in order."""
    async with app, app.worker(lease_ttl=2):
        await retried()
        await failed_for_good()
        await timed_out()
        await cancelled()
        await replayed()


if __name__ == "__main__":
    asyncio.run(main())
