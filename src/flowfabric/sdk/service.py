"""The event loop of processes that serve until they are stopped."""

import asyncio
import gc


def service_runner() -> asyncio.Runner:
    """A runner for the only loop of a process that has loaded its code; uvloop where there is one.

    What is loaded by then is left out of garbage collections. A full one would look through all of
    it and stop the loop for 20 ms or more.
    """
    gc.freeze()
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
