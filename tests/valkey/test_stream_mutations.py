"""Each guard of the stream functions, removed on purpose, must turn a named test red."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.conformance import (
    test_stream_append,
    test_stream_close,
    test_stream_modes,
    test_stream_numbers,
    test_stream_read,
)
from tests.support.engine import Engine
from tests.valkey import test_stream_append as stored_stream_append
from tests.valkey import test_stream_close as stored_stream_close
from tests.valkey import test_stream_modes as stored_stream_modes
from tests.valkey.mutation import crashed, failure_of, private_engine, private_server

Scenario = Callable[[Engine], Awaitable[None]]
APPEND = "functions/ff_append.lua"
READ = "functions/ff_stream_read.lua"
STREAMS = "lib/65_streams.lua"
PURGING = "lib/96_purging.lua"


def state(name: str) -> Scenario:
    return lambda engine: test_stream_append.test_only_an_active_lease_writes(
        engine, name, "durable"
    )


def fence(**change: object) -> Scenario:
    return lambda engine: test_stream_append.test_each_part_of_the_fence_must_match(engine, change)


def ends(name: str, *, wrote: bool) -> Scenario:
    return lambda engine: test_stream_close.test_the_end_of_an_attempt_closes_its_stream(
        engine, name, wrote
    )


def survives(mode: str) -> Scenario:
    return lambda engine: test_stream_modes.test_durable_frames_survive_other_modes(engine, mode)


MUTANTS: list[tuple[str, str, str, str, Scenario]] = [
    (
        "phase",
        APPEND,
        "if not state or not S.is_active(state) then reply.refuse('stream_closed') end",
        "if not state then reply.refuse('stream_closed') end",
        state("completed"),
    ),
    ("ownership", APPEND, "if state ~= S.ACTIVE or ", "if ", state("revoked")),
    (
        "expiry",
        APPEND,
        "tonumber(found[4]) <= c.now or ",
        "",
        test_stream_append.test_a_lapsed_lease_is_refused_and_not_marked,
    ),
    (
        "expiry, last millisecond",
        APPEND,
        "tonumber(found[4]) <= c.now",
        "tonumber(found[4]) < c.now - 1000",
        test_stream_append.test_a_lapsed_lease_is_refused_and_not_marked,
    ),
    (
        "attempt index",
        APPEND,
        "\n      or string.match(found[3], '/(%d+)$') ~= index then",
        " then",
        fence(index=1),
    ),
    ("lease", APPEND, " or found[2] ~= held", "", fence(epoch=2)),
    (
        "closed",
        APPEND,
        "if meta[1] then return reply.err('stream_closed') end",
        "",
        stored_stream_append.test_a_closed_stream_is_closed_for_its_owner_too,
    ),
    (
        "numbers",
        APPEND,
        "reply.stop_with(seq ~= '' and meta[5] and duplicate(meta[5], seq, before))",
        "",
        test_stream_numbers.test_a_repeated_number_writes_nothing,
    ),
    (
        "exact numbers",
        APPEND,
        "return #a < #b or (#a == #b and a <= b)",
        "return a <= b",
        lambda engine: test_stream_numbers.test_numbers_are_exact(engine, (9, 10)),
    ),
    (
        "summary version",
        APPEND,
        "if version ~= want.version then",
        "if false then",
        stored_stream_modes.test_a_forgotten_summary_is_read_again,
    ),
    (
        "durable limit",
        APPEND,
        "math.max(keep, tonumber(durable or 0))",
        "keep",
        survives("summary"),
    ),
    (
        "expiry only without durable frames",
        APPEND,
        "if not durable then",
        "if true then",
        lambda engine: stored_stream_modes.test_no_expiry_after_a_frame_that_stays(
            engine, "durable"
        ),
    ),
    (
        "expiry removed",
        APPEND,
        "server.call('PERSIST', stream)",
        "local _ = 0",
        lambda engine: stored_stream_modes.test_a_frame_that_stays_ends_the_expiry_for_good(
            engine, "summary"
        ),
    ),
    (
        "ids after an expiry",
        APPEND,
        "if meta[2] and not durable then continue_after(stream, meta[8]) end",
        "",
        stored_stream_modes.test_an_expired_stream_gives_no_id_twice,
    ),
    (
        "exact retention",
        APPEND,
        "if maxlen > 0 then return '=', maxlen end",
        "if maxlen > 0 then return '~', maxlen end",
        stored_stream_append.test_exact_retention,
    ),
    (
        "policy retention",
        APPEND,
        "args[5] ~= '' and args[5] or found[5] or 0",
        "args[5] ~= '' and args[5] or 0",
        lambda engine: stored_stream_append.test_the_policy_sets_the_default(engine, None, 5),
    ),
    (
        "largest retention",
        APPEND,
        "math.min(LARGEST_MAXLEN, tonumber(args[5] ~= '' and args[5] or found[5] or 0))",
        "tonumber(args[5] ~= '' and args[5] or found[5] or 0)",
        test_stream_append.test_a_policy_beyond_the_store_s_numbers,
    ),
    (
        "stream noted on the record",
        APPEND,
        "server.call('HSET', core, 'streamed', index)",
        "local _ = 0",
        ends("complete", wrote=True),
    ),
    (
        "closed stays closed",
        STREAMS,
        "if not before or (PROVISIONAL[before] and not PROVISIONAL[reason]) then",
        "if true then",
        test_stream_close.test_a_pending_retry_does_not_change_the_reason,
    ),
    (
        "a reclaim says more",
        STREAMS,
        "if not before or (PROVISIONAL[before] and not PROVISIONAL[reason]) then",
        "if not before then",
        stored_stream_close.test_a_reclaim_stores_how_the_attempt_ended,
    ),
    (
        "the bell",
        STREAMS,
        "if is_tailed(rec, index) then\n    local bell",
        "if false then\n    local bell",
        stored_stream_close.test_followers_are_woken_within_a_tenth_of_a_second,
    ),
    (
        "several followed attempts",
        STREAMS,
        "if tonumber(known) >= current then kept[#kept + 1] = known end",
        "",
        stored_stream_close.test_followers_of_different_attempts_do_not_disturb_each_other,
    ),
    (
        "bounded list of followers",
        STREAMS,
        "if #kept >= MAX_TAILED then return false end",
        "",
        stored_stream_close.test_the_list_of_followed_attempts_is_bounded,
    ),
    (
        "silent attempts",
        READ,
        "if not meta[3] then closed_at, reason = ended_silently(c, id, index, rec) end",
        "",
        ends("complete", wrote=False),
    ),
    (
        "silent lease loss",
        READ,
        "if S.is_lease_expired(rec.state) then",
        "if false then",
        ends("lease expiry", wrote=False),
    ),
    (
        "filter",
        READ,
        "if not (filtered and is_best_effort(entry)) then",
        "if true then",
        test_stream_modes.test_modes_share_one_order,
    ),
    (
        "filter goes on",
        READ,
        "if #entries < chunk then return visible, examined, 0 end",
        "if true then return visible, examined, 0 end",
        test_stream_read.test_a_filtered_read_passes_over_hidden_runs,
    ),
    (
        "filter tells of more",
        READ,
        "return visible, examined, 1",
        "return visible, examined, 0",
        test_stream_read.test_a_filtered_read_longer_than_one_look,
    ),
    (
        "end as a beginning",
        READ,
        "return newest and newest[1] or first, oldest and oldest[1] or last",
        "return first, last",
        test_stream_read.test_start_and_end_name_entries,
    ),
    (
        "gaps",
        READ,
        "tonumber(meta[3] or 0) > server.call('XLEN', stream)",
        "false",
        test_stream_read.test_gaps_are_told,
    ),
    (
        "purge of meta",
        PURGING,
        "  doomed[#doomed + 1] = K.stream_meta(c.tag, id, count)\n",
        "",
        stored_stream_close.test_a_purge_leaves_nothing,
    ),
    (
        "purge of the summary",
        PURGING,
        "  doomed[#doomed + 1] = K.summary(c.tag, id, count)\n",
        "",
        stored_stream_close.test_a_purge_leaves_nothing,
    ),
    (
        "purge of the bell",
        PURGING,
        "  doomed[#doomed + 1] = K.stream_closed(c.tag, id, count)\n",
        "",
        stored_stream_close.test_a_follower_alone_leaves_nothing_behind_a_purge,
    ),
]

__all__ = ["private_engine", "private_server"]

PREVENTS_CRASHES = {
    "math.min(LARGEST_MAXLEN, tonumber(args[5] ~= '' and args[5] or found[5] or 0))"
}


@pytest.mark.parametrize(
    ("path", "guard", "replacement", "scenario"),
    [row[1:] for row in MUTANTS],
    ids=[row[0] for row in MUTANTS],
)
async def test_a_removed_guard_is_noticed(
    private_engine: Engine, path: str, guard: str, replacement: str, scenario: Scenario
) -> None:
    failure = await failure_of(private_engine, path, guard, replacement, scenario)
    # A mutant that merely crashes shows nothing about the guard, unless the guard prevents that.
    assert crashed(failure) is (guard in PREVENTS_CRASHES), failure
