"""A worker process of the demo: `python -m examples.demo.worker NAME`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from examples.demo.app import app

LEASE_SECONDS = 2
"""Short, so that another worker soon takes over the tasks of the killed one."""
READY = "ready"


class WorkerProcess:
    """One worker, as the demo sees it: a name, a process, and whether it was killed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.killed = False
        self._log = folder / f"{name}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "examples.demo.worker", name],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_ready(self) -> None:
        """Wait until the worker is ready; raises if it does not start."""
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != READY:
            raise RuntimeError(f"worker {self.name} did not start")

    def log_text(self) -> str:
        """What the worker wrote to its log, to show when something fails."""
        return f"log of {self.name}:\n{self._log.read_text()}"

    def kill(self) -> None:
        """Kill the process with `kill -9`, without any clean-up."""
        self.process.kill()
        self.process.wait()
        self.killed = True

    def close(self) -> int:
        """Stop the worker after its running tasks finish; returns its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            status = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status


def main(name: str) -> None:
    """Run until a signal stops it."""
    worker = app.worker(worker_id=name, concurrency=3, lease_ttl=LEASE_SECONDS)
    asyncio.run(worker.run(ready=lambda: print(READY, flush=True)))


if __name__ == "__main__":
    main(sys.argv[1])
