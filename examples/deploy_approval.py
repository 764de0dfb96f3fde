"""A deployment that waits for two people: build with a live log, approval, release.

Run it with `python -m examples.deploy_approval`; it uses FF_URL, or an embedded Valkey. It also
simulates the approvers, and exits with an error if a promise is broken.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import NoReturn

import flowfabric as ff
from flowfabric.core.contracts.suspension import SignalOutcome

app = ff.Fabric()
began = time.monotonic()
artefacts: dict[str, str] = {}
"""Represents the registry that stores builds."""
builds: list[str] = []

TWO_PEOPLE = ff.Count(
    n=2,
    waitpoints=("release",),
    count_kind=ff.CountKind.DISTINCT_OPERATORS,
    signal_name="approved",
)


@app.task(lane="deploys")
async def deploy(ctx: ff.Context, version: str, patience: float) -> str:
    """Build, wait for two people, release.

    While it waits, it occupies no worker. When the wait is over, it starts again from its first
    line: it finds the build that exists, and the wait returns the answers at once.
    """
    if version not in artefacts:
        artefacts[version] = await build(ctx, version)
    try:
        approvals: list[ff.Signal] = await ctx.wait_condition(
            TWO_PEOPLE, timeout=patience, prompt=f"Release {version}?"
        )
    except ff.WaitTimeout:
        await ctx.stream(f"nobody released {version} in time\n", "stderr")
        return f"{version} was not released"
    people = " and ".join(signal.source_identity for signal in approvals)
    await ctx.stream(f"releasing {artefacts[version]}, approved by {people}\n", "stdout")
    return f"{version} is live, released by {people}"


async def build(ctx: ff.Context, version: str) -> str:
    """Build, and write a log that others can follow."""
    builds.append(version)
    for step in ("fetch", "compile", "test", "pack"):
        await ctx.stream(f"{version}: {step} …\n", "stdout")
        await asyncio.sleep(0.1)
    return f"shop-{version}.tar"


# --- the approvers ----------------------------------------------------------------------------


def say(text: str) -> None:
    """Print one line with the time."""
    print(f"{time.monotonic() - began:5.1f} s  {text}", flush=True)


def broken(promise: str) -> NoReturn:
    """Exit with an error."""
    sys.exit(f"broken promise: {promise}")


def promised(promise: str, kept: bool) -> None:  # noqa: FBT001 - reads as a sentence
    """Print a promise that was kept, or exit with an error."""
    if not kept:
        broken(promise)
    say(f"✓ {promise}")


async def watch(run: ff.Run[str]) -> str:
    """Print the log as it is written, until the execution has ended; returns all of it."""
    text = ""
    async for frame in run.stream():
        line = frame.text
        text += line
        say(f"  │ {line.rstrip()}")
    return text


def effect(outcome: SignalOutcome) -> str:
    """The effect of an answer."""
    return outcome.effect if outcome.kind == "accepted" else outcome.kind


async def forged(client: ff.Client, run: ff.Run[str]) -> str:
    """Try a forged token; returns the engine's answer."""
    (waitpoint,) = (await client.list_pending_waitpoints(run.id)).entries
    token = f"{waitpoint.token_kid}:{'0' * 40}"
    try:
        await client.deliver_signal(run.id, waitpoint.waitpoint_id, token, "approved")
    except ff.EngineError as error:
        return error.code
    return "accepted"


async def released(client: ff.Client) -> None:
    """Two people approve."""
    run = await app.submit(deploy, "2.4.1", 60.0)
    log = asyncio.create_task(watch(run))
    wait = await run.wait_until_suspended(timeout=20)
    say(f"deploy asks two people: {wait.prompt}")
    say(f"they answer with: flowfabric approve {run.id.uuid[:8]}")
    promised("a forged token is refused", await forged(client, run) == "invalid_token")
    first = await client.approve(run.id, "release", by="ada")
    promised("one approval is not enough", effect(first) == "appended_to_waitpoint")
    again = await client.approve(run.id, "release", by="ada")
    promised("ada's second click changes nothing", effect(again) == "duplicate")
    more = await run.signal("release", "approved", by="bob")
    ignored = "signal_ignored_matcher_failed"
    promised("a token holder who claims to be bob does not count", effect(more) == ignored)
    promised("the deployment still waits", await run.state() == "suspended")
    second = await client.approve(run.id, "release", by="bob")
    answered = time.monotonic()
    promised("bob's approval resumes it", effect(second) == "resume_condition_satisfied")
    result = await run.result(timeout=20)
    say(f"{result} ({(time.monotonic() - answered) * 1000:.0f} ms after the approval)")
    promised("the result names both", result == "2.4.1 is live, released by ada and bob")
    promised("the whole log was seen live", (await log).count("\n") == 5)


async def left_alone() -> None:
    """Nobody approves."""
    run = await app.submit(deploy, "2.5.0", 1.0)
    log = asyncio.create_task(watch(run))
    await run.wait_until_suspended(timeout=20)
    say("deploy waits one second for two people, and nobody answers")
    result = await run.result(timeout=20)
    promised("after the timeout the handler continues", result == "2.5.0 was not released")
    promised("its log says that nobody answered", "nobody released 2.5.0" in await log)


async def main() -> None:
    """Run both deployments."""
    async with app, app.worker():
        await released(await app.client())
        await left_alone()
    promised("each version was built once", builds == ["2.4.1", "2.5.0"])


if __name__ == "__main__":
    asyncio.run(main())
