"""Forked processes: a child must not touch the connections and loops of its parent."""

import logging
import os
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol

log = logging.getLogger(__name__)


class _Forgetful(Protocol):
    def forget(self) -> None: ...


_forgetful: weakref.WeakSet[_Forgetful] = weakref.WeakSet()
_left_behind: list[object] = []
_generation = 0


def forget_on_fork(holder: _Forgetful) -> None:
    """Call `holder.forget()` in every forked child. It must drop connections, not close them."""
    _forgetful.add(holder)


def leave_behind(*things: object) -> None:
    """Keep objects of the parent's loop alive in a forked child.

    A destructor would unregister the parent's socket from the epoll set both processes share.
    """
    _left_behind.append(things)


def generation() -> int:
    """A number that differs in every forked child."""
    return _generation


def end_child(error: BaseException | None) -> NoReturn:
    """Exit a process that was forked inside a handler and returned from it."""
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    log.warning(
        "A process that a task forked left the task's handler; it exits with status %d. "
        "End such a process with os._exit().",
        code,
        exc_info=None if isinstance(error, SystemExit) else error,
        extra={"action": "forked_process_ended"},
    )
    logging.shutdown()
    # Skip the exit handlers: they belong to the parent.
    os._exit(code)


def _forget_parent() -> None:
    global _generation  # noqa: PLW0603
    _generation += 1
    for holder in list(_forgetful):
        holder.forget()


def at_fork(**hooks: Callable[[], object]) -> None:
    """`os.register_at_fork`, or nothing on Windows, which has no fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**hooks)


at_fork(after_in_child=_forget_parent)
