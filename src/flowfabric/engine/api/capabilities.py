"""What a backend can do, and what it answers where it cannot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import msgspec

from flowfabric.core.errors import UnavailableError

if TYPE_CHECKING:
    from flowfabric.engine.api.backend import Backend


class Version(msgspec.Struct, frozen=True):
    """Numbers that compare in order."""

    major: int
    minor: int
    patch: int


class Identity(msgspec.Struct, frozen=True):
    """Which backend this is."""

    family: Literal["valkey", "postgres", "sqlite", "unknown"]
    version: Version
    stage: str


class Capabilities(msgspec.Struct, frozen=True):
    """What a backend is and supports; a true flag means callable and correct."""

    identity: Identity
    supports: Mapping[str, bool]


class Refusal:
    """An operation that a backend lacks: calling it raises `unavailable`."""

    def __init__(self, op: str) -> None:
        self.op = op

    async def __call__(self, *_: object, **__: object) -> NoReturn:
        raise UnavailableError("unavailable", self.op, op=self.op)


class Absent:
    """A noun that a backend lacks: all its operations are refusals."""

    if TYPE_CHECKING:

        def __getattr__(self, op: str) -> Refusal: ...


_MAY_LACK = {
    "claims": "claim claim_for_worker complete_and_claim_next block_execution_for_admission "
    "block_route unblock_execution",
    "workers": "drain_worker list_worker_leases",
    "events": "subscribe subscribe_completion subscribe_signal_delivery subscribe_operator_events "
    "subscribe_worker_events subscribe_flow_events subscribe_instance_tags",
    "steps": "record_step read_steps watch_completion deliver_child_completions",
    "budgets": "create_budget update_budget_limits delete_budget reset_budget get_budget_status "
    "list_budgets report_usage report_usage_admin record_spend release_budget "
    "read_budget_usage_and_limits reconcile_budget_counters",
    "quotas": "create_quota_policy update_quota_policy get_quota_status list_quota_policies "
    "check_admission confirm_admission release_admission read_quota_policy_limits "
    "reconcile_quota_counters",
    "flows": "create_flow set_flow_tag set_flow_tags get_flow_tag add_execution_to_flow "
    "stage_dependency_edge apply_dependency_to_child add_dependency set_edge_group_policy "
    "submit_flow extend_flow release_flow spawn_children cancel_flow replay_flow delete_flow "
    "wait_flow get_inputs describe_flow describe_edge list_flows list_edges list_outgoing_edges "
    "list_incoming_edges resolve_execution_flow_id evaluate_flow_eligibility "
    "promote_blocked_to_eligible resolve_dependency cascade_completion drain_cascade "
    "cancel_flow_header ack_cancel_member drain_flow_cancel drain_sibling_cancel_group "
    "reconcile_sibling_cancel_group project_flow_summary",
}
"""By noun: the operations of spec 12 §2 that a backend may lack."""
# Spec 12 §3 fixes the order. `flag=operation` where the two have different names.
_FLAGS = """
executions cancel_execution change_priority replay_execution
leases revoke_lease
reads read_execution_state read_execution_info get_execution_result
budgets budget_admin=create_budget
quotas quota_admin=create_quota_policy
secrets rotate_waitpoint_hmac_secret_all seed_waitpoint_hmac_secret
waitpoints list_pending_waitpoints
flows cancel_flow_header cancel_flow_wait_timeout=cancel_flow
flows cancel_flow_wait_indefinite=cancel_flow ack_cancel_member
claims claim_for_worker issue_reclaim_grant
meta prepare
events subscribe_lease_history subscribe_completion subscribe_signal_delivery
events subscribe_instance_tags
streams stream_durable_summary=read_summary stream_best_effort_live=append_frame
workers register_worker heartbeat_worker mark_worker_dead
leases list_expired_leases
workers list_workers
quotas release_admission read_quota_policy_limits
claims block_execution_for_admission
budgets read_budget_usage_and_limits
events subscribe_operator_events subscribe_worker_events
"""


def refuse_missing(backend: Backend) -> None:
    """Give a backend the operations that it lacks, as refusals."""
    for noun, names in _MAY_LACK.items():
        concern: Any = getattr(backend, noun, None) or Absent()
        for name in names.split():
            if not hasattr(concern, name):
                setattr(concern, name, Refusal(name))
        setattr(backend, noun, concern)


def provide(concern: object, operation: Callable[..., Awaitable[object]]) -> None:
    """Add an operation that a part above the backend provides: its flag turns true."""
    setattr(concern, operation.__name__, operation)


def supported(backend: Backend) -> dict[str, bool]:
    """Every flag, read off the backend's operations."""
    flags: dict[str, bool] = {}
    for line in _FLAGS.split("\n"):
        noun, *entries = line.split() or [""]
        for entry in entries:
            flag, _, operation = entry.partition("=")
            found = getattr(getattr(backend, noun), operation or flag, None)
            flags[flag] = found is not None and not isinstance(found, Refusal)
    return flags
