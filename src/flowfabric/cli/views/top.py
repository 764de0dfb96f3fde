"""What `flowfabric top` shows: one frame, on a terminal of any width or in a pipe."""

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from flowfabric.cli.views.lanes import OPTIONAL_COLUMNS, lane_row
from flowfabric.cli.views.screen import Row, Screen, drop_columns, id_cell
from flowfabric.core.text import age, clock, plural
from flowfabric.engine.api.upkeep import Leader
from flowfabric.engine.lane_overview import LaneOverview
from flowfabric.engine.live_overview import DimensionUse, LiveOverview, WorkerOverview
from flowfabric.engine.overview import Wait
from flowfabric.scanners.board import ScannerBoard, ScannerLine

_TOTALS = ("waiting", "active", "delayed", "suspended", "blocked")
_LATE_MS = 5_000
"""How much later than its interval a scanner may be before it is shown."""
_UNREADABLE = "Not available: the request was refused."


class TopFrame(msgspec.Struct, frozen=True, kw_only=True):
    """What one look shows."""

    overview: LiveOverview
    leaders: list[Leader] | None
    """The processes that run scanners; None if that cannot be read."""
    board: ScannerBoard | None
    """What the leading one says about its scanners."""

    def fields(self) -> dict[str, Any]:
        """The frame as one JSON object."""
        parts = msgspec.structs.asdict(self.overview)
        scanners = None if self.board is None else self.board.scanners
        return parts | {"leaders": self.leaders, "scanners": scanners}


class Section(msgspec.Struct, frozen=True):
    """A table with a title, or what to say instead of one."""

    title: str
    rows: list[Row]
    otherwise: str
    optional: tuple[str, ...] = ()
    """Columns that a narrow terminal does not show, the least important one first."""


def summary(frame: TopFrame) -> list[str]:
    """The rates, and the totals over all lanes."""
    overview = frame.overview
    rates = overview.rates
    names = ("submitted", "finished", "failed")
    shown = [f"{name} {_rate(None if rates is None else getattr(rates, name))}" for name in names]
    totals = [f"{name} {overview.total(name):,}" for name in _TOTALS]
    return ["  ".join(shown), "  ".join(totals)]


def _rate(per_s: float | None) -> str:
    if per_s is None:
        return "-"
    return f"{per_s:,.0f}/s" if per_s >= 100 else f"{per_s:.1f}/s"


def sections(frame: TopFrame) -> list[Section]:
    """Every table of a frame."""
    overview, now = frame.overview, frame.overview.now_ms
    # The busiest first: a terminal may show only the first rows.
    lanes = [lane_row(lane) for lane in sorted(overview.lanes or (), key=_load, reverse=True)]
    by_runs = sorted(overview.workers or (), key=lambda one: one.leases or 0, reverse=True)
    workers = [_worker(worker, now) for worker in by_runs]
    suspended = overview.total("suspended")
    waiting = f"Waiting for an answer ({suspended:,})" if suspended else "Waiting for an answer"
    return [
        Section("Lanes", lanes, "No lanes yet.", OPTIONAL_COLUMNS),
        Section(
            f"Workers ({len(workers):,})" if workers else "Workers",
            workers,
            _none(overview.workers, "No worker is running."),
            ("NAMESPACE", "LANES"),
        ),
        Section(
            waiting,
            [_wait(wait, now) for wait in overview.waits or ()],
            _none(overview.waits, "No execution waits for an answer."),
            ("PROMPT", "WAITS FOR"),
        ),
        _scanners(frame),
        Section(
            "Budgets near their limit",
            [_budget(use) for use in overview.budgets or ()],
            _none(overview.budgets, "None."),
        ),
    ]


def _load(lane: LaneOverview) -> tuple[int, int]:
    """What matters most in a lane: work that could run, then work that waits for its time."""
    return lane.waiting + lane.active + lane.blocked, lane.delayed + lane.suspended


def _none(found: Sequence[object] | None, text: str) -> str:
    return _UNREADABLE if found is None else text


def _worker(worker: WorkerOverview, now_ms: int) -> Row:
    return {
        "WORKER": (worker.worker, "bold"),
        "RUNS": "-" if worker.leases is None else f"{worker.leases:,}",
        "STATE": ("draining", "yellow") if worker.draining else ("active", "green"),
        "SEEN": f"{age(max(0, now_ms - worker.last_heartbeat_ms))} ago",
        "NAMESPACE": worker.namespace,
        "LANES": ", ".join(worker.lanes),
    }


def _wait(wait: Wait, now_ms: int) -> Row:
    until = "-" if wait.until is None else f"in {age(max(0, wait.until - now_ms))}"
    return {
        "ID": id_cell(wait.execution_id, 8),
        "TASK": wait.execution_kind,
        "SINCE": age(now_ms - (wait.since or now_ms)),
        "UNTIL": until,
        "WAITS FOR": ", ".join(one.waitpoint_key for one in wait.waitpoints) or "-",
        "PROMPT": wait.prompt or "-",
    }


def _scanners(frame: TopFrame) -> Section:
    if frame.leaders is None:
        return Section("Scanners", [], _UNREADABLE)
    if not frame.leaders:
        problem = "No process runs scanners: retries and timeouts do not happen. Start a worker."
        return Section("Scanners", [], problem)
    by = ", ".join(leader.process for leader in frame.leaders)
    board = frame.board
    if board is None:
        return Section("Scanners", [], f"Run by {by}.")
    shown = [line for line in board.scanners if _is_remarkable(line, board.at)]
    last = max((line.last_cycle_at or 0 for line in board.scanners), default=0)
    seen = f", last cycle {age(max(0, frame.overview.now_ms - last))} ago" if last else ""
    text = f"{plural(len(board.scanners), 'scanner')} on {by}{seen}, no errors."
    return Section("Scanners", [_scanner(line, board.at) for line in shown], text)


def _is_remarkable(line: ScannerLine, at_ms: int) -> bool:
    late = line.last_cycle_at is not None and (
        at_ms - line.last_cycle_at > 2 * line.interval_ms + _LATE_MS
    )
    return bool(line.errors or line.restarts or line.stuck or late)


def _scanner(line: ScannerLine, at_ms: int) -> Row:
    never = line.last_cycle_at is None
    return {
        "SCANNER": (line.name, "bold"),
        "LAST CYCLE": "never" if never else f"{age(max(0, at_ms - (line.last_cycle_at or 0)))} ago",
        "ERRORS": (f"{line.errors:,}", "bold red" if line.errors else ""),
        "RESTARTS": f"{line.restarts:,}",
        "STATE": ("stuck", "bold red") if line.stuck else ("active", "green"),
    }


def _budget(use: DimensionUse) -> Row:
    share = use.used / use.limit
    return {
        "BUDGET": (use.budget, "bold"),
        "DIMENSION": use.dimension,
        "USED": (f"{share:.0%}", "bold red" if share >= 1 else "yellow"),
        "OF": f"{use.limit:,}",
    }


def print_frame(frame: TopFrame, where: str) -> None:
    """Print a frame to its end, for a pipe or for `--once`."""
    screen = Screen()
    screen.line((where, "bold"), f"  {clock(frame.overview.now_ms)}")
    for line in summary(frame):
        screen.line(line)
    for section in sections(frame):
        screen.section(section.title)
        if section.rows:
            screen.table(section.rows, section.optional)
        else:
            screen.line(section.otherwise)


def render(frame: TopFrame | str, where: str, screen: Screen) -> RenderableType:
    """A frame that fits the terminal; or a line that says why there is none."""
    head = Text.assemble((f"FlowFabric {where}", "bold"), ("  press q to quit", "bright_black"))
    if isinstance(frame, str):
        return Group(head, Text(frame, "bold red"))
    texts = [head, *map(Text, summary(frame))]
    found = sections(frame)
    room = _rows_each(found, screen.console.height - _height(texts, screen), screen)
    parts: list[RenderableType] = [*texts]
    for section in found:
        parts += [Text(), Text(section.title, "bold")]
        if not section.rows:
            parts.append(Text(section.otherwise, "bright_black"))
            continue
        rows = drop_columns(section.rows, section.optional, screen.console.width)
        parts.append(screen.render_table(rows[:room]))
        if len(rows) > room:
            parts.append(Text(f"and {len(rows) - room:,} more", "bright_black"))
    return Group(*parts)


def _height(texts: Sequence[Text], screen: Screen) -> int:
    """How many lines texts take, which a narrow terminal wraps."""
    return sum(len(text.wrap(screen.console, screen.console.width)) for text in texts)


def _rows_each(found: Sequence[Section], height: int, screen: Screen) -> int:
    """How many rows each table may have, so that all of them fit."""
    filled = [len(section.rows) for section in found if section.rows]
    # A blank line, the title, and the header of a table or what is printed instead of one.
    height -= 2 * len(found) + len(filled)
    height -= _height([Text(each.otherwise) for each in found if not each.rows], screen)
    for room in range(max(filled, default=1), 1, -1):
        if sum(min(room, rows) + (rows > room) for rows in filled) <= height:
            return room
    return 1
