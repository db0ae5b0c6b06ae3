"""The HTTP application: predictions, generated text, health, metrics and a page to try the model."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from boltcutter.config.errors import one_line
from boltcutter.export.serving.access import AccessMiddleware
from boltcutter.export.serving.batching import Batcher, OverloadedError, Samples
from boltcutter.export.serving.predictor import Predictor
from boltcutter.report.template import load_template

PAGE = Path(__file__).with_name("page.html")
IMAGES = ("image/png", "image/jpeg")
NUMPY = "application/x-npy"
JSON = "application/json"
LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)  # seconds
SMALL = 1 << 16  # bytes that are converted faster than a thread takes over
MAX_DECODED = 2  # requests whose bodies are decoded at the same time: the values may take many times their bytes
MAX_LISTS = 1 << 18  # of JSON, each of which takes 64 bytes
Body = TypeVar("Body", bound=BaseModel)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Limits:
    """Largest numbers that the server admits."""

    max_batch: int = 64  # samples that are computed together
    max_wait: float = 0.0  # seconds for further samples before a batch that is not full
    max_waiting: int = 4096  # samples that wait; further requests get status 503
    max_samples: int = 256  # of a request
    max_bytes: int = 10_000_000  # of a request
    max_total_bytes: int = 256_000_000  # of all requests at the same time; further ones get status 503
    max_tokens: int = 1000  # to generate
    max_streams: int = 4  # texts that are generated at the same time
    timeout: float = 10.0  # seconds in which a request must arrive


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

    def render(self) -> bytes:
        """Return the metrics of all workers in Prometheus' text format."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class Service:
    """What the paths of the server return."""

    def __init__(self, predictor: Predictor, limits: Limits) -> None:
        self.predictor, self.limits, self.metrics = predictor, limits, Metrics()
        self.html = load_template(PAGE).render(data=predictor.describe())
        self.batcher = Batcher(
            self._compute, max_batch=limits.max_batch, max_wait=limits.max_wait, max_waiting=limits.max_waiting
        )
        self.streams = asyncio.Semaphore(limits.max_streams)
        self.decoders = asyncio.Semaphore(MAX_DECODED)
        self.total_bytes = 0
        self.routes = [Route("/", self.page), Route("/health", self.health), Route("/model", self.model)]
        self.routes += [Route("/metrics", self.show_metrics), Route("/openapi.json", self.openapi)]
        if predictor.form == "text":
            self.routes.append(Route("/generate", self.generate, methods=["POST"]))
            self.bodies: dict[str, Any] = {JSON: Prompt.model_json_schema()}
        else:
            self.routes.append(Route("/predict", self.predict, methods=["POST"]))
            file = {"type": "string", "format": "binary"}
            kinds = (() if predictor.form == "row" else (NUMPY,)) + (IMAGES if predictor.form == "image" else ())
            self.bodies = {JSON: Inputs.model_json_schema()} | dict.fromkeys(kinds, file)

    def _compute(self, inputs: Samples) -> Any:
        self.metrics.batches.observe(len(inputs))
        return self.predictor.predict(inputs)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Compute batches as long as the server runs."""
        self.batcher.start()
        yield
        await self.batcher.stop()

    async def page(self, request: Request) -> Response:
        """A page to try the model."""
        return HTMLResponse(self.html)

    async def health(self, request: Request) -> Response:
        """Return ok once the model is loaded."""
        return JSONResponse({"status": "ok"})

    async def model(self, request: Request) -> Response:
        """Describe what the model takes and returns."""
        return JSONResponse(self.predictor.describe())

    async def show_metrics(self, request: Request) -> Response:
        """Return metrics in Prometheus' format."""
        return Response(self.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(self, request: Request) -> Response:
        """Describe the paths in the format of OpenAPI."""
        paths: dict[str, Any] = {}
        for route in self.routes:
            summary, _, more = (inspect.getdoc(route.endpoint) or "").partition("\n\n")
            about: dict[str, Any] = {"summary": summary, "description": more}
            if route.methods and "POST" in route.methods:
                content = {kind: {"schema": schema} for kind, schema in self.bodies.items()}
                about["requestBody"] = {"content": content, "required": True}
            paths[route.path] = {"post" if "requestBody" in about else "get": about}
        info = {"title": self.predictor.name, "version": self.predictor.run}
        return JSONResponse({"openapi": "3.1.0", "info": info, "paths": paths})

    async def predict(self, request: Request) -> Response:
        """Predict samples.

        The body is JSON, an image file, or an array in NumPy's npy format.
        """
        kind = media_type(request)
        async with self._body(request) as body:
            try:
                if len(body) <= SMALL and kind not in IMAGES:
                    inputs = decode(self.predictor, kind, body, self.limits)
                else:
                    async with self.decoders:
                        inputs = await asyncio.to_thread(decode, self.predictor, kind, body, self.limits)
            except ValueError as error:
                raise refusal(error) from None
        try:
            outputs = await self.batcher(inputs)
        except OverloadedError as error:
            raise overload(str(error)) from None
        except Exception as error:  # of the code of the model, or of an export
            reason = (
                f"the model fails on these inputs: {one_line(error)[:300]}; give some of the shapes in training, and "
                "let predict_step take a batch (inputs,) without targets"
            )
            print(f"error: {reason}", file=sys.stderr, flush=True)
            raise HTTPException(500, reason) from None
        if not np.isfinite(outputs).all():
            raise HTTPException(422, "inputs: the predictions are not finite; give values like those in training")
        return JSONResponse({"predictions": self.predictor.format(outputs)})

    async def generate(self, request: Request) -> Response:
        """Continue a text, as server-sent events."""
        if (kind := media_type(request)) != JSON:  # a page of another site may send text without being asked
            raise HTTPException(415, f"content type {kind[:100]}: expected {JSON}")
        async with self._body(request) as body:
            try:
                asked = parse_json(Prompt, body)
            except ValueError as error:
                raise refusal(error) from None
        if asked.tokens > self.limits.max_tokens:
            raise HTTPException(422, f"tokens={asked.tokens}: at most {self.limits.max_tokens}")
        if self.streams.locked():
            raise overload(f"{self.limits.max_streams} texts are being generated")
        settings: dict[str, Any] = {"temperature": asked.temperature, "top_k": asked.top_k, "seed": asked.seed}
        pieces = limited(self.predictor.generate(asked.prompt, asked.tokens, **settings), self.streams)
        return StreamingResponse(events(pieces), media_type="text/event-stream")

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """Read the body within the limits of size."""
        too_large = HTTPException(413, f"the request is larger than {self.limits.max_bytes} bytes")
        if int(request.headers.get("content-length", "0")) > self.limits.max_bytes:
            raise too_large
        body = bytearray()
        try:
            async for chunk in request.stream():
                self.total_bytes += len(chunk)
                body += chunk
                if len(body) > self.limits.max_bytes:
                    raise too_large
                if self.total_bytes > self.limits.max_total_bytes:
                    raise overload(f"the requests are larger than {self.limits.max_total_bytes} bytes in all")
            yield body
        except ClientDisconnect:
            raise HTTPException(408, "the request is incomplete") from None
        finally:
            self.total_bytes -= len(body)


class MetricsMiddleware:
    """Record the status and the duration of requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]) -> None:
        self.app, self.metrics, self.paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), 500

        async def watch(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.labels(path, status).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - began)


def create_app(predictor: Predictor, limits: Limits, *, host: str = "127.0.0.1", token: str = "") -> Starlette:
    """Create the application; an empty ``token`` admits all requests to localhost."""
    service = Service(predictor, limits)
    app = Starlette(
        routes=service.routes,
        middleware=[
            Middleware(MetricsMiddleware, service.metrics, {route.path for route in service.routes}),
            Middleware(AccessMiddleware, host, token),
        ],
        exception_handlers={HTTPException: answer},
        lifespan=service.lifespan,
    )
    app.state.predictor = predictor
    return app


async def answer(request: Request, error: Exception) -> Response:
    """Answer a request that is refused with the reason."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


def media_type(request: Request) -> str:
    """The content type of a request without its parameters; empty if it has none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def overload(reason: str) -> HTTPException:
    """Refuse a request for now."""
    return HTTPException(503, f"{reason}; try again later", {"Retry-After": "1"})


def decode(predictor: Predictor, kind: str, body: bytearray, limits: Limits) -> Samples:
    """Convert the body of a request to inputs of the model.

    Raises:
        ValueError: It cannot be converted.
        HTTPException: Its media type is not supported, or it has too many samples.
    """
    if kind in IMAGES and predictor.form == "image":
        return predictor.image(bytes(body))
    if kind == NUMPY:
        try:
            values = np.load(io.BytesIO(body), allow_pickle=False)
        except Exception as error:  # NumPy parses the header as Python, and passes on what that raises
            raise ValueError(f"not an array in npy format ({str(error)[:100]})") from None
        if not isinstance(values, np.ndarray) or values.ndim < 1 or predictor.form == "row":
            raise ValueError("expected one array of samples" if predictor.form != "row" else "rows are sent as JSON")
    elif kind == JSON:
        values = parse_json(Inputs, body).inputs
        is_object = predictor.form in ("row", "samples") or (predictor.form == "array" and not predictor.shape)
        if not is_object and body.count(b'"') > 2:  # NumPy would pad all elements to the longest text
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
    return predictor.samples(values) if predictor.form == "samples" else predictor.array(values)


def parse_json(kind: type[Body], body: bytearray) -> Body:
    """Parse a body, by pydantic's parser, as Python's takes four times as long for numbers.

    Raises:
        ValueError: It is not valid JSON, or has other fields or types.
    """
    if body.count(b"[") + body.count(b"{") > MAX_LISTS:
        raise ValueError(f"more than {MAX_LISTS} lists or objects; send fewer samples")
    try:
        values = from_json(body)  # takes less memory than model_validate_json
    except ValueError as error:
        raise ValueError(f"body: Invalid JSON: {error}") from None
    return kind.model_validate(values)


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
