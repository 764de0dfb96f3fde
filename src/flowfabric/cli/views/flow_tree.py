"""A graph as a tree: each member below the last one that every path to it passes through."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import msgspec

from flowfabric.core.contracts.flows import EdgeSnapshot, FlowMember
from flowfabric.engine.flow_overview import FlowDetail, member_name

_FOLDED_FROM = 4


class Line(msgspec.Struct, frozen=True):
    """One line of the tree: one member, or several equal ones."""

    indent: str
    members: list[FlowMember]
    edges: list[EdgeSnapshot]
    """The edges that lead to the members."""
    parent: int
    """The line above it in the tree; -1 for none."""

    @property
    def name(self) -> str:
        """The member's name; of several, their task and their number."""
        first = self.members[0]
        if len(self.members) > 1:
            return f"{first.execution_kind} ×{len(self.members):,}"
        return member_name(first.node, first.execution_kind, first.execution_id)


class Tree(msgspec.Struct, frozen=True):
    """The lines of a graph from top to bottom, and the line of each member."""

    lines: list[Line]
    line_of: dict[str, int]


class _Graph:
    """Members by position. The last position is a root above everything."""

    def __init__(self, members: Sequence[FlowMember], edges: Iterable[EdgeSnapshot]) -> None:
        self.members = members
        self.root = len(members)
        position = {member.execution_id: at for at, member in enumerate(members)}
        self.into: list[list[EdgeSnapshot]] = [[] for _ in members]
        self.before: list[list[int]] = [[] for _ in members]
        for edge in edges:
            # A missing member was deleted, or was added after the members were read.
            child = position.get(edge.downstream_execution_id)
            upstream = position.get(edge.upstream_execution_id)
            if child is not None and upstream is not None:
                self.into[child].append(edge)
                self.before[child].append(upstream)
        self.order, self.rank = self._sorted()
        self.children = self._tree()
        self.shape = self._shapes()

    def _sorted(self) -> tuple[list[int], list[int]]:
        """Each member after all that it waits for, and the length of the longest path to it."""
        after: list[list[int]] = [[] for _ in self.members]
        left = [len(before) for before in self.before]
        rank = [0] * len(left)
        for child, before in enumerate(self.before):
            for upstream in before:
                after[upstream].append(child)
        ready = deque(at for at, count in enumerate(left) if count == 0)
        order: list[int] = []
        while ready:
            at = ready.popleft()
            order.append(at)
            for child in after[at]:
                rank[child] = max(rank[child], rank[at] + 1)
                left[child] -= 1
                if left[child] == 0:
                    ready.append(child)
        return order, rank

    def _tree(self) -> list[list[int]]:
        """The dominator tree. Jump pointers find a common ancestor in logarithmic time."""
        size = self.root + 1
        parent, jump, depth = [self.root] * size, [self.root] * size, [0] * size

        def common(a: int, b: int) -> int:
            if depth[a] < depth[b]:
                a, b = b, a
            while depth[a] > depth[b]:
                a = jump[a] if depth[jump[a]] >= depth[b] else parent[a]
            while a != b:
                step = jump if jump[a] != jump[b] else parent
                a, b = step[a], step[b]
            return a

        children: list[list[int]] = [[] for _ in range(size)]
        for at in self.order:
            up, *others = self.before[at] or [self.root]
            for other in others:
                up = common(up, other)
            parent[at], depth[at] = up, depth[up] + 1
            over = jump[up]
            even = depth[up] - depth[over] == depth[over] - depth[jump[over]]
            jump[at] = jump[over] if even else up
            children[up].append(at)
        for each in children:
            each.sort(key=lambda at: (self.rank[at], self.members[at].number))
        return children

    def _shapes(self) -> list[int]:
        """Equal numbers for members of the same task and join policy with equal members below."""
        known: dict[object, int] = {}
        shape = [0] * len(self.members)
        for at in reversed(self.order):
            member = self.members[at]
            below = Counter(shape[child] for child in self.children[at])
            policy = None if member.join is None else member.join.policy
            form = (member.execution_kind, policy, tuple(sorted(below.items())))
            shape[at] = known.setdefault(form, len(known))
        return shape

    def groups(self, above: Sequence[int], *, fold: bool) -> list[list[int]]:
        """The members directly below these, grouped by line."""
        below = [child for at in above for child in self.children[at]]
        alike: dict[int, list[int]] = {}
        for at in below:
            alike.setdefault(self.shape[at], []).append(at)
        if len(above) > 1:
            return list(alike.values())
        found: list[list[int]] = []
        for at in below:
            group = alike[self.shape[at]]
            if not fold or len(group) < _FOLDED_FROM:
                found.append([at])
            elif group[0] == at:
                found.append(group)
        return found


def tree_of(detail: FlowDetail, *, fold: bool) -> Tree:
    """The graph of a flow; with `fold`, four or more equal branches are one."""
    graph = _Graph(detail.nodes, detail.edges)
    lines: list[Line] = []
    line_of: dict[str, int] = {}
    # Groups still to print, the next one last. Each comes with its own indent, the indent of the
    # lines below it, and the number of the line above.
    todo = [(group, "", "", -1) for group in reversed(graph.groups([graph.root], fold=fold))]
    while todo:
        group, indent, below, above = todo.pop()
        number = len(lines)
        members = [graph.members[at] for at in group]
        edges = [edge for at in group for edge in graph.into[at]]
        lines.append(Line(indent, members, edges, above))
        line_of |= {member.execution_id: number for member in members}
        groups = graph.groups(group, fold=fold)
        if len(groups) == 1:
            # A chain continues without more indent.
            todo.append((groups[0], f"{below}↓ ", below, number))
            continue
        branches = [(each, f"{below}├─ ", f"{below}│  ", number) for each in groups]
        if branches:
            branches[-1] = (groups[-1], f"{below}└─ ", f"{below}   ", number)
        todo += reversed(branches)
    return Tree(lines, line_of)
