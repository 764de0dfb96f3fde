"""Signals in a serving process: other listeners still receive their own."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

IDLE = """
import asyncio, signal, sys
from flowfabric.app.stopping import on_signals

async def main() -> None:
    stopped = asyncio.Event()
    if "before" in sys.argv:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print, "of the loop")
    with on_signals(stopped.set, announce=lambda: None):
        if "during" in sys.argv:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print, "of the loop")
        if "plain" in sys.argv:
            signal.signal(signal.SIGUSR1, lambda *_: print("of the loop"))
        print("ready")
        await stopped.wait()
    print("over", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)

if "uvloop" in sys.argv:
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("set_up", ["before", "during", "plain"])
async def test_an_idle_loop_receives_other_signals_and_ours(loop: str, set_up: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-c", IDLE, loop, set_up), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            assert await process.stdout.readline() == b"ready\n"
            for _ in range(2):
                process.send_signal(signal.SIGUSR1)
                assert await process.stdout.readline() == b"of the loop\n"
            process.send_signal(signal.SIGTERM)
            assert await process.stdout.read() == b"over True\n"
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
