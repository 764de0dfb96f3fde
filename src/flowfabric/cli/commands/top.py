"""`flowfabric top`."""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Annotated, Any

from rich.live import Live

from flowfabric.cli import options
from flowfabric.cli.options import Deployment, flag
from flowfabric.cli.session import describe_location, open_backend
from flowfabric.cli.views.screen import Screen, print_json
from flowfabric.cli.views.top import TopFrame, print_frame, render
from flowfabric.core.errors import EngineError
from flowfabric.engine.api.backend import Backend
from flowfabric.engine.connect import ServerLocation
from flowfabric.engine.live_overview import LiveReader, unless_refused
from flowfabric.scanners.board import read_board

_LIVE_S = 2.0
_ONCE_S = 1.0
_PATIENCE_S = 3.0
"""How long one refresh may take on a terminal before an outage is shown."""
_INTERVAL = options.duration(
    "How often to refresh. Default: 2s. Without a terminal, print one snapshot per interval.",
    "100ms",
    "1h",
)


async def top(
    target: Deployment,
    *,
    interval: Annotated[float | None, _INTERVAL] = None,
    once: Annotated[bool, flag("--once", "Print one snapshot and exit.")] = False,
) -> None:
    """Show the activity of the deployment, live.

    Shows rates, lanes, workers, waits, scanners, and budgets near their limit.
    Press q or Ctrl-C to quit. Without a terminal, or with --json, prints one snapshot; with
    --interval, one per interval. The rates are those of the last interval. The cost of a refresh
    does not depend on the number of executions.
    """
    screen = Screen()
    live = screen.terminal and not once and not target.as_json
    one = not live and (once or interval is None)
    pause_s = interval or (_LIVE_S if live else _ONCE_S)
    where = describe_location(ServerLocation(target.url))
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, leave.set)
    loop.add_signal_handler(signal.SIGTERM, leave.set)
    async with open_backend(target) as backend:
        if live:
            with (
                _keys(leave),
                Live(console=screen.console, screen=True, auto_refresh=False) as show,
            ):
                async for frame in _frames(backend, pause_s, leave, patient=True):
                    show.update(render(frame, where, screen), refresh=True)
            return
        async for frame in _frames(backend, pause_s, leave, skip_first=one):
            if isinstance(frame, TopFrame):
                _print(frame, where, as_json=target.as_json)
            if one:
                return


def _print(frame: TopFrame, where: str, *, as_json: bool) -> None:
    if as_json:
        print_json(frame.fields())
    else:
        print_frame(frame, where)
    sys.stdout.flush()


async def _frames(
    backend: Backend,
    pause_s: float,
    leave: asyncio.Event,
    *,
    skip_first: bool = False,
    patient: bool = False,
) -> AsyncGenerator[TopFrame | str]:
    """Yield frames until `leave` is set; the first has no rates. `patient`: go on after errors."""
    async with LiveReader(backend) as reader:
        while not leave.is_set():
            try:
                async with asyncio.timeout(_PATIENCE_S if patient else None):
                    frame = await _unless(leave, _look(backend, reader))
            except (EngineError, TimeoutError) as error:
                if not patient:
                    raise
                frame = f"cannot read the deployment: {error or 'no answer yet'}"
            if frame is not None and not skip_first:
                yield frame
            skip_first = False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(leave.wait(), pause_s)


async def _unless(leave: asyncio.Event, look: Coroutine[Any, Any, TopFrame]) -> TopFrame | None:
    """The result of `look`; None if the user quits first."""
    looking, leaving = asyncio.create_task(look), asyncio.create_task(leave.wait())
    try:
        await asyncio.wait((looking, leaving), return_when=asyncio.FIRST_COMPLETED)
        return looking.result() if looking.done() else None
    finally:
        looking.cancel()
        leaving.cancel()


async def _look(backend: Backend, reader: LiveReader) -> TopFrame:
    overview, leaders, board = await asyncio.gather(
        reader.read(),
        unless_refused(backend.leadership.leaders()),
        unless_refused(read_board(backend)),
    )
    return TopFrame(overview=overview, leaders=leaders, board=board)


@contextlib.contextmanager
def _keys(leave: asyncio.Event) -> Generator[None]:
    """Quit on q, if there is a keyboard."""
    if not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        keys = os.read(keyboard, 64)
        if not keys or b"q" in keys.lower():
            leave.set()

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, pressed)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
