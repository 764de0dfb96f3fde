"""The event loop of processes that serve until they are stopped."""

import asyncio
import gc


def service_runner() -> asyncio.Runner:
    """A runner for the process's only loop, on uvloop if available. Call it after loading all code.

    Freezes what is loaded by then: a full garbage collection would scan all of it and block the
    loop for 20 ms or more.
    """
    gc.freeze()
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
