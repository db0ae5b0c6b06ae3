"""Requests to Google's REST APIs with google-auth, the official client for credentials.

The client libraries of Vertex AI and Cloud Logging need 273 MB and take seconds to import, for four requests.
google-auth comes with gcsfs, which reads and writes gs:// addresses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from boltcutter.config.errors import one_line
from boltcutter.project import install_command
from boltcutter_launch.job import NoAnswerError, UnreachableError, as_error

if TYPE_CHECKING:
    from google.auth.transport.requests import AuthorizedSession

LOGIN = "run gcloud auth application-default login"
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
TIMEOUT = 30.0  # seconds to wait for an answer
REMEDIES = {
    401: LOGIN,
    403: "enable the API, or ask for the role that the message names",
    404: "correct launch.project or launch.region",
    429: "request more quota at https://console.cloud.google.com/iam-admin/quotas, or try regions by launch=sky",
}


def endpoint(service: str, prefix: str = "") -> str:
    """Return the address of a service: the one that gcloud is configured to use, or the public one."""
    override = os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service.upper()}")
    return (override or f"https://{prefix}{service}.googleapis.com").rstrip("/")


def connect() -> AuthorizedSession:
    """Return a session with the Application Default Credentials.

    Raises:
        ValueError: There are none, or they are rejected.
        UnreachableError: Google does not respond.
    """
    try:
        import google.auth
        from google.auth import exceptions
        from google.auth.transport.requests import AuthorizedSession, Request
    except ModuleNotFoundError:
        raise ValueError(f"launch=vertex: google-auth is not installed; {install_command('google-auth')}") from None
    try:
        credentials, _ = google.auth.default(scopes=SCOPES)
        credentials.refresh(lambda *args, **kwargs: Request()(*args, **{"timeout": TIMEOUT, **kwargs}))
    except exceptions.DefaultCredentialsError as error:
        raise ValueError(f"launch=vertex: no valid credentials of Google Cloud ({_line(error)}); {LOGIN}") from None
    except exceptions.RefreshError as error:
        raise ValueError(f"launch=vertex: Google rejected the credentials ({_line(error)}); {LOGIN}") from None
    except exceptions.TransportError as error:
        raise UnreachableError(f"launch=vertex: {_line(error)}; check the network and try again") from None
    return AuthorizedSession(credentials)


def call(session: AuthorizedSession, method: str, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Send a request; returns the answer.

    Raises:
        ValueError: The request was rejected; the message has the reason that the API gives.
        UnreachableError: The API does not respond, or cannot answer now.
    """
    import requests
    from google.auth import exceptions

    host = url.split("/")[2]
    try:
        answer = session.request(method, url, json=body, timeout=TIMEOUT)
    except exceptions.RefreshError as error:
        raise ValueError(f"launch=vertex: Google rejected the credentials ({_line(error)}); {LOGIN}") from None
    except (requests.RequestException, exceptions.GoogleAuthError) as error:
        sent = isinstance(error, requests.RequestException) and "NewConnectionError" not in str(error)
        kind = NoAnswerError if sent and not isinstance(error, requests.ConnectTimeout) else UnreachableError
        raise kind(f"launch=vertex: no answer from {host} ({_line(error)}); check the network and try again") from None
    if answer.ok:
        return dict(answer.json()) if answer.content else {}
    try:
        fault = answer.json()["error"]
        reason = f"{fault.get('status', '')}: {fault['message']}"
    except (ValueError, KeyError, TypeError):
        reason = answer.text or answer.reason
    raise as_error("vertex", answer.status_code, reason, REMEDIES)


def _line(reason: object) -> str:
    if isinstance(reason, Exception) and reason.args:  # google-auth adds the whole answer
        reason = reason.args[0]
    return one_line(reason, 400)
