import asyncio
import io
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from conftest import Script
from PIL import Image
from uvicorn.server import ServerState

from boltcutter.assembly.overrides import load_evaluation_config
from boltcutter.config.errors import ConfigError
from boltcutter.export.serving import server
from boltcutter.export.serving.app import NUMPY
from boltcutter.export.serving.server import read_settings
from boltcutter.project import Project
from boltcutter.run.remote.access import bind

from .conftest import Serve, Served

GENERATE = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
LIMITS = ["max_bytes=20000", "max_samples=8", "timeout=1.5", "max_batch=4"]


@pytest.fixture(scope="module")
def digits(serve: Serve, trained: Path) -> Served:
    return serve(trained, *LIMITS)


@pytest.fixture(scope="module")
def text(serve: Serve, text_run: Path) -> Served:
    return serve(text_run, "max_tokens=100000", "max_streams=1", "max_total_bytes=30000")


def npy(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=20)


def receive(client: socket.socket) -> bytes:
    received = b""
    while part := client.recv(4096):
        received += part
    return received


def images(count: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)


@pytest.mark.slow
def test_all_media_types_give_the_same_predictions(digits: Served) -> None:
    pixels = images(6)  # more than a batch
    file = io.BytesIO()
    Image.fromarray(pixels[0, 0]).save(file, "PNG")
    whole = digits.post("/predict", {"inputs": pixels.tolist()}).json()["predictions"]
    assert len(whole) == 6
    for part in (
        digits.post("/predict", npy(pixels), NUMPY).json()["predictions"],
        digits.post("/predict", file.getvalue(), "image/png").json()["predictions"] + whole[1:],
    ):
        for one, other in zip(part, whole, strict=True):
            assert one["class"] == other["class"]
            assert np.allclose(list(one["probabilities"].values()), list(other["probabilities"].values()), atol=1e-5)


@pytest.mark.slow
def test_concurrent_requests_are_computed_together(serve: Serve, trained: Path) -> None:
    served = serve(trained, "max_wait=0.2")
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: served.post("/predict", {"inputs": images(1).tolist()}), range(8)))
    assert {response.status_code for response in done} == {200}
    assert served.metric("serve_batch_size_sum") == 8
    assert served.metric("serve_batch_size_count") <= 4


def test_the_api_describes_itself(digits: Served, text: Served) -> None:
    paths = httpx.get(digits.url + "/openapi.json").json()["paths"]
    assert {"/predict", "/health", "/model", "/metrics"} <= paths.keys()
    assert "image/png" in paths["/predict"]["post"]["requestBody"]["content"]
    assert "/generate" in httpx.get(text.url + "/openapi.json").json()["paths"]
    assert httpx.get(digits.url + "/nowhere").status_code == 404
    assert httpx.get(digits.url + "/predict").status_code == 405


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b"x" * 20001, "application/json", 413, "the request is larger than 20000 bytes"),
        (npy(images(9)), NUMPY, 413, "9 samples in a request; at most 8"),
        (b"{}", "", 415, "content type : expected application/json"),
        (b"hello", "text/plain", 415, "content type text/plain: expected application/json"),
        (b"{", "application/json", 422, "body: Invalid JSON"),
        (b'{"inputs": ["\\ud800"]}', "application/json", 422, "body: Invalid JSON"),
        (b"[" * 15000, "application/json", 422, "body: Invalid JSON"),
        (b'{"inputs": []}', "application/json", 422, "inputs: List should have at least 1 item"),
        (b'{"inputs": [1], "more": 1}', "application/json", 422, "more: Extra inputs are not permitted"),
        (npy(np.array([object()], object)), NUMPY, 422, "not an array in npy format"),
        (npy(np.ones((1, 8, 8))), NUMPY, 422, "inputs: shape [1, 8, 8], expected [N, 1, 8, 8]"),
        (b"\x89PNG broken", "image/png", 422, "the image: not a valid PNG or JPEG image"),
        (b'{"inputs": [1], "\\ud800": 1}', "application/json", 422, "body: Invalid JSON"),
        (
            b'{"inputs": [["' + b"a" * 9000 + b'"' + b", 1" * 3000 + b"]]}",
            "application/json",
            422,
            "inputs: not numbers",
        ),
        (npy(np.full((1, 1, 8, 8), 3e38, np.float32)), NUMPY, 422, "inputs: the predictions are not finite"),
    ],
)
def test_mistakes_have_a_reason(digits: Served, body: bytes, kind: str, status: int, message: str) -> None:
    response = digits.post("/predict", body, kind)
    assert response.status_code == status
    assert response.json()["detail"].startswith(message)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_requests_never_fail_the_server(digits: Served, count: int) -> None:
    draw = random.Random(0)
    valid: dict[str, bytes] = {
        "application/json": json.dumps({"inputs": images(1).tolist()}).encode(),
        NUMPY: npy(images(1)),
    }
    file = io.BytesIO()
    Image.fromarray(images(1)[0, 0]).save(file, "PNG")
    valid["image/png"] = file.getvalue()

    def value(depth: int = 0) -> Any:
        kinds = [None, True, -1, 1e308, float("nan"), 10**400, "text", "\ud800", [], {}]
        if depth < 4 and draw.random() < 0.6:
            parts = [value(depth + 1) for _ in range(draw.randrange(4))]
            return parts if draw.random() < 0.6 else {str(number): part for number, part in enumerate(parts)}
        return draw.choice(kinds)

    counts = dict.fromkeys(range(200, 600), 0)
    with httpx.Client(base_url=digits.url, timeout=60) as client:
        for number in range(count):
            kind = draw.choice([*valid, "text/plain", "", "application/json; charset=utf-16", "image/jpeg"])
            body = bytearray(valid.get(kind, b"x" * draw.randrange(30000)))
            if number % 3 == 0:
                body = bytearray(json.dumps({"inputs": value()} if draw.random() < 0.7 else value()).encode())
            else:
                for _ in range(draw.randrange(20)):
                    if body:
                        place = draw.randrange(len(body))
                        body[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
            response = client.post("/predict", content=bytes(body), headers={"content-type": kind})
            counts[response.status_code] += 1
            assert response.status_code < 500, (kind, bytes(body), response.text)
    assert counts[200]  # some stay valid
    assert counts[422] >= count / 4
    assert digits.process.poll() is None
    assert httpx.get(digits.url + "/health").json() == {"status": "ok"}


def test_slow_clients_are_disconnected(digits: Served) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    for sent in (b"", b"POST /predict HT", head + b"{"):
        with connect(digits) as client:
            began = time.monotonic()
            client.sendall(sent)
            assert not receive(client)
            assert 1 <= time.monotonic() - began < 10
    assert digits.post("/predict", {"inputs": images(1).tolist()}).status_code == 200


@pytest.mark.parametrize("encoding", [b"", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"])
def test_heads_are_limited_in_size(digits: Served, encoding: bytes) -> None:
    with connect(digits) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\n" + encoding)
        with pytest.raises(ConnectionError):
            client.sendall((b"a: " + b"b" * 996 + b"\r\n") * 20000)
    assert digits.post("/predict", {"inputs": images(1).tolist()}).status_code == 200


@pytest.mark.slow
def test_a_request_that_is_too_large_is_read_after_its_answer(digits: Served) -> None:
    with connect(digits) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000000\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):  # head and body may arrive separately
            received = client.recv(4096)
            assert received, answer
            answer += received
        assert answer.startswith(b"HTTP/1.1 413")
        client.sendall(b"a" * 5000000 + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers = receive(client)  # until it is closed as idle
        assert answers.startswith(b"HTTP/1.1 200")
        assert answers.count(b"HTTP/1.1") == 1
    with connect(digits) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50000\r\n\r\n")
        answers = receive(client)
        assert answers.startswith(b"HTTP/1.1 413")
        assert answers.count(b"HTTP/1.1") == 1  # it is closed, as the body does not arrive


def test_all_requests_together_are_limited_in_size(text: Served) -> None:
    with connect(text) as client:
        client.sendall(GENERATE % 20001 + b"a" * 20000)
        refused = wait_for(lambda: text.post("/generate", {"prompt": "a" * 20000, "tokens": 1}), 503)
        assert "larger than 30000 bytes" in refused.json()["detail"]
    wait_for(lambda: text.post("/generate", {"prompt": "a" * 20000, "tokens": 1}), 200)


@pytest.mark.slow
def test_rows_and_their_mistakes(serve: Serve, diabetes_run: Path) -> None:
    served = serve(diabetes_run)
    columns = httpx.get(served.url + "/model").json()["columns"]
    row = dict.fromkeys(columns, 1.0)
    (found,) = served.post("/predict", {"inputs": [row]}).json()["predictions"]
    assert len(found["values"]) == 1
    assert served.post("/predict", {"inputs": [row | {"age": "old"}]}).json()["detail"].startswith("inputs: column age")
    for large in (1e308, 10**400):
        assert served.post("/predict", {"inputs": [row | {"age": large}]}).status_code == 422
    assert served.post("/predict", {"inputs": [1]}).status_code == 422
    assert served.post("/predict", npy(np.ones((1, 10))), NUMPY).status_code == 422


def test_texts_are_streamed(text: Served) -> None:
    asked = {"prompt": "Grüße", "tokens": 60, "seed": 3}
    with httpx.stream("POST", text.url + "/generate", json=asked, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    streamed = "".join(json.loads(line.removeprefix("data: "))["text"] for line in lines[:-1])
    assert len(lines) > 5
    assert streamed
    assert text.post("/generate", asked | {"temperature": 1e-300}).status_code == 200
    for change, message in (
        ({"tokens": 100001}, "tokens=100001: at most 100000"),
        ({"tokens": 0}, "tokens: Input should be greater than or equal to 1"),
        ({"prompt": ""}, "prompt: String should have at least 1 character"),
        ({"temperature": -1}, "temperature: Input should be greater"),
        ({"top_k": 0}, "top_k: Input should be greater"),
    ):
        response = text.post("/generate", asked | change)
        assert response.status_code == 422
        assert response.json()["detail"].startswith(message)


def test_more_texts_than_allowed_are_refused(text: Served) -> None:
    asked = {"prompt": "a", "tokens": 100000}
    with httpx.stream("POST", text.url + "/generate", json=asked, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        refused = text.post("/generate", {"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    short = {"prompt": "a", "tokens": 1}
    wait_for(lambda: text.post("/generate", short), 200)  # the client has gone
    body = json.dumps(asked).encode()
    with connect(text) as client:
        client.sendall(GENERATE % len(body) + body)
        wait_for(lambda: text.post("/generate", short), 503)
    wait_for(lambda: text.post("/generate", short), 200)


def wait_for(ask: Callable[[], httpx.Response], status: int) -> httpx.Response:
    end = time.monotonic() + 20
    while (response := ask()).status_code != status:
        assert time.monotonic() < end, response.text
        time.sleep(0.05)
    return response


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_completes_what_has_begun(serve: Serve, trained: Path, workers: int) -> None:
    served = serve(trained, "max_wait=1", f"workers={workers}")
    answers: list[int] = []

    def ask() -> None:
        answers.append(served.post("/predict", {"inputs": images(1).tolist()}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)  # within the wait for further samples
    served.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(30)
    assert answers == [200] * 4
    assert served.process.wait(30) in (0, -signal.SIGTERM, 128 + signal.SIGTERM), served.log.read_text()
    assert "Traceback" not in served.log.read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url + "/health")


@pytest.mark.slow
def test_workers_share_a_port_and_their_metrics(serve: Serve, trained: Path) -> None:
    served = serve(trained, "workers=2")
    before = served.metric("serve_requests_total")
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: served.post("/predict", {"inputs": images(1).tolist()}), range(40)))
    assert [response.status_code for response in done] == [200] * 40
    assert served.metric("serve_requests_total") >= before + 40


@pytest.mark.slow
def test_a_worker_that_was_killed_is_replaced(serve: Serve, trained: Path) -> None:
    served = serve(trained, "workers=2", "max_wait=60")
    with connect(served) as client:
        body = npy(images(1))
        head = (
            f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {NUMPY}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        end = time.monotonic() + 60
        workers = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
        for worker in workers:
            if b"spawn_main" in Path(f"/proc/{worker}/cmdline").read_bytes():
                assert b"OMP_WAIT_POLICY=PASSIVE" in Path(f"/proc/{worker}/environ").read_bytes()
                os.kill(int(worker), signal.SIGKILL)
    requests = 0.0
    while not requests:
        assert time.monotonic() < end + 60
        with suppress(httpx.TransportError):
            requests = served.metric("serve_requests_total")
    assert served.metric("serve_requests_total") > 0  # of the workers that were killed, too


@pytest.mark.slow
def test_what_takes_longer_than_drain_is_cancelled(serve: Serve, text_run: Path) -> None:
    served = serve(text_run, "max_tokens=1000000", "drain=1")
    asked = {"prompt": "a", "tokens": 1000000}
    with httpx.stream("POST", served.url + "/generate", json=asked, timeout=60) as response:
        assert next(response.iter_lines()).startswith("data: ")
        served.process.send_signal(signal.SIGTERM)
        served.process.wait(30)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["port=70000"], "port=70000 is not a port; try port=8000, or port=0 for a free one"),
        (["workers=0"], "workers=0 is not a valid number; try workers=1"),
        (["timeout=soon"], "timeout=soon is not a valid number; try timeout=10.0"),
        (["host=0.0.0.0"], "host=0.0.0.0: other machines reach the server, so it needs a token; openssl rand -hex 32"),
        (["host=192.0.2.77", "token_file=none"], "token_file=none: cannot be read"),
        (["ckpt=none"], "ckpt=none"),
        (["export=none"], "export=none: not an export of the run"),
        (["export=onnx", "ckpt=last"], "export=onnx: used in place of a checkpoint; remove ckpt=last"),
    ],
)
def test_mistakes_of_the_command(script: Script, trained: Path, overrides: list[str], message: str) -> None:
    done = script("serve", f"run={trained}", *overrides)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"^host=192\.0\.2\.77 port=8000: Cannot assign .*; choose another"):
        bind("192.0.2.77", 8000)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["images", "lists", "numbers"])
def test_many_clients_take_little_memory(serve: Serve, trained: Path, what: str) -> None:
    """Small requests whose values take a thousand times their bytes, 64 at once."""
    served = serve(trained, "timeout=120")
    file = io.BytesIO()
    Image.fromarray(np.zeros((4000, 4000), np.uint16)).save(file, "PNG")
    body, kind, status = {
        "images": (file.getvalue(), "image/png", 200),
        "lists": (b'{"inputs": [' + b"[]," * 3_000_000 + b"[]]}", "application/json", 422),
        "numbers": (b'{"inputs": [' + b"1.5," * 2_000_000 + b"1]}", "application/json", 413),
    }[what]
    before = peak_memory(served.process.pid)
    with ThreadPoolExecutor(64) as pool:
        answers = list(
            pool.map(
                lambda _: (
                    httpx.post(
                        f"{served.url}/predict", content=body, headers={"content-type": kind}, timeout=200
                    ).status_code
                ),
                range(64),
            )
        )
    assert set(answers) <= {status, 503}
    assert status in answers
    assert peak_memory(served.process.pid) - before < 700


def peak_memory(pid: int) -> float:
    """Largest resident memory of a process so far, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM"))


def test_answers_do_not_wait_for_acknowledgements() -> None:
    async def connect() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bind("127.0.0.1", 0) as bound:
            async with await asyncio.start_server(accept, sock=bound):
                with socket.create_connection(bound.getsockname()):
                    return await found

    assert asyncio.run(connect())


def test_a_port_in_use(script: Script, trained: Path, digits: Served) -> None:
    done = script("serve", f"run={trained}", f"port={digits.url.rpartition(':')[2]}")
    assert done.returncode == 2
    assert "Address already in use; choose another, or port=0" in done.stderr


@pytest.mark.parametrize(("given", "expected"), [([], [0, 1, 0]), (["trainer.devices=[1]"], [1, 1, 1])])
def test_workers_are_spread_over_gpus_which_their_parent_does_not_use(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], expected: list[int]
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(server, "create", lambda cfg, folder, settings: loaded.append(cfg.trainer))
    monkeypatch.setattr(server, "Multiprocess", lambda config, sockets: SimpleNamespace(run=lambda: None))
    monkeypatch.setattr(server, "device_type", lambda accelerator: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setenv(server.VARIABLE, "")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    project = Project.find(__file__)
    cfg, folder = load_evaluation_config(project, {"run": str(trained)}, given)
    settings = read_settings({"workers": "3"}) | {"root": str(project.root), "run": str(trained), "rest": given}
    with bind("127.0.0.1", 0) as bound:
        server.serve(cfg, folder, settings, bound)
    assert loaded.pop()["accelerator"] == "cpu"
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for _ in expected:
        server.worker()
    assert [[*trainer["devices"]] for trainer in loaded] == [[device] for device in expected]
    assert {trainer["accelerator"] for trainer in loaded} == {"auto"}


def test_connections_without_a_request_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def answer() -> bytes:
        config = uvicorn.Config(app, lifespan="off")
        config.load()
        options: dict[str, Any] = {"config": config, "server_state": ServerState(), "app_state": {}, "timeout": 60}
        listening = await asyncio.get_running_loop().create_server(
            lambda: server.LimitedProtocol(**options), "127.0.0.1", 0
        )
        port = listening.sockets[0].getsockname()[1]
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = await asyncio.wait_for(reader.read(12), 10)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(held[0][0].read(1), 10) == b""  # the oldest was closed
        listening.close()
        for _, each in (*held, (reader, writer)):
            each.close()
        await asyncio.sleep(0.05)
        return received

    assert asyncio.run(answer()) == b"HTTP/1.1 204"
