"""The ACL users that docs/how-to/deploy-on-valkey.md recommends."""

from __future__ import annotations

from tests.docs.markdown import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "deploy-on-valkey.md"
PASSWORD = "change-me"


def documented_users() -> dict[str, list[str]]:
    """The users by name, each as the words of its ACL SETUSER command."""
    texts = [b.text.replace("\\\n", " ") for b in blocks(PAGE) if "ACL SETUSER" in b.text]
    return {words[2]: words for words in map(str.split, texts)}


def login(url: str, user: str) -> str:
    """The address with the user's credentials."""
    scheme, _, hosts = url.partition("://")
    return f"{scheme}://{user}:{PASSWORD}@{hosts}"
