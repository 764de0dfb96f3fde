"""Every small condition against every short run of signals, compared with the pure evaluator.

The engine keeps its progress in counts per leaf; the evaluator looks at all signals at once. They
must agree after every signal, in every order, and for buffered signals too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import combinations_with_replacement, product

import pytest

from flowfabric.core.conditions import (
    AcceptedSignal,
    AllOf,
    Condition,
    Count,
    CountKind,
    Single,
    check_tree,
    condition_json,
    referenced_waitpoint_keys,
    satisfied,
)
from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.suspension import (
    Accepted,
    FreshWaitpoint,
    PendingWaitpoint,
    Suspended,
    UsePending,
)
from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import new_uuid
from tests.support.engine import Engine
from tests.support.leases import running
from tests.support.suspension import Waits

KINDS = tuple(CountKind)
# Key, name, source: what a signal can differ in.
SIGNALS = [(key, name, who) for key in "ab" for name in ("x", "y") for who in ("p", "q")]


def leaves() -> list[Condition]:
    """Every leaf over two keys, one name or any, and counts up to two."""
    found: list[Condition] = [Single(key, name) for key in "ab" for name in (None, "x")]
    found.append(Single("a", ("w", "x")))
    for kind, keys, n, name in product(KINDS, (("a",), ("a", "b")), (1, 2), (None, "x")):
        node = Count(n=n, waitpoints=keys, count_kind=kind, signal_name=name)
        try:
            check_tree(node)
        except ValidationError:
            continue
        found.append(node)
    return found


def trees() -> Iterator[Condition]:
    """Leaves; all pairs of leaves; and each leaf nested to every depth beside another."""
    simple = leaves()
    yield from simple
    for pair in combinations_with_replacement(simple, 2):
        yield AllOf(pair)
    for depth in (1, 2):
        for leaf in simple:
            nested: Condition = leaf
            for _ in range(depth):
                nested = AllOf((nested,))
            yield AllOf((nested, Single("b", "y")))
    pair = AllOf((Single("a", "x"), Single("b", "y")))
    yield AllOf((AllOf((pair,)), Single("a", "y")))
    yield AllOf((AllOf((AllOf((pair,)),)), Single("a", "y")))


Run = list[tuple[str, str, str]]
# Enough to tell a name, a key and a source apart.
FEW = [("a", "x", "p"), ("a", "y", "q"), ("b", "x", "q")]


def short_runs(longest: int) -> list[Run]:
    """Every sequence of the few signals of that length; each begins with the shorter ones."""
    return [list(run) for run in product(FEW, repeat=longest)]


def random_runs(rng: random.Random, count: int) -> list[Run]:
    return [[rng.choice(SIGNALS) for _ in range(rng.randint(1, 6))] for _ in range(count)]


ALL_TREES = list(trees())
SHARDS = 4


async def compare_all(waits: Waits, cases: list[tuple[Condition, Run]]) -> None:
    for start in range(0, len(cases), 50):
        await asyncio.gather(*(compare(waits, *case) for case in cases[start : start + 50]))


async def test_every_leaf_with_every_run_of_three(engine: Engine) -> None:
    waits = await Waits.open(engine)
    await compare_all(waits, list(product(leaves(), short_runs(3))))


@pytest.mark.parametrize("shard", range(SHARDS))
async def test_every_small_tree_with_every_run_of_two(engine: Engine, shard: int) -> None:
    waits = await Waits.open(engine)
    await compare_all(waits, list(product(ALL_TREES[shard::SHARDS], short_runs(2))))


@pytest.mark.parametrize("shard", range(SHARDS))
async def test_every_small_tree_with_long_runs(engine: Engine, shard: int) -> None:
    rng = random.Random(random.getrandbits(64))
    waits = await Waits.open(engine)
    mine = ALL_TREES[shard::SHARDS]
    await compare_all(waits, [(tree, run) for tree in mine for run in random_runs(rng, 1)])


async def compare(waits: Waits, tree: Condition, run: Run) -> None:
    """Signal after signal, engine and evaluator agree; then the execution is put away."""
    handle = await running(waits.engine)
    keys = referenced_waitpoint_keys(tree)
    bindings = [FreshWaitpoint(new_uuid(), key) for key in keys]
    parked = await waits.backend.suspensions.suspend(handle, condition=tree, waitpoints=bindings)
    assert isinstance(parked, Suspended)
    accepted: list[AcceptedSignal] = []
    for key, name, who in run:
        if key not in keys:
            continue
        outcome = await waits.send(
            parked, name, at=keys.index(key), source_type="t", source_identity=who
        )
        assert isinstance(outcome, Accepted)
        accepted.append(AcceptedSignal(outcome.signal_id, key, name, "t", who))
        story = f"{condition_json(tree)} after {[s[1:] for s in run]}: {outcome.effect}"
        assert outcome.resumed == satisfied(tree, accepted), story
        if outcome.resumed:
            break
    await waits.backend.executions.cancel_execution(handle.execution_id)


async def test_order_never_matters(engine: Engine) -> None:
    """Whatever the order, the same signals end in the same state."""
    rng = random.Random(random.getrandbits(64))
    waits = await Waits.open(engine)
    for tree in rng.sample(ALL_TREES, 40):
        signals = [rng.choice(SIGNALS) for _ in range(5)]
        verdicts: set[bool] = set()
        for _ in range(3):
            rng.shuffle(signals)
            verdicts.add(await resumes(waits, tree, signals))
        assert len(verdicts) == 1, condition_json(tree)


async def resumes(waits: Waits, tree: Condition, run: Run) -> bool:
    handle = await running(waits.engine)
    parked = await waits.park(tree, handle=handle)
    keys = [w.waitpoint_key for w in parked.details.waitpoints]
    resumed = False
    for key, name, who in run:
        if key in keys and not resumed:
            outcome = await waits.send(parked, name, at=keys.index(key), source_identity=who)
            assert isinstance(outcome, Accepted)
            resumed = outcome.resumed
    await waits.backend.executions.cancel_execution(handle.execution_id)
    return resumed


async def test_buffered_signals_are_judged_alike(engine: Engine) -> None:
    """Some signals come before the pause, some after: the verdict is that of all together."""
    rng = random.Random(random.getrandbits(64))
    waits = await Waits.open(engine)
    on_one_key = [tree for tree in ALL_TREES if referenced_waitpoint_keys(tree) == ["a"]]
    for tree in on_one_key:
        handle = await running(engine)
        pending = await waits.backend.waitpoints.create_waitpoint(handle, "a", 60_000)
        run = [signal for signal in random_runs(rng, 1)[0] if signal[0] == "a"]
        early = rng.randint(0, len(run))
        accepted: list[AcceptedSignal] = []
        for position, (_, name, who) in enumerate(run):
            if position == early and await parks(waits, handle, pending, tree, accepted):
                break
            outcome = await waits.signal(
                handle.execution_id, pending, name, source_type="t", source_identity=who
            )
            assert isinstance(outcome, Accepted)
            accepted.append(AcceptedSignal(outcome.signal_id, "a", name, "t", who))
            if position >= early:
                assert outcome.resumed == satisfied(tree, accepted), condition_json(tree)
                if outcome.resumed:
                    break
        await waits.backend.executions.cancel_execution(handle.execution_id)


async def parks(
    waits: Waits,
    handle: Handle,
    pending: PendingWaitpoint,
    tree: Condition,
    accepted: list[AcceptedSignal],
) -> bool:
    """Suspends on the pending waitpoint; whether what it buffered was enough."""
    outcome = await waits.backend.suspensions.suspend(
        handle, condition=tree, waitpoints=[UsePending(pending.waitpoint_id)]
    )
    enough = outcome.kind == "already_satisfied"
    assert enough == satisfied(tree, accepted), condition_json(tree)
    return enough


async def test_two_counts_do_not_count_each_other(engine: Engine) -> None:
    waits = await Waits.open(engine)
    counts = [
        Count(n=2, waitpoints=("a",), count_kind=CountKind.DISTINCT_SOURCES, signal_name=name)
        for name in "xy"
    ]
    parked = await waits.park(AllOf(tuple(counts)))
    assert await waits.effect(parked, "x", source_identity="p") == "appended_to_waitpoint"
    assert await waits.effect(parked, "y", source_identity="q") == "appended_to_waitpoint"
    assert await waits.effect(parked, "x", source_identity="q") == "appended_to_waitpoint"
    assert await waits.effect(parked, "y", source_identity="p") == "resume_condition_satisfied"


async def test_one_signal_may_satisfy_several_nodes(engine: Engine) -> None:
    waits = await Waits.open(engine)
    node = Count(n=1, waitpoints=("a",))
    parked = await waits.park(AllOf((node, Single("a"), AllOf((Single("a", "x"), node)))))
    assert await waits.effect(parked, "x") == "resume_condition_satisfied"


async def test_depth_four_resumes(engine: Engine) -> None:
    waits = await Waits.open(engine)
    tree: Condition = Single("deep", "x")
    for position in range(4):
        tree = AllOf((tree, Single(f"k{position}")))
    parked = await waits.park(tree)
    order = [w.waitpoint_key for w in parked.details.waitpoints]
    for position, key in enumerate(order[1:], start=1):
        assert await waits.effect(parked, "any", at=position) == "appended_to_waitpoint", key
    assert await waits.effect(parked, "x") == "resume_condition_satisfied"


async def test_a_condition_of_thousands_of_leaves(engine: Engine) -> None:
    """More leaves than one Lua call can carry as arguments."""
    waits = await Waits.open(engine)
    wide = AllOf(tuple(Single("a", f"n{i % 3}") for i in range(9000)))
    parked = await waits.park(wide)
    assert await waits.effect(parked, "n0") == "appended_to_waitpoint"
    assert await waits.effect(parked, "n1") == "appended_to_waitpoint"
    assert await waits.effect(parked, "n2") == "resume_condition_satisfied"
