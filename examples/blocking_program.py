"""A program without an event loop, and a worker that `flowfabric worker` runs.

Run it with `python -m examples.blocking_program`; it uses FF_URL, or an embedded Valkey.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import flowfabric as ff

app = ff.Fabric()


@app.task(lane="blocking", retry=ff.Retry(3))
def slug(title: str) -> str:
    """A title in the form that a URL uses."""
    words = "".join(c if c.isalnum() else " " for c in title.lower()).split()
    return "-".join(words)


@contextmanager
def worker_process() -> Generator[None]:
    """Run `flowfabric worker examples.blocking_program:app` until the block ends."""
    command = str(Path(sys.executable).with_name("flowfabric"))
    arguments = [command, "worker", "examples.blocking_program:app", "--log-level", "warning"]
    with subprocess.Popen(arguments) as process:
        try:
            yield
        finally:
            process.terminate()
    assert process.returncode == 0, "the worker did not exit cleanly"


def main() -> None:
    """Submit from plain code, one by one, in a batch, and from several threads."""
    with ff.SyncFabric(app) as sync, worker_process():
        run = sync.submit(slug, "Durable Work is Calm Work")
        assert run.result(timeout=20) == "durable-work-is-calm-work"
        print("result:", run.result())

        titles = ["One", "Two & Three", "Four, Five"]
        runs = sync.submit_many(slug, [[title] for title in titles])
        slugs = [each.result(timeout=20) for each in runs]
        assert slugs == ["one", "two-three", "four-five"]
        print("batch:", ", ".join(slugs))

        def submit_page(number: int) -> str:
            return sync.submit(slug, f"Page {number}").result(timeout=20)

        with ThreadPoolExecutor(4) as pool:
            pages = list(pool.map(submit_page, range(20)))
        assert pages == [f"page-{number}" for number in range(20)]
        print("threads: 20 results through one connection")


if __name__ == "__main__":
    main()
