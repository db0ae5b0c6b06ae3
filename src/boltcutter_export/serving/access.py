"""Who may send requests to the server: names of the host, and a token."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path
from urllib.parse import quote, unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from boltcutter.config.errors import ConfigError

COOKIE = "boltcutter-token"
OPEN = ("/health",)  # paths that need no token
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
            f"token_file={file}: expected {MIN_LENGTH} or more printable characters; openssl rand -hex 32"
        )
    return token


class AccessMiddleware:
    """Refuse requests for another host, as of a page whose domain was pointed to this machine, or without the token.

    The token is sent as ``Authorization: Bearer <token>``; a browser opens ``/?token=<token>`` once and gets a cookie.

    Args:
        app: The application.
        host: Address that the server listens on.
        token: The token; empty: none is needed.

    Source: https://fetch.spec.whatwg.org/#http-cors-protocol (what a foreign page may send without being asked).
    """

    def __init__(self, app: ASGIApp, host: str, token: str) -> None:
        self.app, self.token = app, token
        self.hosts = {"localhost", "127.0.0.1", "[::1]", host, f"[{host}]"} if is_loopback(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or answer in its place."""
        refused = self._refuse(Request(scope)) if scope["type"] == "http" else None
        await (refused or self.app)(scope, receive, send)

    def _refuse(self, request: Request) -> Response | None:
        given = request.headers.get("host", "")
        name = given.rpartition(":")[0] if not given.endswith("]") and ":" in given else given
        if self.hosts is not None and name.lower() not in self.hosts:
            return JSONResponse({"detail": f"host {given[:100]}: expected localhost"}, 421)
        if not self.token or request.url.path in OPEN:
            return None
        offered = request.query_params.get("token", "")
        if request.method == "GET" and request.url.path == "/" and self._is_token(offered):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, quote(offered), httponly=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or self._is_token(unquote(request.cookies.get(COOKIE, ""))):
            return None
        return JSONResponse({"detail": "no valid token"}, 401, {"WWW-Authenticate": "Bearer"})

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.token.encode())
