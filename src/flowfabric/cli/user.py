"""Who sits at the keyboard."""

from __future__ import annotations

import getpass

__all__ = ["user"]


def user() -> str:
    """The account's name; empty where there is none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a number that no account belongs to.
        return ""
