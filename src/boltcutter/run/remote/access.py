"""Who may send requests to a server of this machine: its address, names of the host, and a token."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from boltcutter.config.errors import ConfigError

COOKIE = "boltcutter-token"
MIN_LENGTH = 16  # characters of a token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(host: str, file: str) -> str:
    """Read the token of the server; empty if it needs none.

    Args:
        host: Address that the server listens on.
        file: File that contains the token; empty if there is none.

    Raises:
        ConfigError: Other machines reach the server, and there is no token; or it is too short.
    """
    if not file:
        if is_loopback(host):
            return ""
        raise ConfigError(
            f"host={host}: other machines reach the server, so it needs a token; openssl rand -hex 32 > token, "
            "then token_file=token"
        )
    try:
        token = Path(file).read_text().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"token_file={file}: cannot be read ({error}); give a file with the token") from error
    if len(token) < MIN_LENGTH or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"token_file={file}: expected {MIN_LENGTH} or more printable characters; openssl rand -hex 32",
            kind="wrong_type",
        )
    return token


@dataclass(frozen=True)
class Access:
    """Refuse requests for another host, as of a page whose domain was pointed to this machine, or without the token.

    The token is sent as ``Authorization: Bearer <token>``; a browser opens ``/?token=<token>`` once and gets a cookie.

    Args:
        host: Address that the server listens on.
        token: The token; empty: none is needed.

    Source: https://fetch.spec.whatwg.org/#http-cors-protocol (what a foreign page may send without being asked).
    """

    host: str
    token: str

    def is_for_us(self, host: str) -> bool:
        """Whether the header ``Host`` names this machine; any name does, where other machines reach the server."""
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        ours = {"localhost", "127.0.0.1", "[::1]", self.host, f"[{self.host}]"}
        return not is_loopback(self.host) or name.lower() in ours

    def is_token(self, text: str) -> bool:
        """Whether a text is the token."""
        return hmac.compare_digest(text.encode(errors="replace"), self.token.encode())

    def has_token(self, authorization: str, cookie: str) -> bool:
        """Whether a header or a cookie has the token, or none is needed."""
        bearer = authorization.removeprefix("Bearer ")
        return not self.token or self.is_token(bearer) or self.is_token(unquote(cookie))


def bind(host: str, port: int) -> socket.socket:
    """Open the socket of a server.

    Raises:
        ConfigError: The address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # For a socket without the protocol's number, asyncio would leave Nagle's algorithm on: answers wait for 40 ms.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"host={host}: {error.strerror or error}; try host=127.0.0.1, or 0.0.0.0") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"host={host} port={port}: {error.strerror or error}; choose another, or port=0") from error
    return bound
