"""The pytest plugin as users get it: with any plugin for async tests, or with none."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.docs.scratch import run_python

SHOP = """
import asyncio
import flowfabric as ff

app = ff.Fabric("valkey://127.0.0.1:1")  # nothing listens there
loops = set()

@app.task
async def greet(name: str) -> str:
    loops.add(id(asyncio.get_running_loop()))
    return f"Hello, {name}!"
"""
TESTS = """
import asyncio
import pytest
from shop import app, greet, loops

{mark}

@pytest.mark.parametrize("name", ["Ada", "Grace"])
async def test_greet(fabric, name):
    fabric.use(app)
    run = await greet.options(idempotency_key="same").submit(name)
    await fabric.drain()
    assert await run.result() == f"Hello, {{name}}!"
    assert id(asyncio.get_running_loop()) in loops

class TestInAClass:
    async def test_greet(self, fabric, greeted="Grace"):
        fabric.use(app)
        await greet.submit(greeted)
        assert [each.result for each in await fabric.drain()] == ["Hello, Grace!"]

def test_greet_without_await(sync_fabric):
    shop = sync_fabric.use(app)
    run = shop.submit(greet, "Ada")
    assert [each.result for each in sync_fabric.drain()] == ["Hello, Ada!"]
    assert run.result() == "Hello, Ada!"
"""
ANYIO = """
pytestmark = pytest.mark.anyio

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""
ASYNC_FIXTURE = """
@pytest.fixture
async def greeting(fabric):
    fabric.use(app)
    return await greet.submit("Ada")

async def test_a_run_of_a_fixture(fabric, greeting):
    assert [each.run.id for each in await fabric.drain()] == [greeting.id]
"""
REFUSAL = """
import subprocess
import sys

PROGRAM = '''
import asyncio, sys
import flowfabric as ff
asyncio.run(ff.Fabric(sys.argv[1]).submit("greet"))
'''

def test_refusal(flowfabric_engine):
    command = [sys.executable, "-c", PROGRAM, flowfabric_engine.url]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "library_version_conflict" in done.stderr
    assert "functions for tests that move its clock" in done.stderr
"""
UNUSED = """
import sys

def test_other():
    ours = {name for name in sys.modules if name.startswith("flowfabric")}
    assert ours == {
        "flowfabric", "flowfabric.core", "flowfabric.core.version",
        "flowfabric.testing", "flowfabric.testing.plugin",
    }
    assert "msgspec" not in sys.modules
"""


def run_tests(folder: Path, source: str, *arguments: str, plugins: str = "") -> str:
    """What pytest prints about a test file, with our plugin and these."""
    (folder / "test_it.py").write_text(source)
    names = ",".join(filter(None, ["flowfabric.testing.plugin", plugins]))
    return run_python(
        *(folder, "-m", "pytest", "-p", "no:cacheprovider", *arguments),
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        PYTEST_PLUGINS=names,
    )


SCOPE = "asyncio_default_fixture_loop_scope=function"


@pytest.mark.parametrize(
    ("plugins", "mark", "options"),
    [
        ("", "", []),
        ("pytest_asyncio.plugin", ASYNC_FIXTURE, ["-o", "asyncio_mode=auto", "-o", SCOPE]),
        ("pytest_asyncio.plugin", "", ["-o", SCOPE]),
        ("anyio.pytest_plugin", ANYIO + ASYNC_FIXTURE, []),
        ("xdist.plugin", "", ["-n", "2"]),
    ],
    ids=["alone", "asyncio", "asyncio-unmarked", "anyio", "xdist"],
)
def test_tests_run_with_any_plugin(
    tmp_path: Path, plugins: str, mark: str, options: list[str]
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    told = run_tests(tmp_path, TESTS.format(mark=mark), *options, plugins=plugins)
    assert f"{5 if ASYNC_FIXTURE in mark else 4} passed" in told
    assert not (tmp_path / ".flowfabric").exists()


def test_it_is_installed_with_the_package() -> None:
    (found,) = entry_points(group="pytest11", name="flowfabric")
    assert found.value == "flowfabric.testing.plugin"


def test_it_costs_nothing_where_it_is_not_used(tmp_path: Path) -> None:
    assert "1 passed" in run_tests(tmp_path, UNUSED)


def test_the_kit_works_without_pytest(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['pytest'] = None\n"
        "import flowfabric.testing as testing\n"
        "print([getattr(testing, name).__name__ for name in testing.__all__] == testing.__all__)\n"
    )
    assert run_python(tmp_path, "-c", program) == "True\n"


def test_a_process_without_the_kit_refuses_the_test_engine(tmp_path: Path) -> None:
    assert "1 passed" in run_tests(tmp_path, REFUSAL)
