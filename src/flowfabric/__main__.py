"""The command, also as `python -m flowfabric`."""

import os
import signal
import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it quietly, also while it is being loaded."""
    # Raised inside an import, KeyboardInterrupt may reach us as another exception or be ignored.
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _exit)
    from flowfabric.cli.main import main as run  # noqa: PLC0415

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(130)


def _exit(*_: object) -> None:
    os._exit(130)


if __name__ == "__main__":
    main()
