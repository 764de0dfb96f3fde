"""A media pipeline: one upload, three sizes, subtitles, one page; cleanup whatever happens.

Run it with `python -m examples.media_pipeline`; it uses FF_URL, or an embedded Valkey.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import flowfabric as ff

app = ff.Fabric()


@dataclass(frozen=True)
class Video:
    """A file and its height in pixels."""

    name: str
    height: int


@app.task(lane="media")
async def probe(name: str) -> Video:
    """What was uploaded."""
    if not name.endswith(".mov"):
        raise ValueError(f"{name} is no video")
    return Video(name, 2160)


@app.task(lane="media")
async def transcode(height: int, source: Video) -> Video:
    """One size of it."""
    return Video(f"{source.name}-{height}p", min(height, source.height))


@app.task(lane="media")
async def transcribe(source: Video) -> str:
    """Subtitles."""
    return f"subtitles of {source.name}"


@app.task(lane="media")
async def publish(sizes: list[Video], subtitles: str | None) -> str:
    """The page, also without subtitles."""
    return f"{len(sizes)} sizes, {subtitles or 'no subtitles'}"


@app.task(lane="media")
async def remove_upload(name: str) -> str:
    """Runs after every end of the flow's other nodes, good or bad."""
    return f"removed {name}"


def pipeline(name: str) -> ff.FlowBuilder:
    """The graph: handles passed as arguments are its edges."""
    flow = app.flow("media", tags={"media.upload": name})
    source = flow.add(probe, name)
    sizes = flow.map(transcode, [480, 720, 1080], source.value)
    subtitles = flow.add(transcribe, source)
    page = flow.options(key="page").add(publish, ff.gather(sizes), subtitles.or_none)
    flow.options(key="cleanup", after=[page], kind="terminal").add(remove_upload, name)
    return flow


async def main() -> None:
    """One upload that works and one that does not."""
    async with app, app.worker():
        flow = await pipeline("holiday.mov").submit()
        async for change in flow.watch():
            print(f"{change.key:12} {change.state.value}")
        done = await flow.result()
        assert done == {
            "page": "3 sizes, subtitles of holiday.mov",
            "cleanup": "removed holiday.mov",
        }
        print("page:", done["page"])

        flow = await pipeline("notes.txt").submit()
        failures: list[ff.FlowFailed] = []
        try:
            await flow.result(timeout=10)
        except ff.FlowFailed as error:
            failures.append(error)
        print(failures[0])
        assert failures[0].failures["probe-1"].reason == "ValueError: notes.txt is no video"
        assert failures[0].graph.nodes["page"].state == "skipped"
        assert await flow.run("cleanup").result() == "removed notes.txt"


if __name__ == "__main__":
    asyncio.run(main())
