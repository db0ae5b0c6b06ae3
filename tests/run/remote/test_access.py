"""Addresses of servers, and their tokens."""

import hmac
from pathlib import Path

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.run.remote.access import Access, bind, is_loopback, read_token

TOKEN = "0123456789abcdef+/="


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False)],
)
def test_other_machines_need_a_token(host: str, local: bool, tmp_path: Path) -> None:
    assert is_loopback(host) == local
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert read_token(host, str(tmp_path / "token")) == TOKEN
    if local:
        assert read_token(host, "") == ""
    else:
        with pytest.raises(
            ConfigError, match=rf"^host={host}: .*; openssl rand -hex 32 > token, then token_file=token"
        ):
            read_token(host, "")


def test_mistakes_in_the_file_of_the_token(tmp_path: Path) -> None:
    for content in (b"", b"short", b"\xff" * 20, "é".encode() * 20, b"a\x07" * 20):
        (tmp_path / "token").write_bytes(content)
        with pytest.raises(ConfigError, match=r"^token_file=.*token: (expected 16 or more|cannot be read)"):
            read_token("0.0.0.0", str(tmp_path / "token"))
    with pytest.raises(ConfigError, match=r"cannot be read .*; give a file with the token"):
        read_token("127.0.0.1", str(tmp_path / "none"))


def test_names_of_the_host_and_the_token() -> None:
    local, remote = Access("127.0.0.1", ""), Access("0.0.0.0", TOKEN)
    assert local.is_for_us("localhost:8000")
    assert not local.is_for_us("evil.example:8000")
    assert remote.is_for_us("evil.example:8000")  # a name of this machine, for all that it knows
    assert local.has_token("", "")
    assert local.has_token("Bearer of another server", "cookie of another server")
    assert remote.has_token(f"Bearer {TOKEN}", "")
    assert remote.has_token("", TOKEN.replace("+", "%2B"))
    assert not remote.has_token("", "")
    assert not remote.has_token(f"Basic {TOKEN}", "")
    assert not remote.is_token("\udcff")


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[tuple[bytes, bytes]]()

    def compare(*both: bytes) -> bool:
        compared.append(both)  # type: ignore[arg-type]
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert not Access("0.0.0.0", TOKEN).has_token(f"Bearer {TOKEN}", TOKEN)
    assert compared == [(TOKEN.encode(), TOKEN.encode())] * 2


def test_addresses_that_cannot_be_used() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^host=127.0.0.1 port={port}: .*; choose another, or port=0$"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"^host=no.such.host.invalid: .*; try host=127.0.0.1, or 0.0.0.0$"):
        bind("no.such.host.invalid", 0)
