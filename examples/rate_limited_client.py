"""Two workers share the limits of an API: five calls per second, two at the same time.

Run it with `python -m examples.rate_limited_client`; it uses FF_URL, or an embedded Valkey.
"""

from __future__ import annotations

import asyncio
import time

import flowfabric as ff

app = ff.Fabric()
QUOTA, CALLS = "weather-api", 12
PER_SECOND, AT_ONCE = 5, 2


class WeatherApi:
    """An API that records when it was called and how many calls it served at the same time."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.busy = 0
        self.busiest = 0

    async def forecast(self, city: str) -> str:
        """Answer after a while."""
        self.calls.append(time.monotonic())
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        await asyncio.sleep(0.05)
        self.busy -= 1
        return f"{city}: sunny"


api = WeatherApi()


@app.task(quota=QUOTA)
async def forecast(city: str) -> str:
    """Call the API. The quota decides when this starts."""
    return await api.forecast(city)


def most_per_second(calls: list[float]) -> int:
    """The most calls within any second."""
    return max(sum(start <= call < start + 1 for call in calls) for start in calls)


async def main() -> None:
    """Submit everything at once; the quota spreads it over time."""
    async with app, app.worker(), app.worker():
        client = await app.client()
        await client.create_quota(QUOTA, PER_SECOND, per="1s", max_concurrent=AT_ONCE)
        runs = await forecast.submit_many([[f"city {number}"] for number in range(CALLS)])
        await asyncio.sleep(0.3)
        status = await client.quota(QUOTA)
        print(f"after 0.3 s: {status.window_count} of {PER_SECOND} calls of this second used")

        answers = [await run.result(timeout=30) for run in runs]
        took = api.calls[-1] - api.calls[0]
        print(f"{len(answers)} answers, {took:.1f} s between the first call and the last")
        print(f"at most {most_per_second(api.calls)} calls per second")
        print(f"at most {api.busiest} calls at the same time")
        assert api.busiest <= AT_ONCE
        assert took >= (CALLS - 1) // PER_SECOND * 0.9
        # A handler starts shortly after its admission, so a call may fall into the next second.
        assert most_per_second(api.calls) <= PER_SECOND + AT_ONCE


if __name__ == "__main__":
    asyncio.run(main())
