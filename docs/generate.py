"""Writes the reference pages that follow from the code: errors, states, scanners, command line.

`make pages` runs it; a test fails while a page differs from what it would write.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from itertools import groupby
from pathlib import Path

from flowfabric.cli.main import COMMANDS, app, load_command
from flowfabric.core.catalogue import CATALOGUE
from flowfabric.core.state import CODE_LETTERS
from flowfabric.scanners.settings import INTERVALS_S

HERE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate.py; run `make pages` after a change. -->\n"

CLASSES = {
    "T": "terminal: do not repeat the call",
    "R": "retryable: back off, or send the work elsewhere",
    "I": "informational: treat it as done, or skip",
    "C": "cooperative: do what the hint says, then stop",
    "E": "empty: nothing there, as expected",
    "S": "soft: warn and go on",
    "B": "bug: alert",
}
DUTIES = {
    "lease_expiry": "marks leases that were not renewed, so that another worker takes over",
    "delayed_promoter": "makes delayed executions and retries claimable at their time",
    "attempt_timeout": "ends attempts that run longer than their `timeout`",
    "execution_deadline": "ends executions that passed their `deadline`, in any state",
    "suspension_timeout": "ends waits that nobody answered in time, as each wait asks for",
    "pending_wp_expiry": "closes waitpoints that were handed out and never waited for",
    "doorbell": "wakes workers again for work that waits, in case a wake-up was lost",
    "cascade_drain": "finishes what ended members, releases and replays mean for other members",
    "cancel_reconciler": "cancels members that a cancelled flow still owes after its grace",
    "dependency_reconciler": "audits members that wait for others; what it finds is a fault",
    "edge_cancel_dispatcher": "cancels what a decided join with `cancel_remaining` needs no more",
    "edge_cancel_reconciler": "forgets such joins once all their upstreams have ended",
    "flow_projector": "audits the counters of flows; deletes flows after their retention",
    "index_reconciler": "compares every execution with the indexes its record demands; repairs",
    "retention_trimmer": "deletes finished executions, old events and empty lanes",
    "worker_sweeper": "removes worker processes whose registration has expired",
}


def errors() -> str:
    """The error catalogue."""
    lines = [
        "# Errors",
        "",
        NOTE,
        "Every failure that FlowFabric reports is a `FlowFabricError`. Those with a code are",
        "`EngineError`s: decide on `error.code`, `error.retryable` or `error.error_class`, never",
        "on the text. The hint is part of the message. Some codes belong to operations that this",
        "version does not offer yet; the catalogue is complete from the start so that a code never",
        "changes its meaning.",
        "",
        "| class | what to do |",
        "|---|---|",
        *(f"| {letter} | {meaning} |" for letter, meaning in CLASSES.items()),
    ]
    for group, entries in groupby(CATALOGUE.values(), key=lambda entry: entry.group):
        lines += [
            "",
            f"## {group}",
            "",
            "| code | class | HTTP | what you can do |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| `{e.code}` | {e.error_class.value} | {e.http_status} | {e.hint} |" for e in entries
        ]
    return "\n".join(lines) + "\n"


def states() -> str:
    """The six letters of the state code."""
    lines = [
        "# State codes",
        "",
        NOTE,
        "A record keeps the state of an execution as six letters, one per dimension, in this",
        "order. What people see (`waiting`, `active`, `completed`, …) is derived from them, so it",
        "can never disagree. [How it is stored](../explain/storage.md) tells why.",
    ]
    for number, (dimension, letters) in enumerate(CODE_LETTERS.items(), 1):
        lines += ["", f"## {number}. {dimension}", "", "| letter | value |", "|---|---|"]
        lines += [f"| `{letter}` | `{value.value}` |" for letter, value in letters.items()]
    return "\n".join(lines) + "\n"


def scanners() -> str:
    """What runs in the background, and how often."""
    lines = [
        "# Scanners",
        "",
        NOTE,
        "Scanners are the background jobs of the engine. Every worker process has them, and one",
        "process at a time runs them: it holds the lease `ff:leader:{scanners}`. If that process",
        "dies, another takes over within seconds. The lease only saves work: two processes may",
        "scan at once, because each change is one atomic call that checks its own condition.",
        "",
        "Nothing waits longer than the interval after it is due. A worker promotes the retries it",
        "scheduled itself at their exact time.",
        "",
        "| scanner | interval | what it does | variable |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {seconds:g} s | {DUTIES[name]} | `FF_{name.upper()}_INTERVAL_MS` |"
        for name, seconds in INTERVALS_S.items()
    ]
    lines += [
        "",
        "Each variable also exists with `_S` for seconds. `FF_SCANNERS_DISABLED` names scanners to",
        "disable; a worker with `--no-scanners` runs none. Processes with a filter or disabled",
        "scanners have their own lease; `ff:leader:{scanners}:duties` lists those leases.",
        "",
        "## Damaged data",
        "",
        "Damage never hides healthy data. Scanners remove malformed members of an index, skip",
        "malformed names in a registry, and log both. An index that cannot be read counts as one",
        "error; the scan continues with the others. A record that cannot be read stays as it is.",
        "",
        "`index_reconciler` rebuilds every index from the records: it adds lost entries, removes",
        "wrong ones, and finds executions, lanes and partitions that are no longer listed. It",
        "repairs drift that it saw in two consecutive cycles. A cycle reads up to 10,000",
        "executions of partitions that changed, and checks up to 64 others for changes; the next",
        "cycle continues from there.",
    ]
    return "\n".join(lines) + "\n"


def _help(*arguments: str) -> str:
    # The page must not depend on the terminal that it is written in.
    os.environ |= {"COLUMNS": "88", "TERMINAL_WIDTH": "88"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        app([*arguments, "--help"], prog_name="flowfabric", standalone_mode=False)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def command_line() -> str:
    """The help of every command."""
    lines = ["# Command line", "", NOTE, "```text", _help(), "```"]
    for name in (*COMMANDS, "bench", "version"):
        lines += ["", f"## flowfabric {name}", "", "```text", _help(name), "```"]
        parts = getattr(load_command(name), "commands", {}) if name in COMMANDS else {}
        for part in parts:
            lines += ["", f"### flowfabric {name} {part}", ""]
            lines += ["```text", _help(name, part), "```"]
    lines += [
        "",
        "## Exit codes and errors",
        "",
        "| code | meaning |",
        "|---|---|",
        "| 0 | success |",
        "| 1 | failure; for `doctor`: a check failed |",
        "| 2 | usage error: a wrong option, id or url |",
        "| 130 | stopped by Ctrl-C, or by a question that was not answered with yes |",
        "| 143 | a worker was stopped by SIGTERM while a task blocked it |",
        "| 141 | the reader of its output exited, as `head` does |",
        "",
        "Errors go to standard error: a line with `error:`, the code and the problem, then a line",
        "with a hint. With `--json`, an error is one JSON object:",
        '`{"error": {"code": …, "message": …, "details": […], "hint": …}}`. Standard output gets',
        "only results.",
        "",
        "## JSON",
        "",
        "With `--json`, lists have one JSON object per line. Other commands print one object.",
        "",
        "- Fields have the names of options: `task`, `lane`, `state`, `namespace`, `attempt`.",
        "- Attempts are counted from 1.",
        "- A time is a number of milliseconds since 1970, under its own name. Beside it, the same",
        "  name with `_iso` holds the time in ISO 8601, in UTC. An `_ms` at the end of the name is",
        "  dropped: `created_at` and `created_at_iso`, `expires_at_ms` and `expires_at_iso`.",
        "- What applications store stays as it is: tags, results, details and summary documents.",
        "",
        "## Shell completion",
        "",
        "`flowfabric --install-completion` adds completion to your shell: bash, zsh or fish. Then",
        "start a new shell. `flowfabric --show-completion` only prints the script. To write the",
        "script of another shell, for example while you build an image, name the shell:",
        "",
        "```console",
        "$ _FLOWFABRIC_COMPLETE=source_zsh flowfabric > _flowfabric",
        "```",
    ]
    return "\n".join(lines) + "\n"


PAGES = {
    "errors.md": errors,
    "states.md": states,
    "scanners.md": scanners,
    "cli.md": command_line,
}


def main(arguments: list[str]) -> int:
    """Write every page; with `--check` only name those that would change."""
    check = "--check" in arguments
    stale: list[str] = []
    for page, written in PAGES.items():
        path, text = HERE / page, written()
        if not path.exists() or path.read_text() != text:
            stale.append(page)
            if not check:
                path.write_text(text)
    if stale:
        sys.stdout.write(f"{'not current' if check else 'written'}: {', '.join(stale)}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
