"""Refuses requests that may not be answered, in an ASGI application."""

from __future__ import annotations

from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from boltcutter.run.remote.access import COOKIE, Access

OPEN = ("/health",)  # paths that need no token


class AccessMiddleware:
    """Answer requests in place of the application that ``Access`` refuses.

    Args:
        app: The application.
        host: Address that the server listens on.
        token: The token; empty: none is needed.
    """

    def __init__(self, app: ASGIApp, host: str, token: str) -> None:
        self.app, self.access = app, Access(host, token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or answer in its place."""
        refused = self._refuse(Request(scope)) if scope["type"] == "http" else None
        await (refused or self.app)(scope, receive, send)

    def _refuse(self, request: Request) -> Response | None:
        given, path = request.headers.get("host", ""), request.scope["path"]  # of request.url, Host may be a part
        if not self.access.is_for_us(given):
            return JSONResponse({"detail": f"host {given[:100]}: expected localhost"}, 421)
        if path in OPEN:
            return None
        offered = request.query_params.get("token", "")
        if self.access.token and path == "/" and self.access.is_token(offered):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, quote(offered), httponly=True, samesite="strict")
            return answer
        if self.access.has_token(request.headers.get("authorization", ""), request.cookies.get(COOKIE, "")):
            return None
        return JSONResponse({"detail": "no valid token"}, 401, {"WWW-Authenticate": "Bearer"})
