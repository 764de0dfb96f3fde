"""Notebooks and programs without an event loop: cells that run again, workers on a thread."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flowfabric as ff
from tests.support.engine import Engine
from tests.support.server import TestServer

CELL = """
@app.task
async def greet(name: str) -> str:
    return f"{greeting}, {name}!"
"""
MODULE = "from shared_app import app\n\n\n@app.task\ndef send() -> int:\n    return 1\n"


@pytest.fixture
def app(engine: Engine, valkey: TestServer) -> ff.Fabric:
    return ff.Fabric(valkey.url)


@pytest.fixture
def modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: ff.Fabric
) -> Iterator[dict[str, Path]]:
    """A folder of modules that share an application; those imported are forgotten afterwards."""
    known = dict(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    # A module of the same second would be taken from its cache.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    shared: Any = type(sys)("shared_app")
    shared.app = app
    sys.modules["shared_app"] = shared
    yield {name: tmp_path / f"{name}.py" for name in ("mail", "chat")}
    for name in sys.modules.keys() - known.keys():
        del sys.modules[name]


def run_cell(source: str, **names: Any) -> None:
    exec(compile(source, "<ipython-input-1>", "exec"), {"__name__": "__main__", **names})


def greeted(app: ff.Fabric) -> str:
    with app.worker(scanners=False), ff.SyncFabric(app) as sync:
        return sync.submit("greet", "Ada").result(timeout=10)


def test_a_cell_that_runs_again_replaces_its_task(app: ff.Fabric) -> None:
    run_cell(CELL, app=app, greeting="Hello")
    assert greeted(app) == "Hello, Ada!"
    run_cell(CELL.replace("name: str", "name: str, *, loud: bool = False"), app=app, greeting="Hi")
    assert greeted(app) == "Hi, Ada!"
    assert list(app.tasks) == ["greet"]
    app.tasks["greet"].encode((), {"name": "Ada", "loud": True})


def test_a_worker_that_runs_already_uses_the_new_function(app: ff.Fabric) -> None:
    run_cell(CELL, app=app, greeting="Hello")
    with app.worker(scanners=False), ff.SyncFabric(app) as sync:
        assert sync.submit("greet", "Ada").result(timeout=10) == "Hello, Ada!"
        run_cell(CELL.replace("async def", "def"), app=app, greeting="Hi")
        assert sync.submit("greet", "Ada").result(timeout=10) == "Hi, Ada!"


def test_a_module_that_is_reloaded_replaces_its_tasks(
    app: ff.Fabric, modules: dict[str, Path]
) -> None:
    modules["mail"].write_text(MODULE)
    mail = importlib.import_module("mail")
    modules["mail"].write_text(f"# edited\n{MODULE.replace('return 1', 'return 2')}")
    importlib.reload(mail)
    assert app.tasks["send"]() == 2


def test_two_functions_of_one_name_are_refused(app: ff.Fabric, modules: dict[str, Path]) -> None:
    refused = pytest.raises(ff.ConfigError, match='A task named "send" is already registered')
    modules["mail"].write_text(MODULE)
    modules["chat"].write_text(MODULE)
    importlib.import_module("mail")
    with refused:
        importlib.import_module("chat")
    with refused:
        run_cell(MODULE)
    assert app.tasks["send"].function.__module__ == "mail"


def test_two_definitions_in_one_module_are_refused(
    app: ff.Fabric, modules: dict[str, Path]
) -> None:
    modules["mail"].write_text(MODULE + MODULE.partition("\n")[2])
    with pytest.raises(ff.ConfigError, match="Pass name= to register both"):
        importlib.import_module("mail")


def test_each_call_of_a_function_makes_another_task(app: ff.Fabric) -> None:
    def register(number: int) -> None:
        @app.task
        def count() -> int:
            return number

    register(1)
    with pytest.raises(ff.ConfigError, match='"count" is already registered'):
        register(2)


def test_a_worker_serves_a_program_without_an_event_loop(app: ff.Fabric) -> None:
    @app.task
    def threaded() -> bool:
        return threading.current_thread() is not threading.main_thread()

    worker = app.worker(scanners=False)
    with ff.SyncFabric(app) as sync:
        for _ in range(2):
            with worker:
                assert sync.submit(threaded).result(timeout=10)
        assert sync.submit(threaded).state() == "waiting"
    assert "ff-worker" not in {thread.name for thread in threading.enumerate()}


def test_a_worker_that_cannot_start_says_why_and_leaves_no_thread(app: ff.Fabric) -> None:
    @app.task
    def job() -> None: ...

    with pytest.raises(ff.ConfigError, match="lease_ttl_ms"):
        app.worker(lease_ttl=0.01).__enter__()
    assert "ff-worker" not in {thread.name for thread in threading.enumerate()}


def test_the_sync_application_has_what_the_application_has(app: ff.Fabric) -> None:
    def public(value: object) -> set[str]:
        return {name for name in dir(value) if not name.startswith("_")}

    with ff.SyncFabric(app) as sync:
        # Closing has its usual name, and two parts belong to the async half alone.
        assert public(sync) == public(app) - {"aclose", "location", "twin"} | {"close"}
        assert (sync.namespace, sync.tasks) == (app.namespace, app.tasks)
