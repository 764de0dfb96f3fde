"""Ours and the other Python queues on the same no-op workload, as one table."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from benchmarks.peers.report import as_json, as_table, notes
from benchmarks.peers.runner import OURS, PEERS, Row, run_ours, run_peer

NAMES = (*PEERS, OURS)


def main() -> None:
    options = _options()
    progress = Console(stderr=True)
    best: dict[str, Row] = {}
    # Whole rounds, not one queue many times: a busy spell of the machine hits them all.
    for turn in range(options.repeat):
        for place, name in enumerate(options.only, start=1):
            who = (
                f"[{turn * len(options.only) + place}/{options.repeat * len(options.only)}] {name}"
            )
            row = _measure(name, options, functools.partial(_say, progress, who))
            best[name] = max(best.get(name, row), row, key=lambda row: row.lifecycle_per_s or 0.0)
    rows = list(best.values())
    if options.json:
        print(json.dumps(as_json(options.n, rows)))
    else:
        console = Console()
        console.print(as_table(options.n, rows))
        for line in notes(rows):
            console.print(escape(line), highlight=False)


def _measure(name: str, options: argparse.Namespace, say: Callable[[str], None]) -> Row:
    if name == OURS:
        say("running its bench command")
        row = run_ours(options.n, options.timeout)
    else:
        row = run_peer(name, options.n, options.timeout, say)
    say(f"{row.lifecycle_per_s:,.0f} lifecycles/s" if row.lifecycle_per_s else row.note)
    return row


def _say(console: Console, who: str, what: str) -> None:
    console.print(escape(f"{who}: {what}"), highlight=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--n", type=_count, default=20_000, help="tasks for each queue")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--only", type=_names, default=list(NAMES), help=f"some of {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds for each queue: one third to submit, the rest to process; a queue that "
        "needs longer is measured on fewer tasks",
    )
    parser.add_argument(
        "--repeat", type=_positive, default=1, help="rounds; each queue's best one is shown"
    )
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("needs at least 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError("a rate needs at least 2 tasks")
    return value


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - set(NAMES))
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"unknown {unknown}; choose from {', '.join(NAMES)}")
    return names


if __name__ == "__main__":
    main()
