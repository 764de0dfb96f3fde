"""The metrics of a process: every name, and the numbers. Off until `enable` is called.

Numbers are kept in plain dictionaries, so that counting costs little and needs no library;
`flowfabric.observability` writes them in the format of Prometheus.
"""

import threading
from bisect import bisect_left
from collections.abc import Mapping

import msgspec

from flowfabric.core.forks import forget_on_fork
from flowfabric.engine.label_budget import (
    LABEL_SETS,
    SECONDS,
    LabelBudget,
    Labels,
    Metric,
)

LONG_SECONDS = (1.0, 10.0, 60.0, 600.0, 3600.0, 14_400.0, 86_400.0, 604_800.0)
UNKNOWN = "unknown"


def _counter(
    name: str,
    text: str,
    *labels: str,
    folds: Labels = (),
    share: int = 16,
    most: int = LABEL_SETS,
) -> Metric:
    return Metric(name, "counter", text, labels, folds=folds, share=share, most=most)


def _gauge(name: str, text: str, *labels: str, folds: Labels = (), peak: bool = False) -> Metric:
    return Metric(name, "gauge", text, labels, folds=folds, peak=peak)


def _histogram(
    name: str,
    text: str,
    *labels: str,
    buckets: tuple[float, ...] = SECONDS,
    folds: Labels = (),
    share: int = 16,
) -> Metric:
    return Metric(name, "histogram", text, labels, buckets, folds, share)


LANE: Labels = ("lane",)
GROUPS: dict[str, tuple[Metric, ...]] = {
    "Queues": (
        _gauge(
            "ff_eligible_depth", "Executions that a worker could claim now.", "lane", folds=LANE
        ),
        _gauge(
            "ff_blocked_depth",
            "Executions that cannot be claimed yet.",
            *("lane", "reason"),
            folds=LANE,
        ),
        _gauge(
            "ff_reclaimable_depth", "Executions whose worker lost its lease.", "lane", folds=LANE
        ),
        _gauge(
            "ff_oldest_eligible_age_seconds",
            "How long the longest-waiting execution of the lane, of any priority, has been "
            "claimable: since its creation or its last delay, retry, suspension or block. `other` "
            "is the longest time of its lanes.",
            "lane",
            folds=LANE,
            peak=True,
        ),
        _gauge(
            "ff_workers_alive",
            "Worker processes that are registered.",
            "namespace",
            folds=("namespace",),
        ),
    ),
    "Claims and attempts": (
        _histogram(
            "ff_claim_from_grant_duration_seconds",
            "Duration of a claim cycle, with or without work.",
            "lane",
            folds=LANE,
        ),
        _counter(
            "ff_claim_outcome_total",
            "Claim cycles, by outcome: `granted`, `no_work` or `error`.",
            *("lane", "outcome"),
            folds=LANE,
            share=24,
        ),
        _histogram(
            "ff_claim_wait_seconds",
            "How long executions were claimable before a worker claimed them.",
            "lane",
            folds=LANE,
        ),
        _counter(
            "ff_worker_at_capacity_total",
            "How often a worker stopped claiming because it ran as many tasks as it may.",
        ),
        _counter(
            "ff_attempt_outcome_total",
            "Attempts that ended: `ok`, `error`, `timeout`, `cancelled` or `retry`. The lane is "
            "`unknown` if an operator ended the attempt.",
            *("lane", "outcome"),
            folds=LANE,
            share=24,
        ),
    ),
    "Leases": (
        _counter("ff_lease_renewal_total", "Lease renewals: `ok` or `error`.", "outcome"),
        _counter(
            "ff_lease_expired_total", "Leases that were not renewed in time.", "lane", folds=LANE
        ),
        _counter("ff_lease_revoked_total", "Leases that an operator revoked."),
        _counter(
            "ff_reclaim_total",
            "Attempts to take over an execution whose lease was lost: `claimed`, "
            "`reclaim_cap_exceeded`, `not_reclaimable` or `grant_not_found`.",
            "outcome",
        ),
    ),
    "Suspensions and signals": (
        _gauge(
            "ff_suspensions_open",
            "Suspended executions, by the reason that their task gave.",
            *("lane", "reason"),
            folds=("lane", "reason"),
        ),
        _histogram(
            "ff_suspension_seconds",
            "How long executions were suspended, by what ended the suspension.",
            "reason",
            buckets=LONG_SECONDS,
            folds=("reason",),
        ),
        _counter("ff_signals_total", "Signals that were accepted, by their effect.", "effect"),
        _counter(
            "ff_signal_rejections_total",
            "Signals that were refused, by error code.",
            "code",
            folds=("code",),
        ),
        _gauge(
            "ff_waitpoint_kids",
            "Signing keys that are accepted, by partition. `other` is the largest number of its "
            "partitions.",
            "partition",
            folds=("partition",),
            peak=True,
        ),
        _gauge(
            "ff_waitpoint_tokens_old_kid_open",
            "Open waitpoints whose token was signed with a key that is no longer current.",
        ),
    ),
    "Streams": (
        _counter("ff_stream_frames_total", "Frames that were appended.", "mode"),
        _counter("ff_stream_bytes_total", "Bytes of the frames that were appended.", "mode"),
        _counter(
            "ff_stream_append_rejected_total",
            "Appends that were refused, by error code.",
            "code",
            folds=("code",),
        ),
        _gauge("ff_stream_ops_in_flight", "Reads and tails of streams in progress.", "op"),
        _counter(
            "ff_stream_ops_rejected_total",
            "Reads and tails that were refused because too many were in progress.",
            "op",
        ),
        _histogram(
            "ff_stream_tail_wait_seconds",
            "How long a tail waited, by what ended the wait: `frames`, `closed` or `timeout`.",
            "outcome",
        ),
    ),
    "Flows": (
        _counter(
            "ff_edge_group_policy_total",
            "Joins that were stored: `all_of`, `any_of` or `quorum`.",
            "policy",
        ),
        _counter(
            "ff_cascade_resolved_total",
            "Dependencies that were resolved, by path: `inline`, in the call that ended a member; "
            "`drain`, in the background; `reconciler`, because both failed: alert on it.",
            "path",
        ),
        _gauge("ff_cascade_backlog_depth", "Flow steps that await background processing."),
        _histogram(
            "ff_dag_hop_seconds",
            "Time from the end of the last upstream that a join needed until its member could run.",
        ),
        _counter(
            "ff_flow_terminal_total", "Flows that finished: `completed` or `failed`.", "state"
        ),
        _counter(
            "ff_sibling_cancel_dispatched_total",
            "Members whose join no longer needs them, by reason: `sibling_quorum_satisfied` or "
            "`sibling_quorum_impossible`.",
            "reason",
        ),
        _counter(
            "ff_sibling_cancel_disposition_total",
            "Results of cancelling these members: `cancelled`, `already_terminal` or `not_found`.",
            "disposition",
        ),
        _counter(
            "ff_sibling_cancel_reconcile_total",
            "Decided joins that the reconciler checked: `sremmed_stale`, `completed_drain`, "
            "`no_op`.",
            "action",
        ),
        _gauge("ff_cancel_backlog_depth", "Cancelled flows with members still to be cancelled."),
    ),
    "Budgets and quotas": (
        _counter(
            "ff_budget_hit_total",
            "Claims that a budget denied, by dimension.",
            "dimension",
            folds=("dimension",),
            share=32,
            most=32,
        ),
        _counter(
            "ff_quota_hit_total", "Claims that a quota denied: `rate` or `concurrency`.", "reason"
        ),
        _counter(
            "ff_budget_report_total", "Usage reports, by result.", "result", folds=("result",)
        ),
        _counter(
            "ff_admission_faults_total",
            "Budgets and quotas that a claim or the unblock scanner could not read; work waits.",
            "kind",
        ),
    ),
    "Scanners and events": (
        _counter("ff_scanner_cycle_total", "Cycles, including idle ones.", "scanner"),
        _histogram("ff_scanner_cycle_duration_seconds", "Duration of a cycle.", "scanner"),
        _counter(
            "ff_scanner_items_total",
            "Items that cycles handled: `processed` or `error`.",
            *("scanner", "result"),
        ),
        _gauge(
            "ff_scanner_lag_seconds",
            "How late the last cycle handled the oldest entry that was due.",
            "scanner",
        ),
        _counter("ff_scanner_restarts_total", "Restarts of a scanner after a crash.", "scanner"),
        _counter(
            "ff_event_dispatch_total",
            "Operator events that the event dispatcher read: `ok` or `corrupt`.",
            "result",
        ),
        _gauge(
            "ff_event_dispatch_lag_seconds",
            "The age of the last event that the event dispatcher read, by the engine's clock.",
        ),
    ),
    "Engine calls": (
        _histogram(
            "ff_engine_call_duration_seconds",
            "Duration of engine calls.",
            "op",
            folds=("op",),
            share=40,
        ),
        _counter(
            "ff_engine_errors_total",
            "Engine calls that failed, by error code.",
            *("op", "code"),
            folds=("op", "code"),
            share=24,
        ),
        _counter("ff_shutdown_timeout_total", "Steps of a shutdown that timed out."),
    ),
    "HTTP": (
        _counter(
            "ff_http_requests_total",
            "Requests.",
            *("method", "path", "status"),
            folds=("method", "path"),
            share=48,
        ),
        _histogram(
            "ff_http_request_duration_seconds",
            "Duration of requests.",
            *("method", "path", "status"),
            folds=("method", "path"),
            share=48,
        ),
    ),
}
METRICS = {metric.name: metric for group in GROUPS.values() for metric in group}


class Histogram(msgspec.Struct):
    """Counts per bucket, the last one for everything above, and the sum."""

    counts: list[int]
    total: float = 0.0


class Meter:
    """The numbers of this process. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.forget()
        forget_on_fork(self)

    def forget(self) -> None:
        """Start at zero in a forked child."""
        self._lock = threading.Lock()
        self._budget = LabelBudget(METRICS)
        self.numbers: dict[str, dict[Labels, float]] = {}
        self.histograms: dict[str, dict[Labels, Histogram]] = {}
        for metric in METRICS.values():
            if metric.kind == "histogram":
                self.histograms[metric.name] = {}
            else:
                # A counter without labels is shown even before it first counts.
                empty = metric.kind == "counter" and not metric.labels
                self.numbers[metric.name] = {(): 0} if empty else {}

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter, or to a gauge that counts."""
        series = self.numbers[name]
        with self._lock:
            if labels not in series:
                labels = self._admitted(name, labels)
            series[labels] = series.get(labels, 0) + by

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge whose labels have few values."""
        self.numbers[name][labels] = value

    def replace(self, name: str, values: Mapping[Labels, float]) -> None:
        """Set all values of a gauge; label sets that are not given disappear."""
        self.numbers[name] = dict(values)

    def observe(self, name: str, seconds: float, *labels: str, times: int = 1) -> None:
        """Add a duration to a histogram, once or several times."""
        series = self.histograms[name]
        with self._lock:
            if labels not in series:
                labels = self._admitted(name, labels)
            found = series.get(labels)
            if found is None:
                found = series[labels] = Histogram([0] * (len(METRICS[name].buckets) + 1))
            found.counts[bisect_left(METRICS[name].buckets, seconds)] += times
            found.total += seconds * times

    def shown(self) -> dict[str, Mapping[Labels, float]]:
        """The counters and gauges, within the budget of label sets.

        Copy the histograms before: a label set that is named later takes room from gauges.
        """
        values: dict[str, Mapping[Labels, float]] = {
            name: series.copy() for name, series in self.numbers.items()
        }
        folding = [each for each in METRICS.values() if each.kind == "gauge" and each.folds]
        return values | self._budget.fold_gauges({each: values[each.name] for each in folding})

    def _admitted(self, name: str, labels: Labels) -> Labels:
        """The label set under which to count a new label set."""
        metric = METRICS[name]
        if not metric.folds or self._budget.admits(metric):
            return labels
        return metric.folded(labels)

    def value(self, name: str, *labels: str) -> float:
        """A counter, a gauge, or the number of observations of a histogram; 0 if not yet known."""
        if name in self.histograms:
            found = self.histograms[name].get(labels)
            return 0 if found is None else sum(found.counts)
        return self.numbers[name].get(labels, 0)


_active: Meter | None = None


def enable() -> Meter:
    """Start collecting metrics. Call it before connecting: open connections are not measured."""
    global _active  # noqa: PLW0603 - one per process, like the process's log
    if _active is None:
        _active = Meter()
    return _active


def active() -> Meter | None:
    """The meter of this process; None while metrics are off."""
    return _active


def count(name: str, *labels: str) -> None:
    """Add one to a counter, if metrics are on."""
    if _active is not None:
        _active.count(name, *labels)


def disable() -> None:
    """Stop collecting metrics; for tests."""
    global _active  # noqa: PLW0603
    _active = None
