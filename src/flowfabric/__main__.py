"""The command, also as `python -m flowfabric`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it quietly, also while it is being loaded."""
    try:
        from flowfabric.cli.main import main as run  # noqa: PLC0415

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
