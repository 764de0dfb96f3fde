"""What a forked child does about the connections and loops of its parent."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["forget_on_fork", "leave_behind"]


class _Forgetful(Protocol):
    def forget(self) -> None: ...


_forgetful: weakref.WeakSet[_Forgetful] = weakref.WeakSet()
_left_behind: list[object] = []


def forget_on_fork(holder: _Forgetful) -> None:
    """Have `holder.forget()` called in every forked child: it must drop, not close."""
    _forgetful.add(holder)


def leave_behind(*things: object) -> None:
    """Keep objects of the parent's loop alive in a forked child.

    A destructor would unregister the parent's socket from the epoll set both processes share.
    """
    _left_behind.append(things)


def _forget_parent() -> None:
    for holder in list(_forgetful):
        holder.forget()


os.register_at_fork(after_in_child=_forget_parent)
