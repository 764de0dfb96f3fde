"""Budgets and quota policies (10 §3.5, §3.7)."""

from typing import Annotated, Any

import msgspec

from flowfabric.core.contracts import budgets, quotas
from flowfabric.core.errors import NotFoundError
from flowfabric.server.bodies import U64, Uuid
from flowfabric.server.calls import Call
from flowfabric.server.problems import Problem, invalid
from flowfabric.server.queries import NoQuery, PageQuery
from flowfabric.server.routes.execution_reads import page_of
from flowfabric.server.routing import Routes
from flowfabric.server.schemas import Listed, variants
from flowfabric.server.wire import Reply, answer, struct, variant

routes = Routes()


def _described(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


_Mode = Annotated[str, _described("`strict` or `warn`; other text means `strict`.")]
_OnHardLimit = Annotated[str, _described("`fail`, `suspend` or `reject`; other text means `fail`.")]
_OnSoftLimit = Annotated[str, _described("`warn` or `allow`; other text means `warn`.")]


class CreateBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A budget; the three lists are parallel, and 0 means no limit."""

    budget_id: Uuid
    scope_type: str
    scope_id: str
    enforcement_mode: _Mode
    on_hard_limit: _OnHardLimit
    on_soft_limit: _OnSoftLimit
    reset_interval_ms: U64
    dimensions: list[str]
    hard_limits: list[U64]
    soft_limits: list[U64]
    dedup_ttl_ms: U64 | None = None


@routes.post(
    "/v1/budgets",
    scope="operate",
    answers={
        201: variants(budgets.BudgetCreated),
        200: variants(budgets.BudgetExists, optional=("differs",)),
    },
)
async def create_budget(call: Call[CreateBudget, NoQuery]) -> Reply:
    """Create a budget. An existing budget is not changed."""
    call.require_all_namespaces()
    fields: dict[str, Any] = struct(call.body)
    for name in ("dimensions", "hard_limits", "soft_limits"):
        fields[name] = tuple(fields[name])
    if fields["dedup_ttl_ms"] is None:
        del fields["dedup_ttl_ms"]
    outcome = await call.backend.budgets.create_budget(budgets.NewBudget(**fields))
    if isinstance(outcome, budgets.BudgetCreated):
        return answer(variant(outcome), 201)
    return answer(_existing(outcome))


def _existing(outcome: budgets.BudgetExists | quotas.QuotaExists) -> Any:
    """Include `differs` only if true, so that a repeat has the shape of 10 §3.5."""
    return variant(outcome) if outcome.differs else variant(outcome, "differs")


class BudgetsQuery(PageQuery, frozen=True, kw_only=True):
    """Which budgets to list."""

    scope_type: str | None = None
    scope_id: str | None = None


@routes.get("/v1/budgets", scope="read", answers={200: Listed("budgets", budgets.BudgetStatus)})
async def list_budgets(call: Call[None, BudgetsQuery]) -> Reply:
    """List budgets by id."""
    query = call.query
    page = await call.backend.budgets.list_budgets(
        after=query.cursor,
        # The cursor is checked even if no entry is asked for.
        limit=max(1, query.size),
        scope_type=query.scope_type,
        scope_id=query.scope_id,
    )
    if not query.size:
        return answer({"budgets": [], "next_cursor": None})
    return answer(page_of("budgets", [struct(each) for each in page.entries], page))


@routes.get("/v1/budgets/{id}", scope="read", answers={200: budgets.BudgetStatus}, errors=(404,))
async def read_budget(call: Call[None, NoQuery]) -> Reply:
    """Read a budget with its usage."""
    budget_id = call.uuid("budget_id")
    try:
        return answer(struct(await call.backend.budgets.get_budget_status(budget_id)))
    except NotFoundError:
        raise Problem("budget_not_found", budget_id, error="not found: budget") from None


class OfBudget(msgspec.Struct, frozen=True, kw_only=True):
    """About the budget of the path, whose id the body may repeat."""

    budget_id: Uuid | None = None


class BudgetUsageBody(OfBudget, frozen=True, kw_only=True):
    """What was spent, by dimension."""

    dimensions: dict[str, U64]
    dedup_key: str | None = None


@routes.post(
    "/v1/budgets/{id}/usage",
    scope="operate",
    answers={
        200: variants(
            *(budgets.UsageOk, budgets.UsageAlreadyApplied, budgets.SoftBreach, budgets.HardBreach),
            omit=("action", "reserved"),
        )
    },
    errors=(404,),
)
async def report_usage(call: Call[BudgetUsageBody, NoQuery]) -> Reply:
    """Count usage in all dimensions, or in none on a hard breach."""
    call.require_all_namespaces()
    outcome = await call.backend.budgets.report_usage_admin(
        call.uuid("budget_id"), call.body.dimensions, dedup_key=call.body.dedup_key or ""
    )
    return answer(variant(outcome, "action", "reserved"))


@routes.post(
    "/v1/budgets/{id}/reset",
    scope="operate",
    answers={200: variants(budgets.BudgetReset)},
    errors=(404,),
)
async def reset_budget(call: Call[None, NoQuery]) -> Reply:
    """Reset all usage of a budget to 0."""
    call.require_all_namespaces()
    return answer(variant(await call.backend.budgets.reset_budget(call.uuid("budget_id"))))


class UpdateBudget(OfBudget, frozen=True, kw_only=True):
    """What to change in a budget; at least one field."""

    hard_limits: dict[str, U64] | None = None
    soft_limits: dict[str, U64] | None = None
    reset_interval_ms: U64 | None = None
    enforcement_mode: _Mode | None = None
    on_hard_limit: _OnHardLimit | None = None
    on_soft_limit: _OnSoftLimit | None = None
    dedup_ttl_ms: U64 | None = None


def _changes(body: msgspec.Struct, identity: str) -> dict[str, Any]:
    fields = struct(body)
    del fields[identity]
    if all(value is None for value in fields.values()):
        raise invalid("body", f"must contain at least one of {', '.join(fields)}")
    return fields


@routes.put("/v1/budgets/{id}", scope="operate", answers={200: str}, errors=(404,))
async def update_budget(call: Call[UpdateBudget, NoQuery]) -> Reply:
    """Change the limits and settings of a budget."""
    call.require_all_namespaces()
    budget_id, fields = call.uuid("budget_id"), _changes(call.body, "budget_id")
    await call.backend.budgets.update_budget_limits(budget_id, budgets.BudgetChange(**fields))
    return answer("Updated")


class DeleteQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Whether executions may still wait for it."""

    force: bool = False


@routes.delete("/v1/budgets/{id}", scope="operate", answers={200: str}, errors=(404, 409))
async def delete_budget(call: Call[None, DeleteQuery]) -> Reply:
    """Delete a budget."""
    call.require_all_namespaces()
    await call.backend.budgets.delete_budget(call.uuid("budget_id"), force=call.query.force)
    return answer("Deleted")


class CreateQuota(msgspec.Struct, frozen=True, kw_only=True):
    """A quota; 0 means no limit."""

    quota_policy_id: Uuid
    window_seconds: U64
    max_requests_per_window: U64
    max_concurrent: U64
    jitter_ms: U64 | None = None


@routes.post(
    "/v1/quotas",
    scope="operate",
    answers={
        201: variants(quotas.QuotaCreated),
        200: variants(quotas.QuotaExists, optional=("differs",)),
    },
)
async def create_quota(call: Call[CreateQuota, NoQuery]) -> Reply:
    """Create a quota. An existing quota keeps its limits."""
    call.require_all_namespaces()
    fields = struct(call.body)
    fields["jitter_ms"] = call.body.jitter_ms or 0
    outcome = await call.backend.quotas.create_quota_policy(**fields)
    if isinstance(outcome, quotas.QuotaCreated):
        return answer(variant(outcome), 201)
    return answer(_existing(outcome))


@routes.get("/v1/quotas", scope="read", answers={200: Listed("quotas", quotas.QuotaStatus)})
async def list_quotas(call: Call[None, PageQuery]) -> Reply:
    """List quotas by id."""
    page = await call.backend.quotas.list_quota_policies(call.query.cursor, call.query.size)
    return answer(page_of("quotas", [struct(each) for each in page.entries], page))


@routes.get("/v1/quotas/{id}", scope="read", answers={200: quotas.QuotaStatus}, errors=(404,))
async def read_quota(call: Call[None, NoQuery]) -> Reply:
    """Read a quota and how much of it is used."""
    quota_policy_id = call.uuid("quota_policy_id")
    return answer(struct(await call.backend.quotas.get_quota_status(quota_policy_id)))


class UpdateQuota(msgspec.Struct, frozen=True, kw_only=True):
    """Which limits to change; at least one."""

    quota_policy_id: Uuid | None = None
    window_seconds: U64 | None = None
    max_requests_per_window: U64 | None = None
    max_concurrent: U64 | None = None
    jitter_ms: U64 | None = None


@routes.put("/v1/quotas/{id}", scope="operate", answers={200: str}, errors=(404,))
async def update_quota(call: Call[UpdateQuota, NoQuery]) -> Reply:
    """Change the limits of a quota."""
    call.require_all_namespaces()
    quota_policy_id = call.uuid("quota_policy_id")
    fields = _changes(call.body, "quota_policy_id")
    await call.backend.quotas.update_quota_policy(quota_policy_id, **fields)
    return answer("Updated")
