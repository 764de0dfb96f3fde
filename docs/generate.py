"""Writes the reference pages that follow from the code: errors, metrics, HTTP, commands, …

`make pages` runs it; a test fails while a page differs from what it would write.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from itertools import groupby
from pathlib import Path
from typing import get_args

from flowfabric.cli.main import COMMANDS, app, load_command
from flowfabric.core.catalogue import CATALOGUE, OURS
from flowfabric.core.state import CODE_LETTERS
from flowfabric.engine.http.operations import OperationScope, operations
from flowfabric.engine.label_budget import LABEL_SETS
from flowfabric.engine.metrics import GROUPS, LONG_SECONDS, SECONDS, Metric
from flowfabric.scanners.settings import INTERVALS_S
from flowfabric.server.routes.table import all_routes

HERE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate.py; run `make pages` after a change. -->\n"

CLASSES = {
    "T": "terminal: do not repeat the call",
    "R": "retryable: back off, or send the work elsewhere",
    "I": "informational: treat it as done, or skip",
    "C": "cooperative: do what the hint says, then stop",
    "E": "empty: there is nothing, which is normal",
    "S": "soft: log a warning and continue",
    "B": "bug: report it, and alert an operator",
}
DUTIES = {
    "lease_expiry": "marks leases that were not renewed, so that another worker takes over",
    "delayed_promoter": "makes delayed executions and retries claimable when they are due",
    "attempt_timeout": "ends attempts that run longer than their `timeout`",
    "execution_deadline": "ends executions that passed their `deadline`, in any state",
    "suspension_timeout": "ends waits that were not answered in time, as each wait specifies",
    "pending_wp_expiry": "closes waitpoints that were handed out and never waited for",
    "unblock": "releases executions that may start again; frees slots and holds",
    "doorbell": "wakes workers for waiting work again, in case a wake-up was lost",
    "worker_drain": "revokes leases that a drained worker still holds after its timeout",
    "lane_rescore": "reorders waiting work after the priority weight of a lane changed",
    "cascade_drain": "continues the updates of large flows that one call could not finish",
    "cancel_reconciler": "cancels the remaining members of a cancelled flow after its grace period",
    "dependency_reconciler": "checks members that wait for others; repairs and logs every fault",
    "edge_cancel_dispatcher": "cancels upstreams that a decided join no longer needs",
    "edge_cancel_reconciler": (
        "removes joins from the queue of `edge_cancel_dispatcher` when their upstreams have ended"
    ),
    "flow_projector": "checks the counters of flows, and deletes flows after their retention",
    "index_reconciler": "compares every execution with its indexes, and repairs them",
    "retention_trimmer": "deletes finished executions, old events and empty lanes",
    "quota_reconciler": "frees quota slots of executions that no longer run, drops expired entries",
    "budget_reset": "resets budgets whose period is over",
    "budget_reconciler": "releases budget holds of ended leases, and marks breached budgets",
    "worker_sweeper": "removes worker processes whose registration has expired",
}


def errors() -> str:
    """The error catalogue."""
    lines = [
        "# Errors",
        "",
        NOTE,
        "Every error that FlowFabric raises is a `FlowFabricError`. An error with a code is an",
        "`EngineError`. In your code, compare `error.code`, `error.retryable` or",
        "`error.error_class`, never the text. The last column is the hint at the end of the",
        "message. Some codes belong to operations that this version does not have yet.",
        "",
        "| class | what to do |",
        "|---|---|",
        *(f"| {letter} | {meaning} |" for letter, meaning in CLASSES.items()),
        "",
        "Clients written for the reference server do not know the codes marked with *. Such a",
        "client decides by the HTTP status and `retryable`, which every error has.",
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
            f"| `{e.code}`{' *' if e.code in OURS else ''} | {e.error_class.value} "
            f"| {e.http_status} | {e.hint} |"
            for e in entries
        ]
    return "\n".join(lines) + "\n"


def states() -> str:
    """The six letters of the state code."""
    lines = [
        "# State codes",
        "",
        NOTE,
        "A record keeps the state of an execution as six letters, one per dimension, in this",
        "order. The state that people see (`waiting`, `active`, `completed`, …) is derived from",
        "them. [Storage](../explain/storage.md) explains the record.",
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
        "Scanners are the background jobs of the engine. Every worker process can run them, but",
        "only one does at a time: the process that holds the lease `ff:leader:{scanners}`. If it",
        "dies, another process takes over within seconds. The lease only avoids duplicate work:",
        "it is safe if two processes scan at once, because each change is one atomic call that",
        "checks its own condition.",
        "",
        "A timer takes effect at most one interval after it is due. A retry starts on time if",
        "the worker that scheduled it still runs and can run scanners.",
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
        "Each variable also exists with `_S` for seconds. `FF_SCANNERS_DISABLED` names scanners",
        "to disable; a worker with `--no-scanners` runs none. Processes with a filter or with",
        "disabled scanners have their own lease; `ff:leader:{scanners}:duties` lists such leases.",
        "",
        "## Damaged data",
        "",
        "Damaged entries do not affect healthy ones. Scanners remove malformed members of an",
        "index, skip malformed names in a registry, and log both. If an index cannot be read, the",
        "scan logs an error and continues with the others. A record that cannot be read is left",
        "unchanged.",
        "",
        "`index_reconciler` rebuilds every index from the records: it adds lost entries, removes",
        "wrong ones, and finds executions, lanes and partitions that are no longer listed. It",
        "repairs drift that it saw in two consecutive cycles. A cycle reads up to 10,000",
        "executions of partitions that changed, and checks up to 64 others for changes; the next",
        "cycle continues from there.",
    ]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Every metric."""
    lines = [
        "# Metrics",
        "",
        NOTE,
        "[Observe a deployment](../how-to/observe.md) explains how to collect them. Durations are",
        f"in seconds; the buckets of a histogram are {_bounds(SECONDS)}, unless it says otherwise.",
        f"A process shows at most {LABEL_SETS:,} label sets. Where there are too many values, the",
        "labels in *italics* get the value [`other`](../how-to/observe.md#many-lanes).",
    ]
    for group, members in GROUPS.items():
        lines += [
            "",
            f"## {group}",
            "",
            "| metric | type | labels | meaning |",
            "|---|---|---|---|",
        ]
        lines += [_metric(metric) for metric in members]
    return "\n".join(lines) + "\n"


def _metric(metric: Metric) -> str:
    labels = ", ".join(f"*`{x}`*" if x in metric.folds else f"`{x}`" for x in metric.labels)
    text = metric.help
    if metric.buckets == LONG_SECONDS:
        text += f" Buckets: {_bounds(LONG_SECONDS)}."
    return f"| `{metric.name}` | {metric.kind} | {labels} | {text} |"


def _bounds(seconds: tuple[float, ...]) -> str:
    return ", ".join(f"{bound:g}" for bound in seconds)


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
        "| 2 | usage error: a wrong option, id or URL |",
        "| 130 | stopped by Ctrl-C, or not confirmed |",
        "| 141 | the program that reads the output exited, as `head` does |",
        "| 143 | a worker was stopped by SIGTERM while a task blocked it |",
        "",
        "Results go to standard output, errors to standard error. An error is a line with",
        "`error:`, the code and the problem, then a line with `hint:`. With `--json`, an error is",
        'one JSON object: `{"error": {"code": …, "message": …, "details": […], "hint": …}}`.',
        "",
        "## JSON",
        "",
        "With `--json`, commands that list things print one JSON object per line. Other commands",
        "print one object.",
        "",
        "- Fields have the names of options: `task`, `lane`, `state`, `namespace`, `attempt`.",
        "- Attempts are counted from 1.",
        "- Each time appears twice: in milliseconds since 1970, and in a second field as ISO 8601",
        "  in UTC. The second name ends with `_iso` instead of `_ms`: `created_at` and",
        "  `created_at_iso`, `expires_at_ms` and `expires_at_iso`.",
        "- Data of your application is not changed: tags, results, details and summary documents.",
        "",
        "## Shell completion",
        "",
        "`flowfabric --install-completion` adds completion to your shell: bash, zsh or fish. Then",
        "start a new shell. `flowfabric --show-completion` only prints the script. To print the",
        "script for a certain shell, for example while you build an image, name the shell:",
        "",
        "```console",
        "$ _FLOWFABRIC_COMPLETE=source_zsh flowfabric > _flowfabric",
        "```",
    ]
    return "\n".join(lines) + "\n"


def http() -> str:
    """Every endpoint, from the route table."""
    lines = [
        "# HTTP",
        "",
        NOTE,
        "[Run the server](../how-to/run-the-server.md) explains how to start the server.",
        "",
        "- An `execution_id` is `{fp:N}:<uuid>`. In a path, `N-<uuid>` is also accepted.",
        "- A result is an object with one key, the name of the result. A result without fields is",
        "  a plain string.",
        "- Times are milliseconds since 1970. Bytes are arrays of numbers, or base64 in a field",
        "  whose name ends with `_b64`.",
        "- Lists take `cursor` and `limit`, and return `next_cursor`, which is `null` on the last",
        "  page.",
        "- With `wait_ms` (up to 30,000), a read of an execution waits until it has ended.",
        "- An error is an object with `error`, `kind`, `code`, `class`, `group`, `retryable`,",
        "  `request_id` and often `detail`. In programs, check the status, `kind` and `retryable`.",
        "  A 401 has only `error` and `code`. If the path or the method does not exist, the 404 or",
        "  405 has only `error`.",
        "  [Errors](errors.md) lists the codes.",
        "- The scope is what a token must allow. `admin` allows everything, and `operate` includes",
        "  `remote`.",
        "",
        "| endpoint | scope | what it does |",
        "|---|---|---|",
    ]
    for route in all_routes():
        if not route.internal:
            summary = (route.handler.__doc__ or "").split("\n")[0]
            lines.append(f"| `{route.method} {route.template}` | {route.scope or ''} | {summary} |")
    return "\n".join([*lines, *_engine_operations()]) + "\n"


def _engine_operations() -> list[str]:
    lines = [
        "",
        "## For the Python client",
        "",
        "With an `http://` address, the Python client and the command line use",
        "`POST /v1/engine/{noun}/{operation}`. The body is a JSON object with the arguments by",
        "name, and the response is the result. Both follow the Python interface and change with",
        "it. From other languages, use the endpoints above. `GET /v1/engine` describes the",
        "deployment.",
        "",
        "| noun | scope | operations |",
        "|---|---|---|",
    ]
    for noun, known in operations().items():
        for scope in get_args(OperationScope):
            names = ", ".join(f"`{each.name}`" for each in known.values() if each.scope == scope)
            if names:
                lines.append(f"| {noun} | {scope} | {names} |")
    return lines


PAGES = {
    "http.md": http,
    "errors.md": errors,
    "states.md": states,
    "scanners.md": scanners,
    "metrics.md": metrics,
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
