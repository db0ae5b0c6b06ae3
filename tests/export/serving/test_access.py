"""Who may send requests: names of the host, and tokens."""

import asyncio
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from boltcutter.config.errors import ConfigError
from boltcutter_export.serving.access import AccessMiddleware, is_loopback, read_token

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
        ("http://evil.example:8000", 421),
        ("http://127.0.0.1.evil.example", 421),
        ("http://localhost.evil.example:8000", 421),
    ],
)
def test_a_local_server_answers_for_this_machine_only(url: str, status: int) -> None:
    assert get("/model", "127.0.0.1", "", url).status_code == status


def test_a_token_is_needed_for_all_but_health() -> None:
    for path in ("/", "/model", "/model?token=" + TOKEN, "/?token=wrong", "/?token="):
        assert get(path, "0.0.0.0", TOKEN).status_code == 401, path
    for header in ("Bearer wrong", f"Basic {TOKEN}", "Bearer ", f"Bearer {TOKEN}x"):
        assert get("/model", "0.0.0.0", TOKEN, authorization=header).status_code == 401, header
    assert get("/model", "0.0.0.0", TOKEN, "http://any.example", authorization=f"Bearer {TOKEN}").text == "ok"
    assert get("/health", "0.0.0.0", TOKEN).text == "ok"


def test_a_browser_gets_a_cookie() -> None:
    answer = get(f"/?token={TOKEN.replace('+', '%2B')}", "0.0.0.0", TOKEN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
    assert get("/model", "0.0.0.0", TOKEN, cookie=cookie.partition(";")[0]).text == "ok"
    assert get("/model", "0.0.0.0", TOKEN, cookie="boltcutter-token=wrong").status_code == 401


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
    for content in (b"", b"short", b"\xff" * 20, "é".encode() * 20):
        (tmp_path / "token").write_bytes(content)
        with pytest.raises(ConfigError, match=r"^token_file=.*token: (expected 16 or more|cannot be read)"):
            read_token("0.0.0.0", str(tmp_path / "token"))
    with pytest.raises(ConfigError, match=r"cannot be read .*; give a file with the token"):
        read_token("127.0.0.1", str(tmp_path / "none"))
