"""Requests that are refused: names of the host, and tokens."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.datastructures import URL
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from boltcutter.export.serving.access import AccessMiddleware

TOKEN = "0123456789abcdef+/="


def get(path: str, host: str, token: str, url: str = "http://localhost:8000", **headers: str) -> httpx.Response:
    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse("ok")

    routes = [Route(place, answer) for place in ("/", "/model", "/health")]
    app = Starlette(routes=routes, middleware=[Middleware(AccessMiddleware, host, token)])

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url) as client:
            return await client.get(path, headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("http://localhost:8000", 200),
        ("http://LOCALHOST", 200),
        ("http://127.0.0.1:8000", 200),
        ("http://[::1]:8000", 200),
        ("http://[::1]", 200),
        ("http://evil.example:8000", 421),
        ("http://127.0.0.1.evil.example", 421),
        ("http://localhost.evil.example:8000", 421),
    ],
)
def test_a_local_server_answers_for_this_machine_only(url: str, status: int) -> None:
    for path in ("/", "/model"):
        assert get(path, "127.0.0.1", "", url).status_code == status


def test_a_token_is_needed_for_all_but_health() -> None:
    in_url = TOKEN.replace("+", "%2B")
    for path in ("/", "/model", f"/model?token={in_url}", "/?token=wrong", "/?token="):
        assert get(path, "0.0.0.0", TOKEN).status_code == 401, path
    for header in ("Bearer wrong", f"Basic {TOKEN}", "Bearer ", f"Bearer {TOKEN}x"):
        assert get("/model", "0.0.0.0", TOKEN, authorization=header).status_code == 401, header
    assert get("/model", "0.0.0.0", TOKEN, "http://any.example", authorization=f"Bearer {TOKEN}").text == "ok"
    assert get("/health", "0.0.0.0", TOKEN).text == "ok"


@pytest.mark.parametrize("host", ["localhost:8000/health?x=", "any.example/health#", "localhost:8000/?"])
def test_a_host_with_a_path_needs_the_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions of Starlette take it as a part of the URL."""
    url = property(lambda request: URL(f"http://{request.headers['host']}{request.scope['path']}"))
    monkeypatch.setattr(Request, "url", url)
    for path in ("/model", f"/model?token={TOKEN.replace('+', '%2B')}"):
        assert get(path, "0.0.0.0", TOKEN, **{"Host": host}).status_code == 401


def test_a_browser_gets_a_cookie() -> None:
    answer = get(f"/?token={TOKEN.replace('+', '%2B')}", "0.0.0.0", TOKEN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
    assert get("/model", "0.0.0.0", TOKEN, cookie=cookie.partition(";")[0]).text == "ok"
    assert get("/model", "0.0.0.0", TOKEN, cookie="boltcutter-token=wrong").status_code == 401
