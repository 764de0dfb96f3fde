"""Every example runs and keeps what it claims; each asserts that itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from examples.demo.proof import verify
from examples.demo.watch import Row
from examples.deploy_approval import promised

from flowfabric.core.contracts.executions import AttemptRecord
from flowfabric.core.state import PublicState
from tests.docs.markdown import ROOT
from tests.docs.scratch import run_python, wait_for_server_end

SINGLE = sorted(
    path.stem for path in (ROOT / "examples").glob("*.py") if not path.name.startswith("_")
)


@pytest.mark.parametrize("name", SINGLE)
def test_example(name: str, tmp_path: Path) -> None:
    printed = run_python(tmp_path, "-m", f"examples.{name}")
    assert len(printed.splitlines()) >= 3
    wait_for_server_end(tmp_path / ".flowfabric")


def test_an_approval_that_breaks_its_promise_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="broken promise: ada counts once"):
        promised("ada counts once", False)
    promised("bob counts", True)
    assert "bob counts" in capsys.readouterr().out


def test_demo(tmp_path: Path) -> None:
    """A worker is killed with SIGKILL; every execution still has exactly one result."""
    printed = run_python(tmp_path, "-m", "examples.demo", TMPDIR=str(tmp_path))
    assert re.search(
        r"^12 submitted, 12 results from 12 successful attempts$", printed, re.MULTILINE
    )
    lost = re.search(r"^(\d) held by alpha when it was killed with SIGKILL$", printed, re.MULTILINE)
    assert lost
    assert int(lost[1]) >= 2
    assert re.search(rf"^{lost[1]} reclaimed by beta", printed, re.MULTILINE)
    took = re.search(r"^all promises kept in ([\d.]+) s$", printed, re.MULTILINE)
    assert took
    assert float(took[1]) < 30
    assert not (tmp_path / ".flowfabric").exists()
    assert list(tmp_path.glob("flowfabric-demo-*")) == []


def attempt(worker: str, state: str, kind: str = "initial") -> AttemptRecord:
    return AttemptRecord(
        attempt_index=0,
        attempt_id="",
        attempt_type=kind,
        attempt_state=state,
        lease_id="",
        lease_epoch=1,
        worker_id=worker,
        worker_instance_id=worker,
        started_at=0,
    )


DONE = attempt("beta", "ended_success")
CUT = attempt("alpha", "interrupted_reclaimed")
AGAIN = attempt("beta", "ended_success", "reclaim")


@pytest.mark.parametrize(
    ("row", "lost", "complaint"),
    [
        (Row("x", PublicState.COMPLETED, None, (CUT, AGAIN), "1", ""), ["x"], None),
        (Row("x", PublicState.FAILED, None, (CUT, AGAIN), "", ""), ["x"], "has no result"),
        (Row("x", PublicState.COMPLETED, None, (AGAIN, AGAIN), "1", ""), ["x"], "2 times"),
        (
            Row("x", PublicState.COMPLETED, None, (DONE,), "1", ""),
            ["x"],
            "but the engine reclaimed",
        ),
        (Row("x", PublicState.COMPLETED, None, (DONE,), "1", ""), [], "held nothing"),
    ],
)
def test_the_demo_can_fail(row: Row, lost: list[str], complaint: str | None) -> None:
    broken = verify([row], lost, "alpha")
    assert (broken == []) if complaint is None else any(complaint in text for text in broken)
