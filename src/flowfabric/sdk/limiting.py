"""The client's methods for quotas."""

from typing import Any

from flowfabric.core.contracts.quotas import CreateQuotaOutcome, QuotaPage, QuotaStatus
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import invalid_input
from flowfabric.core.ids import quota_id
from flowfabric.engine.api.backend import Backend


class QuotaCalls:
    """The client's methods for quotas. A name refers to the same quota in every process."""

    backend: Backend
    namespace: str

    async def create_quota(
        self,
        quota: str,
        max_requests: int = 0,
        per: Duration = "1m",
        *,
        max_concurrent: int = 0,
        jitter: Duration = 0,
    ) -> CreateQuotaOutcome:
        """Create a quota under a name or a UUID. An existing quota is not changed.

        At most `max_requests` executions start in any span of `per`, and at most `max_concurrent`
        run at the same time; 0 means no limit. `jitter` spreads the next checks of those that wait.

        >>> await client.create_quota("openai", 500, per="1m", max_concurrent=20)
        """
        return await self.backend.quotas.create_quota_policy(
            quota_id(quota, self.namespace),
            window_seconds=whole_seconds(per),
            max_requests_per_window=max_requests,
            max_concurrent=max_concurrent,
            jitter_ms=to_ms(jitter, "jitter"),
            name="" if quota_id(quota) == quota.lower() else quota,
        )

    async def quota(self, quota: str) -> QuotaStatus:
        """A quota and how much of it is used now, or `quota_policy_not_found`.

        >>> print((await client.quota("openai")).slots_held)
        """
        return await self.backend.quotas.get_quota_status(quota_id(quota, self.namespace))

    async def quotas(self, *, after: str = "", limit: int = 100) -> QuotaPage:
        """Quotas of all namespaces, by id; `after` is the cursor of the previous page."""
        return await self.backend.quotas.list_quota_policies(after, limit)

    async def update_quota(
        self,
        quota: str,
        max_requests: int | None = None,
        per: Duration | None = None,
        *,
        max_concurrent: int | None = None,
        jitter: Duration | None = None,
    ) -> None:
        """Change limits; others stay unchanged. Waiting executions are checked at once.

        >>> await client.update_quota("openai", max_concurrent=40)
        """
        changes: dict[str, Any] = {
            "max_requests_per_window": max_requests,
            "window_seconds": None if per is None else whole_seconds(per),
            "max_concurrent": max_concurrent,
            "jitter_ms": None if jitter is None else to_ms(jitter, "jitter"),
        }
        await self.backend.quotas.update_quota_policy(quota_id(quota, self.namespace), **changes)


def whole_seconds(per: Duration) -> int:
    """The length of a window; raises `invalid_input` unless it is in whole seconds."""
    ms = to_ms(per, "per")
    if ms % 1000 or not ms:
        raise invalid_input("per", "must be one or more whole seconds")
    return ms // 1000
