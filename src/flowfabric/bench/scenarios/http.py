"""Submitting over HTTP: one at a time from 32 connections, and in bulk; and 200 open tails."""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncGenerator

from flowfabric.bench.arena import Arena, timed
from flowfabric.bench.report import Figures, percentile, percentiles
from flowfabric.core.contracts.executions import NewExecution
from flowfabric.core.contracts.leases import Claim
from flowfabric.core.contracts.streams import Frame
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.api.claims import ClaimRequest

_CONNECTIONS = 32
_WARM_UP = 500
_BULK = 500
_TAILS = 200
_FRAMES = 1000
_TAILED = "tailed"
_READY_S = 30.0
_ONE = json.dumps({"namespace": "default", "execution_kind": "noop", "input_payload": [91, 93]})
Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def run(at: Arena) -> Figures:
    """Submits per second over HTTP, compared with the same batches through the engine."""
    n = at.options.n
    async with server_process(at.url) as port:
        links = [await asyncio.open_connection("127.0.0.1", port) for _ in range(_CONNECTIONS)]
        try:
            at.progress.begin("http: warm-up", _WARM_UP)
            await _submit(links, _WARM_UP)
            at.progress.begin("http: single submits", n)
            took_s, times = await timed(_submit(links, n))
            at.progress.step(n)
            at.progress.begin("http: bulk submits", n)
            bulk_s, _ = await timed(_bulk(links[:4], n))
            at.progress.step(n)
            at.progress.begin("http: frames to open tails", _FRAMES)
            lags = await _tail_lags(at, port)
            at.progress.step(_FRAMES)
        finally:
            for _, writer in links:
                writer.close()
    direct_s, _ = await timed(_direct(at, n))
    return {
        "per_s": n / took_s,
        "p50_ms": percentile(times, 50),
        "p99_ms": percentile(times, 99),
        "bulk_per_s": n / bulk_s,
        "bulk_of_engine": direct_s / bulk_s,
        **percentiles(lags, "sse_lag_"),
    }


@contextlib.asynccontextmanager
async def server_process(url: str) -> AsyncGenerator[int]:
    """`flowfabric server` in another process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    settings = {"FF_URL": url, "FF_WAITPOINT_HMAC_SECRET": secrets.token_hex(32)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "flowfabric", "server", "--listen", f"127.0.0.1:{port}"),
        "--log-level",
        "error",
        env=os.environ | settings,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        await _until_open(port)
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _until_open(port: int) -> None:
    ends_at = time.monotonic() + _READY_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if time.monotonic() > ends_at:
                raise
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


async def _send(link: Link, request: bytes) -> None:
    reader, writer = link
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if head[9:11] != b"20":
        raise RuntimeError(head.decode("latin-1").splitlines()[0])
    length = int(head.lower().split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
    await reader.readexactly(length)


async def _submit(links: list[Link], n: int) -> list[float]:
    """How long each submit took, in ms."""
    request = _request("/v1/executions", _ONE.encode())
    left = iter(range(n))
    times: list[float] = []

    async def client(link: Link) -> None:
        for _ in left:
            began = time.perf_counter()
            await _send(link, request)
            times.append((time.perf_counter() - began) * 1000)

    await asyncio.gather(*map(client, links))
    return times


async def _bulk(links: list[Link], n: int) -> None:
    request = _request("/v1/bulk/executions", f"[{','.join([_ONE] * _BULK)}]".encode())
    left = iter(range(0, n, _BULK))

    async def client(link: Link) -> None:
        for _ in left:
            await _send(link, request)

    await asyncio.gather(*map(client, links))


async def _tail_lags(at: Arena, port: int) -> list[float]:
    """The age of frames, in ms, when clients of event streams receive them."""
    ids = ExecutionId.mint_solo_many(_TAILED, at.backend.counts, _TAILS)
    await at.backend.executions.create_many(
        [NewExecution(execution_id=i, execution_kind="noop", lane_id=_TAILED) for i in ids]
    )
    request = ClaimRequest(_TAILED, worker_id="bench", worker_instance_id="bench-1")
    handles = [
        claim.handle for tag in {i.tag for i in ids} for claim in await _claimed(at, request, tag)
    ]
    lags: asyncio.Queue[float] = asyncio.Queue()
    tails = [await _opened(port, handle.execution_id) for handle in handles]
    reading = [asyncio.create_task(_read_frames(reader, lags)) for reader, _ in tails]
    found: list[float] = []
    try:
        for number in range(_FRAMES):
            sent = Frame(payload=str(time.perf_counter()).encode())
            await at.backend.streams.append_frame(handles[number % len(handles)], sent)
            found.append(await lags.get())
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for _, writer in tails:
            writer.close()
    await asyncio.gather(*map(at.backend.executions.complete, handles))
    return found


async def _claimed(at: Arena, request: ClaimRequest, tag: str) -> list[Claim]:
    found: list[Claim] = []
    while claims := (await at.backend.claims.claim_many(request, tag, 64)).claims:
        found += claims
    return found


async def _opened(port: int, execution_id: ExecutionId) -> Link:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    path = f"/v1/executions/{execution_id}/attempts/0/stream/events"
    writer.write(f"GET {path} HTTP/1.1\r\nhost: bench\r\n\r\n".encode())
    # The current state comes first.
    await reader.readuntil(b"\n\n\r\n")
    return reader, writer


async def _read_frames(reader: asyncio.StreamReader, lags: asyncio.Queue[float]) -> None:
    while True:
        line = await reader.readline()
        if line.startswith(b"data: ") and b'"payload":"' in line:
            sent_at = float(line.split(b'"payload":"', 1)[1].split(b'"', 1)[0])
            lags.put_nowait((time.perf_counter() - sent_at) * 1000)


async def _direct(at: Arena, n: int) -> None:
    """The same batches through the engine of this process."""
    for _ in range(0, n, _BULK):
        await at.backend.executions.create_many(
            [
                NewExecution(
                    execution_id=ExecutionId.solo("default", at.backend.counts),
                    execution_kind="noop",
                    input_payload=b"[]",
                )
                for _ in range(_BULK)
            ]
        )
