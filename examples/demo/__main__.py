"""Run the demo on its own temporary Valkey, and delete it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def private_engine() -> Generator[Path]:
    """An embedded Valkey of its own: neither a running deployment nor `.flowfabric` is touched."""
    folder = Path(tempfile.mkdtemp(prefix="flowfabric-demo-"))
    for variable in ("FF_URL", "FF_HOST"):
        os.environ.pop(variable, None)
    os.environ["FF_DATA_DIR"] = str(folder / "engine")
    try:
        yield folder
    finally:
        # Valkey exits after its last client disconnects. Delete its folder only then.
        deadline = time.monotonic() + 10
        while (folder / "engine" / "valkey.sock").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """The exit status: 0 when every promise was kept."""
    started = time.monotonic()
    with private_engine() as folder:
        # The application reads FF_DATA_DIR when it is imported.
        from examples.demo.play import play  # noqa: PLC0415

        status = asyncio.run(play(folder))
    verdict = "all promises kept" if status == 0 else "FAILED"
    print(f"\n{verdict} in {time.monotonic() - started:.1f} s")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
