"""`flowfabric tokens`: a file of hashed tokens."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from flowfabric.cli.commands import tokens
from flowfabric.cli.errors import CliError
from flowfabric.core.errors import ConfigError
from flowfabric.server.auth import Tokens, new_token, read_tokens, write_tokens
from tests.support.command import Cli


async def test_tokens_are_created_listed_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    cli = Cli(tmp_path, FF_API_TOKENS_FILE=str(file))
    made = await cli("tokens", "create", "ci", "--scopes", "submit,read", "--namespaces", "acme")
    assert made.code == 0, made.err
    token = made.out.strip()
    caller = Tokens(path=file).identify(f"Bearer {token}".encode())
    assert caller is not None
    assert (caller.token_id, caller.scopes) == ("ci", {"read", "submit"})
    assert caller.namespaces == {"acme"}
    assert token not in file.read_text()
    twice = await cli("tokens", "create", "ci", "--scopes", "read")
    assert (twice.code, "exists" in twice.err) == (1, True)
    listed = await cli("tokens", "list", "--json")
    (row,) = listed.objects
    assert (row["id"], row["scopes"], row["namespaces"]) == ("ci", ["read", "submit"], ["acme"])
    assert "hash" not in row
    shown = await cli("tokens", "list")
    assert "ci" in shown.out
    gone = await cli("tokens", "revoke", "ci")
    assert gone.code == 0
    assert Tokens(path=file).identify(f"Bearer {token}".encode()) is None
    assert (await cli("tokens", "revoke", "ci")).code == 1


def test_a_change_keeps_who_may_read_the_file_and_follows_links(tmp_path: Path) -> None:
    """A server may read it as another user, or by another name."""
    file, link = tmp_path / "tokens.toml", tmp_path / "link.toml"
    _, stored = new_token("ci", ["read"], None)
    write_tokens(file, [])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(file, 12, 34)
    link.symlink_to(file)
    owner = file.stat().st_uid, file.stat().st_gid
    write_tokens(link, [stored])
    assert link.is_symlink()
    assert read_tokens(file) == [stored]
    after = file.stat()
    assert (stat.S_IMODE(after.st_mode), (after.st_uid, after.st_gid)) == (0o640, owner)


def test_a_file_that_becomes_readable_is_read(tmp_path: Path) -> None:
    """`chmod` leaves the time of the last change as it is."""
    file = tmp_path / "tokens.toml"
    token, stored = new_token("ci", ["read"], None)
    write_tokens(file, [stored])
    known = Tokens(path=file)
    header = f"Bearer {token}".encode()
    assert known.identify(header) is not None
    before = file.stat()
    file.write_text("")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    known._looked_at -= 1
    assert known.identify(header) is None


def test_a_deleted_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens.toml"
    token, stored = new_token("ci", ["read"], None)
    write_tokens(file, [stored])
    known = Tokens(path=file)
    file.unlink()
    known._looked_at -= 1
    assert known.identify(f"Bearer {token}".encode()) is None
    assert [each.levelname for each in caplog.records] == ["WARNING"]


def test_a_limit_is_set_shown_changed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    tokens.create("ci", scopes=["read"], rate=2.5, file=file)
    made = capsys.readouterr().out.strip()
    tokens.list_tokens(file=file)
    assert "2.5/s" in capsys.readouterr().out
    tokens.limit("ci", rate=50, burst=200, file=file)
    assert capsys.readouterr().out == "ci is limited to 50 requests per second.\n"
    tokens.list_tokens(file=file, as_json=True)
    assert '"rate_per_s":50.0,"burst":200' in capsys.readouterr().out.replace(" ", "")
    # The token itself stays as it is.
    assert Tokens(path=file).identify(f"Bearer {made}".encode()) is not None
    tokens.limit("ci", file=file)
    assert capsys.readouterr().out == "ci is not limited.\n"
    tokens.limit("ci", rate=4, file=file, as_json=True)
    limited = msgspec.json.decode(capsys.readouterr().out)
    assert (limited["id"], limited["rate_per_s"], limited["burst"]) == ("ci", 4.0, None)
    assert "hash" not in limited
    tokens.revoke("ci", file=file, as_json=True)
    assert msgspec.json.decode(capsys.readouterr().out) == {"id": "ci", "revoked": True}
    tokens.create("ci", scopes=["read"], file=file)
    with pytest.raises(ConfigError, match="rate_per_s must be above 0"):
        tokens.limit("ci", rate=0, file=file)
    with pytest.raises(CliError, match="there is no token"):
        tokens.limit("nope", rate=1, file=file)


async def test_mistakes_are_explained(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    assert "no tokens file" in (await cli("tokens", "list")).err
    bad = await cli("tokens", "create", "x", "--scopes", "root", "--file", "t")
    assert (bad.code, "there is no scope 'root'" in bad.err) == (2, True)
    odd = await cli("tokens", "create", "a b", "--scopes", "read", "--file", "t")
    assert (odd.code, "the id must be" in odd.err) == (1, True)
