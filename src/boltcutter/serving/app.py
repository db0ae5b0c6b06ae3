"""The HTTP application: predictions, generated text, health, metrics and a page to try the model."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import iterate_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from boltcutter.serving.batching import Array, Batcher, OverloadedError
from boltcutter.serving.predictor import Predictor

PAGE = Path(__file__).with_name("page.html")
IMAGES = ("image/png", "image/jpeg")
NUMPY = "application/x-npy"
JSON = "application/json"
LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)  # seconds
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Limits:
    """Limits of the server.

    Args:
        max_batch: Largest number of samples that are computed together.
        max_wait: Seconds to wait for further samples before a batch that is not full.
        max_waiting: Largest number of samples that wait; further requests get status 503.
        max_samples: Largest number of samples in a request.
        max_bytes: Largest size of a request.
        max_tokens: Largest number of tokens to generate.
        max_streams: Largest number of texts that are generated at the same time.
        timeout: Seconds in which a request must arrive.
    """

    max_batch: int = 64
    max_wait: float = 0.0
    max_waiting: int = 4096
    max_samples: int = 256
    max_bytes: int = 10_000_000
    max_tokens: int = 1000
    max_streams: int = 4
    timeout: float = 10.0


class Inputs(BaseModel):
    """Samples to predict: nested lists of numbers, or an object with a value for each column of a table."""

    model_config = ConfigDict(extra="forbid")
    inputs: list[Any] = Field(min_length=1)


class Prompt(BaseModel):
    """A text to continue."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    prompt: str = Field(min_length=1)
    tokens: int = Field(default=200, ge=1)
    temperature: float = Field(default=0.8, ge=0, le=100)
    top_k: int | None = Field(default=50, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    stream: bool = True


class Metrics:
    """Metrics of the server, for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("serve_requests", "Requests by path and status", ["path", "status"], **options)
        self.seconds = Histogram(
            "serve_request_seconds", "Duration of requests", ["path"], buckets=LATENCIES, **options
        )
        self.batches = Histogram("serve_batch_size", "Samples computed together", buckets=BATCHES, **options)
        self.waiting = Gauge(
            "serve_waiting_samples", "Samples that wait or are computed", multiprocess_mode="livesum", **options
        )

    def render(self) -> bytes:
        """Return the metrics of all workers in Prometheus' text format."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


def create_app(predictor: Predictor, limits: Limits) -> FastAPI:
    """Create the application.

    Args:
        predictor: The model with its preprocessing.
        limits: Limits of requests.
    """
    metrics = Metrics()

    def compute(inputs: Array) -> Array:
        metrics.batches.observe(len(inputs))
        return predictor.predict(inputs)

    batcher = Batcher(compute, max_batch=limits.max_batch, max_wait=limits.max_wait, max_waiting=limits.max_waiting)
    streams = asyncio.Semaphore(limits.max_streams)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.stop()

    app = FastAPI(title=predictor.name, version=predictor.run, lifespan=lifespan)
    app.state.predictor = predictor

    @app.middleware("http")
    async def measure(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        began, status = time.perf_counter(), 500
        route = request.url.path if request.url.path in PATHS else "other"
        try:
            response = await call_next(request)
            status = response.status_code
            return response
        finally:
            metrics.requests.labels(route, status).inc()
            metrics.seconds.labels(route).observe(time.perf_counter() - began)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> str:
        return PAGE.read_text()

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return ok once the model is loaded."""
        return {"status": "ok"}

    @app.get("/model")
    async def model() -> dict[str, Any]:
        """Describe what the model takes and returns."""
        return predictor.describe()

    @app.get("/metrics")
    async def show_metrics() -> Response:
        """Return metrics in Prometheus' format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def predict(request: Request) -> Response:
        """Predict samples.

        The body is JSON, an image file, or an array in NumPy's npy format.
        """
        kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        body = await read_body(request, limits)
        try:
            inputs = await asyncio.to_thread(decode, predictor, kind, body, limits)
        except ValueError as error:
            raise refusal(error) from None
        metrics.waiting.inc(len(inputs))
        try:
            outputs = await batcher(inputs)
        except OverloadedError as error:
            raise HTTPException(503, f"{error}; try again later", {"Retry-After": "1"}) from None
        finally:
            metrics.waiting.dec(len(inputs))
        if not np.isfinite(outputs).all():
            raise HTTPException(422, "inputs: the predictions are not finite; give values like those in training")
        return JSONResponse({"predictions": predictor.format(outputs)})

    async def generate(request: Request) -> Response:
        """Continue a text, as server-sent events or, with ``stream=false``, as a whole."""
        try:
            asked = Prompt.model_validate(parse_json(await read_body(request, limits)))
        except ValueError as error:
            raise refusal(error) from None
        if asked.tokens > limits.max_tokens:
            raise HTTPException(422, f"tokens={asked.tokens}: at most {limits.max_tokens}")
        if streams.locked():
            busy = f"{limits.max_streams} texts are being generated; try again later"
            raise HTTPException(503, busy, {"Retry-After": "1"})
        settings: dict[str, Any] = {"temperature": asked.temperature, "top_k": asked.top_k, "seed": asked.seed}
        pieces = limited(predictor.generate(asked.prompt, asked.tokens, **settings), streams)
        if not asked.stream:
            return JSONResponse({"text": "".join([piece async for piece in pieces])})
        return StreamingResponse(events(pieces), media_type="text/event-stream")

    if predictor.form == "text":
        app.post("/generate", openapi_extra=body_of({JSON: Prompt.model_json_schema()}))(generate)
    else:
        forms: dict[str, Any] = {JSON: Inputs.model_json_schema(), NUMPY: {"type": "string", "format": "binary"}}
        if predictor.form == "image":
            forms |= dict.fromkeys(IMAGES, forms[NUMPY])
        app.post("/predict", openapi_extra=body_of(forms))(predict)
    return app


PATHS = ("/", "/health", "/model", "/metrics", "/predict", "/generate", "/docs", "/openapi.json")


def body_of(schemas: dict[str, Any]) -> dict[str, Any]:
    """Describe the body of a request by media type, for OpenAPI."""
    content = {kind: {"schema": schema} for kind, schema in schemas.items()}
    return {"requestBody": {"content": content, "required": True}}


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read the body within the limits of size and time.

    Raises:
        HTTPException: It is too large or too slow, or incomplete.
    """
    too_large = HTTPException(413, f"the request is larger than {limits.max_bytes} bytes", {"Connection": "close"})
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.max_bytes:
        raise too_large
    body = bytearray()

    async def receive() -> None:
        async for chunk in request.stream():
            body.extend(chunk)
            if len(body) > limits.max_bytes:
                raise too_large

    try:
        await asyncio.wait_for(receive(), limits.timeout)
    except ClientDisconnect:
        raise HTTPException(400, "the client has gone") from None
    except asyncio.TimeoutError:
        raise HTTPException(
            408, f"the request did not arrive within {limits.timeout:g} s", {"Connection": "close"}
        ) from None
    return bytes(body)


def decode(predictor: Predictor, kind: str, body: bytes, limits: Limits) -> Array:
    """Convert the body of a request to inputs of the model.

    Raises:
        ValueError: It cannot be converted.
        HTTPException: Its media type is not supported, or it has too many samples.
    """
    if kind in IMAGES and predictor.form == "image":
        return predictor.image(body)
    if kind == NUMPY:
        try:
            values = np.load(io.BytesIO(body), allow_pickle=False)
        except Exception as error:  # NumPy parses the header as Python, and passes on what that raises
            raise ValueError(f"not an array in npy format ({str(error)[:100]})") from None
        if not isinstance(values, np.ndarray) or values.ndim < 1 or predictor.form == "row":
            raise ValueError("expected one array of samples" if predictor.form != "row" else "rows are sent as JSON")
    elif kind == JSON:
        values = Inputs.model_validate(parse_json(body)).inputs
        if predictor.form != "row" and body.count(b'"') > 2:  # NumPy would pad all elements to the longest text
            raise ValueError("inputs: not numbers")
    else:
        expected = ", ".join((JSON, NUMPY, *(IMAGES if predictor.form == "image" else ())))
        raise HTTPException(415, f"content type {kind[:100]}: expected {expected}")
    if len(values) > limits.max_samples:
        raise HTTPException(413, f"{len(values)} samples in a request; at most {limits.max_samples}")
    if not len(values):
        raise ValueError("inputs: no samples")
    if predictor.form == "row":
        if not all(isinstance(row, dict) for row in values):
            raise ValueError("inputs: expected a list of objects with a value for each column")
        return predictor.rows(values)
    return predictor.array(values)


def parse_json(body: bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: It is invalid, or nested too deeply.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({str(error)[:100]})") from None


def refusal(error: ValueError) -> HTTPException:
    """Describe what is wrong with a request in one line."""
    text = str(error)
    if isinstance(error, ValidationError):
        text = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors()[:3])
    return HTTPException(422, text)


async def limited(pieces: Iterator[str], streams: asyncio.Semaphore) -> AsyncIterator[str]:
    """Iterate in a thread while holding one of the streams."""
    async with streams:
        async for piece in iterate_in_threadpool(pieces):
            yield piece


async def events(pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    """Send pieces of a text as server-sent events."""
    async for piece in pieces:
        yield f"data: {json.dumps({'text': piece})}\n\n"
    yield "data: [DONE]\n\n"
