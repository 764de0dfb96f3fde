"""The pytest plugin. It imports the rest of the package when a test asks for a fixture."""

import asyncio
import functools
import inspect
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flowfabric.testing.engine import TestEngine
    from flowfabric.testing.fabric import SyncTestFabric, TestFabric


@pytest.fixture(scope="session")
def flowfabric_engine() -> "Iterator[TestEngine]":
    """The embedded Valkey of this test process, in a private folder."""
    from flowfabric.testing.engine import TestEngine  # noqa: PLC0415

    with TestEngine() as engine:
        yield engine


@pytest.fixture
def fabric(flowfabric_engine: "TestEngine") -> "Iterator[TestFabric]":
    """An empty engine for this test. `fabric.use(app)` runs your application on it."""
    from flowfabric.testing.fabric import TestFabric  # noqa: PLC0415

    with TestFabric(flowfabric_engine) as fabric:
        yield fabric


@pytest.fixture
def sync_fabric(fabric: "TestFabric") -> "Iterator[SyncTestFabric]":
    """`fabric` without `await`, for tests that are not `async def`."""
    from flowfabric.testing.fabric import SyncTestFabric  # noqa: PLC0415

    with SyncTestFabric(fabric) as sync:
        yield sync


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Close the connections of a test in its own event loop, whichever plugin runs that."""
    if not isinstance(item, pytest.Function) or not _is_ours(item):
        return (yield)
    test, item.obj = item.obj, _closing(item.obj, item.funcargs["fabric"])
    try:
        return (yield)
    finally:
        item.obj = test


def _is_ours(item: pytest.Function) -> bool:
    return "fabric" in item.funcargs and inspect.iscoroutinefunction(item.obj)


def _closing(test: Any, fabric: Any) -> Any:
    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        async with fabric:
            await test(*args, **kwargs)

    return run


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test that uses `fabric`, unless another plugin does."""
    if not _is_ours(pyfuncitem):
        return None
    given, names = pyfuncitem.funcargs, inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: given[name] for name in names if name in given}))
    return True
