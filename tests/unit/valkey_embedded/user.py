"""A process that uses the embedded Valkey, driven line by line over its standard input."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from flowfabric.core.errors import ConfigError
from flowfabric.valkey.embedded import EmbeddedServer


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main(folder: str, uid: int) -> None:
    if uid >= 0:
        os.setuid(uid)
    say(starting=True)
    if gate := os.environ.get("TEST_GATE"):
        # A named pipe opens for all its readers at once.
        Path(gate).open("rb").close()
    try:
        server = EmbeddedServer.acquire(Path(folder))
    except ConfigError as error:
        say(error=str(error))
        return
    say(pid=server.pid, owner=server.owner, url=server.url)
    forked = 0
    for line in sys.stdin:
        match line.strip():
            case "ensure":
                say(restarted=server.ensure_running(), pid=server.pid, url=server.url)
            case "fork":
                forked = os.fork()
                if not forked:
                    # The child keeps its copy of the hold until the test closes the input.
                    sys.stdin.read()
                    os._exit(0)
                say(child=forked)
            case "fork-release":
                forked = os.fork()
                if not forked:
                    server.release()
                    os._exit(0)
                os.waitpid(forked, 0)
                say(child=forked)
            case "release":
                server.release()
                say(released=True)
            case _:
                break
    # Not a clean interpreter exit: nothing may depend on one.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
