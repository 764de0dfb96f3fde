"""The peers' own environments, so that their packages never meet the project's."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
HOME = ROOT / ".venv-peers"


def interpreter(lock_name: str, say: Callable[[str], None]) -> Path:
    """The Python of the environment pinned by `<lock_name>.lock`; created on first use."""
    lock = HERE / f"{lock_name}.lock"
    folder = HOME / lock_name
    python = folder / "bin" / "python"
    # The stamp holds the lock's hash: a renewed lock renews the environment, an
    # interrupted install is done again.
    stamp = folder / ".installed"
    wanted = hashlib.sha256(lock.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    say(f"creating {folder.relative_to(ROOT)} from {lock.name} (once, about half a minute)")
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(str(python), *pip, "--require-hashes", "-r", str(lock))
    stamp.write_text(wanted)
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"could not install: {last}")
