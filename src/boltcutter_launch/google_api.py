"""Requests to Google's REST APIs with google-auth, the official client for credentials.

The client libraries of Vertex AI and Cloud Logging need 273 MB and take seconds to import, for four requests.
google-auth comes with gcsfs, which reads and writes gs:// addresses.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boltcutter.config.errors import one_line
from boltcutter.project import install_command
from boltcutter_launch.job import NoAnswerError, UnreachableError, as_error

if TYPE_CHECKING:
    from google.auth.transport.requests import AuthorizedSession

LOGIN = "run gcloud auth application-default login"
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
TIMEOUT = 30.0  # seconds to wait for an answer
PAGE = 1000  # log entries in an answer, which is the maximum
REMEDIES = {
    401: LOGIN,
    403: "enable the API, or ask for the role that the message names",
    404: "correct launch.project or launch.region",
    429: "request more quota at https://console.cloud.google.com/iam-admin/quotas, or try regions by launch=sky",
}


def default_setting(section: str, name: str, variable: str) -> str | None:
    """Return a property of gcloud's configuration, unless one of its two environment variables is set."""
    if found := os.environ.get(variable) or os.environ.get(f"CLOUDSDK_{section}_{name}".upper()):
        return found
    folder = Path(os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud").expanduser()
    active = folder / "active_config"
    chosen = os.environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or (active.read_text().strip() if active.is_file() else "")
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(folder / "configurations" / f"config_{chosen or 'default'}")
    return parser.get(section, name, fallback=None)


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


def log_entries(session: AuthorizedSession, project: str, query: str) -> Iterator[dict[str, Any]]:
    """Yield the entries of Cloud Logging that match a query, the oldest first."""
    body = {"resourceNames": [f"projects/{project}"], "filter": query, "orderBy": "timestamp asc", "pageSize": PAGE}
    while True:
        answer = call(session, "POST", f"{endpoint('logging')}/v2/entries:list", body)
        yield from answer.get("entries", ())
        if not answer.get("nextPageToken"):
            return
        body = {**body, "pageToken": answer["nextPageToken"]}


def _line(reason: object) -> str:
    if isinstance(reason, Exception) and reason.args:  # google-auth adds the whole answer
        reason = reason.args[0]
    return one_line(reason, 400)
