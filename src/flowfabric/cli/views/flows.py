"""What `flowfabric flows` and `flow show` print."""

import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
from rich.console import Group
from rich.live import Live
from rich.text import Text

from flowfabric.cli.views.flow_tree import Line, Tree, tree_of
from flowfabric.cli.views.screen import (
    Cell,
    Row,
    Screen,
    drop_columns,
    id_cell,
    print_json,
    state_cell,
)
from flowfabric.cli.views.text import clean, short_length
from flowfabric.core.contracts.flows import (
    AnyOf,
    FlowListing,
    FlowMember,
    FlowSnapshot,
    JoinSnapshot,
    Quorum,
)
from flowfabric.core.text import age, clock, plural
from flowfabric.engine.flow_overview import FlowDetail, NewestFlows, member_name

_FLOW_STYLES = {"open": "yellow", "running": "bold cyan", "blocked": "yellow", "held": "magenta"}
_FAILED = ("failed", "expired")
_OUTCOMES = {"terminal": " (any outcome)", "failure_only": " (failure)"}
_OPTIONAL_COLUMNS = ("ID", "TASK")
_NAMED = 3
_LINES_AROUND_TREE = 5


def flow_state(flow: FlowListing | FlowSnapshot) -> Cell:
    """The state to show: cancelled, held, or the state that follows from the members."""
    name: str = flow.derived_state
    if flow.public_flow_state == "cancelled":
        name = "cancelled"
    elif flow.held:
        name = "held"
    return (name, _FLOW_STYLES[name]) if name in _FLOW_STYLES else state_cell(name)


def print_flows(found: NewestFlows, *, filtered: bool) -> None:
    """Print the table; on a terminal, also the totals."""
    screen = Screen()
    if not found.rows:
        screen.line("No flow matches." if filtered else "No flows yet.")
        return
    length = short_length(row.flow_id for row in found.rows) if screen.terminal else None
    namespaces = any(row.namespace != "default" for row in found.rows)
    rows = [_flow_row(row, found.now_ms, length, namespaces) for row in found.rows]
    screen.table(rows, ("AGE",))
    if screen.terminal:
        screen.note(_totals(found))


def _flow_row(row: FlowListing, now_ms: int, length: int | None, namespace: bool) -> Row:  # noqa: FBT001
    cells: Row = {"ID": (row.flow_id[:length], "bold")}
    if namespace:
        cells["NAMESPACE"] = row.namespace
    return cells | {
        "KIND": row.flow_kind,
        "STATE": flow_state(row),
        "DONE": f"{row.ended_count:,}/{row.node_count:,}",
        "AGE": age(now_ms - row.created_at),
    }


def _totals(found: NewestFlows) -> str:
    total, shown = found.statuses.total(), len(found.rows)
    statuses = ", ".join(f"{count:,} {name}" for name, count in found.statuses.most_common())
    many = plural(total, "flow") if found.complete else f"more than {plural(total, 'flow')}"
    text = f"{many}: {statuses}"
    return text if shown == total else f"{text}. Showing the newest {shown}; --all shows all"


def print_flow(detail: FlowDetail, *, full: bool, as_json: bool) -> None:
    """Print a flow and its graph."""
    if as_json:
        flow = {
            name: value
            for name, value in msgspec.structs.asdict(detail.flow).items()
            if name != "edge_groups"
        }
        print_json({"flow": flow, "nodes": detail.nodes, "edges": detail.edges})
        return
    screen, flow = Screen(), detail.flow
    screen.line((flow.flow_kind, "bold"), "  ", flow_state(flow), "  ", _progress(flow))
    screen.line((flow.flow_id, "bright_black"))
    hint = ""
    if flow.held:
        hint = f"it is held; `flowfabric flow release {flow.flow_id}` lets it run"
    elif flow.awaits_parent and flow.parent_execution_id is not None:
        hint = f"it starts when node {flow.parent_execution_id.compact} no longer waits for others"
    if hint and flow.cancelled_at is None:
        screen.line()
        screen.line(("Why it is not running: ", "yellow"), hint)
    screen.line()
    screen.facts([(name, cell) for name, cell in _flow_facts(detail) if cell])
    if flow.tags:
        screen.section("Tags")
        screen.facts(sorted(flow.tags.items()))
    if detail.nodes:
        screen.line()
        screen.table(_fitted(detail, screen, full=full))


def _progress(flow: FlowSnapshot) -> str:
    ended = ("completed", "failed", "cancelled", "expired", "skipped")
    done = sum(flow.members.get(state, 0) for state in ended)
    return f"{done:,} of {plural(flow.node_count, 'member')} ended"


def _flow_facts(detail: FlowDetail) -> list[tuple[str, Cell | None]]:
    flow, now = detail.flow, detail.now_ms

    def past(at: int | None) -> str:
        return "" if at is None else f"{clock(at)} ({age(now - at)} ago)"

    return [
        ("namespace", flow.namespace),
        ("created", past(flow.created_at)),
        ("finished", past(flow.finished_at)),
        ("cancelled", past(flow.cancelled_at)),
        ("reason", flow.cancel_reason),
        ("policy", flow.cancellation_policy),
        ("parent", flow.parent_execution_id and flow.parent_execution_id.compact),
        ("members", count_states(flow.members)),
    ]


def count_states(states: Mapping[str, int]) -> str:
    """The number of members in each state, the largest number first."""
    counts = sorted(states.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{count:,} {state}" for state, count in counts)


def _fitted(detail: FlowDetail, screen: Screen, *, full: bool) -> Sequence[Row]:
    tree = tree_of(detail, fold=not full)
    single = [line.members[0].execution_id.uuid for line in tree.lines if len(line.members) == 1]
    length = short_length(single) if screen.terminal else None
    rows = [_tree_row(tree, line, length) for line in tree.lines]
    return drop_columns(rows, _OPTIONAL_COLUMNS, screen.console.width) if screen.terminal else rows


def _tree_row(tree: Tree, line: Line, length: int | None) -> Row:
    first = line.members[0]
    alone = len(line.members) == 1
    return {
        "NODE": f"{line.indent}{line.name}",
        "TASK": first.execution_kind,
        "STATE": _state(line.members),
        "ID": id_cell(first.execution_id, length) if alone else "-",
        "WAITS FOR": "; ".join(
            filter(None, (_sources(tree, line), _verdict(line), _owned(line, length)))
        ),
    }


def _state(members: Sequence[FlowMember]) -> Cell:
    states = Counter(member.public_state.value for member in members)
    if len(states) == 1:
        return state_cell(members[0].public_state.value)
    worst = next((state for state in _FAILED if states[state]), states.most_common(1)[0][0])
    return count_states(states), state_cell(worst)[1]


def _sources(tree: Tree, line: Line) -> str:
    """What the members wait for; empty if that is only the line above."""
    names: dict[str, set[str]] = {}
    for edge in line.edges:
        upstream = tree.lines[tree.line_of[edge.upstream_execution_id]]
        mark = _OUTCOMES.get(edge.dependency_kind, "")
        passed = "payload" if edge.data_passing_ref else edge.input_name or ""
        names.setdefault(upstream.name + mark, set()).add(passed)
    join = line.members[0].join
    policy = None if join is None else join.policy
    above = tree.lines[line.parent].name if line.parent >= 0 else ""
    if not isinstance(policy, AnyOf | Quorum) and names == {above: {""}}:
        return ""
    shown = [_labelled(name, passed) for name, passed in list(names.items())[:_NAMED]]
    if len(names) > _NAMED:
        shown.append(f"{len(names) - _NAMED:,} more")
    text = ", ".join(shown)
    if isinstance(policy, AnyOf | Quorum):
        how = "any" if isinstance(policy, AnyOf) else f"{policy.k:,}"
        ends = ", then cancels the rest" if policy.on_satisfied == "cancel_remaining" else ""
        return f"{how} of {text}{ends}"
    return text


def _labelled(name: str, passed: set[str]) -> str:
    """`input=name` if all edges from there have the same input name."""
    (only,) = passed if len(passed) == 1 else ("",)
    return f"{only}={name}" if only else name


def _owned(line: Line, length: int | None) -> str:
    """The flow that a member runs; `length`: how much of its id to print."""
    subflow_id = line.members[0].subflow_id if len(line.members) == 1 else None
    return f"runs flow {subflow_id[:length]}" if subflow_id else ""


def _verdict(line: Line) -> str:
    """The progress of a join, or which of several members failed."""
    if len(line.members) > 1:
        failed = [each for each in line.members if each.public_state.value in _FAILED]
        shown = [
            member_name(each.node, each.execution_kind, each.execution_id)
            for each in failed[:_NAMED]
        ]
        if len(failed) > _NAMED:
            shown.append(f"{len(failed) - _NAMED:,} more")
        return f"failed: {', '.join(shown)}" if failed else ""
    join = line.members[0].join
    if join is None or (join.total_deps == 1 and join.group_state != "impossible"):
        return ""
    return "" if join.group_state == "satisfied" else describe_join(join)


def describe_join(join: JoinSnapshot) -> str:
    """How many of the upstreams have satisfied a join."""
    counts = f"{join.satisfied_count:,} of {join.total_deps:,} satisfied"
    if join.failed_count:
        counts += f", {join.failed_count:,} failed"
    if join.skipped_count:
        counts += f", {join.skipped_count:,} skipped"
    return f"impossible: {counts}" if join.group_state == "impossible" else counts


@contextmanager
def live_flow(screen: Screen, *, full: bool) -> Generator[Callable[[FlowDetail], None]]:
    """`flow show --watch` on a terminal: each call replaces the tree."""
    console = screen.console
    with Live(console=console, auto_refresh=False, screen=True) as live:

        def show(detail: FlowDetail) -> None:
            flow = detail.flow
            state, style = cell if isinstance(cell := flow_state(flow), tuple) else (cell, "")
            head = Text.assemble(
                (clean(flow.flow_kind), "bold"), "  ", (state, style), "  ", _progress(flow)
            )
            rows = _fitted(detail, screen, full=full)
            room = max(1, console.height - _LINES_AROUND_TREE)
            hidden = f"{len(rows) - room:,} lines do not fit · " if len(rows) > room else ""
            footer = Text(f"{hidden}Ctrl-C to stop", "bright_black")
            table = screen.render_table(rows[:room])
            live.update(Group(head, Text(), table, Text(), footer), refresh=True)

        yield show


def member_changes(*, as_json: bool) -> Callable[[FlowDetail], None]:
    """`flow show --watch` in a pipe: each call prints the members whose state changed."""
    before: dict[str, FlowMember] = {}

    def show(detail: FlowDetail) -> None:
        for member in detail.nodes:
            seen = before.get(member.execution_id)
            if seen is not None and seen.public_state is member.public_state:
                continue
            if as_json:
                print_json(member)
                continue
            name = member_name(member.node, member.execution_kind, member.execution_id)
            cells = (name, member.public_state.value, member.execution_id.compact)
            sys.stdout.write(clean("  ".join(cells)) + "\n")
        before.update((member.execution_id, member) for member in detail.nodes)
        sys.stdout.flush()

    return show
