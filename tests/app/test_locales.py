"""An embedded Valkey in a folder whose name the encoding of the file system cannot represent."""

from __future__ import annotations

from pathlib import Path

from tests.docs.scratch import run_python, wait_for_server_end

PROGRAM = """
import asyncio
import flowfabric as ff

app = ff.Fabric()

@app.task
async def double(number: int) -> int:
    return 2 * number

async def main() -> None:
    async with app, app.worker():
        print(await (await double.submit(21)).result(timeout=20))

asyncio.run(main())
"""


def test_a_folder_beyond_ascii_in_the_c_locale(tmp_path: Path) -> None:
    folder = tmp_path / "fotos für Ada"
    folder.mkdir()
    printed = run_python(
        *(folder, "-c", PROGRAM), LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"
    )
    assert printed == "42\n"
    wait_for_server_end(folder / ".flowfabric")
