"""A media pipeline: one upload, three sizes, subtitles and a page. The cleanup always runs.

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
    """Read the properties of the upload."""
    if not name.endswith(".mov"):
        raise ValueError(f"{name} is not a video")
    return Video(name, 2160)


@app.task(lane="media")
async def transcode(height: int, source: Video) -> Video:
    """Produce one size of the video."""
    return Video(f"{source.name}-{height}p", min(height, source.height))


@app.task(lane="media")
async def transcribe(source: Video) -> str:
    """Produce the subtitles."""
    return f"subtitles of {source.name}"


@app.task(lane="media")
async def publish(sizes: list[Video], subtitles: str | None) -> str:
    """Publish the page, with or without subtitles."""
    return f"{len(sizes)} sizes, {subtitles or 'no subtitles'}"


@app.task(lane="media")
async def remove_upload(name: str) -> str:
    """Remove the upload, whether the page was published or not."""
    return f"removed {name}"


def pipeline(name: str) -> ff.FlowBuilder:
    """Build the graph. A node passed as an argument makes an edge."""
    flow = app.flow("media", tags={"media.upload": name})
    source = flow.add(probe, name)
    sizes = flow.map(transcode, [480, 720, 1080], source.value)
    subtitles = flow.add(transcribe, source)
    page = flow.options(key="page").add(publish, ff.gather(sizes), subtitles.or_none)
    flow.options(key="cleanup", after=[page], kind="terminal").add(remove_upload, name)
    return flow


async def main() -> None:
    """Run the pipeline for a video, and for a file that is not a video."""
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
        assert failures[0].failures["probe-1"].reason == "ValueError: notes.txt is not a video"
        assert failures[0].graph.nodes["page"].state == "skipped"
        assert await flow.run("cleanup").result() == "removed notes.txt"


if __name__ == "__main__":
    asyncio.run(main())
