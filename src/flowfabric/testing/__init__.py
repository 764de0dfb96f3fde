"""Tests of applications: a real engine per test process, with a clock that you can advance.

Installed with the package, the pytest plugin provides the fixtures `fabric` and `sync_fabric`.
Names are loaded when they are first used, so that test runs without FlowFabric pay nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowfabric.testing.engine import Clock
    from flowfabric.testing.fabric import Ended, SyncTestFabric, TestFabric
    from flowfabric.testing.fake import FakeContext, FakeSyncContext, UnansweredWait

_HOME_OF = {
    "Clock": "engine",
    "Ended": "fabric",
    "FakeContext": "fake",
    "FakeSyncContext": "fake",
    "SyncTestFabric": "fabric",
    "TestFabric": "fabric",
    "UnansweredWait": "fake",
}

__all__: list[str] = [
    "Clock",
    "Ended",
    "FakeContext",
    "FakeSyncContext",
    "SyncTestFabric",
    "TestFabric",
]
__all__ += ["UnansweredWait"]


def __dir__() -> list[str]:
    return list(__all__)


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name):
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
