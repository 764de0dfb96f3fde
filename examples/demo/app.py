"""The application: what a shop does at the end of a month.

It needs no code for workers that die. Both handlers are ordinary functions.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import flowfabric as ff

app = ff.Fabric()

_RATES = {"EUR": 1.0, "USD": 1.09, "GBP": 0.84}


@dataclass(frozen=True)
class Order:
    """One order of a customer."""

    item: str
    quantity: int
    cents: int


@dataclass(frozen=True)
class Statement:
    """What a customer owes for a month."""

    customer: str
    orders: int
    total_cents: int


@app.task(retry=ff.Retry(3, backoff="300ms"), timeout="20s")
async def exchange_rate(ctx: ff.Context, currency: str) -> float:
    """Ask the bank, which is slow. The first attempt fails for one currency."""
    await asyncio.sleep(0.8)
    if currency == "GBP" and ctx.attempt == 1:
        raise ff.RetryableError("the bank answered 503")
    return _RATES[currency]


@app.task(timeout="20s")
def statement(ctx: ff.SyncContext, customer: str, orders: list[Order]) -> Statement:
    """Add up a customer's orders. A plain `def` with blocking calls: it runs in a thread."""
    total = 0
    for number, order in enumerate(orders, 1):
        time.sleep(0.35)
        total += order.quantity * order.cents
        ctx.progress(100 * number // len(orders), f"{number} of {len(orders)} orders")
    return Statement(customer, len(orders), total)
