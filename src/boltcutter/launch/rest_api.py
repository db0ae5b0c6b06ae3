"""Requests to the REST APIs of Google Cloud and Azure, with credentials of google-auth and azure-identity.

The clouds' own clients need 273 MB (Google) and 112 MB (Azure), and pin packages that others need in newer ones, for
ten requests. google-auth and azure-identity come with gcsfs and adlfs, which read and write runs.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from boltcutter.config.errors import one_line
from boltcutter.launch.job import ForbiddenError, NoAnswerError, UnreachableError
from boltcutter.project import install_command

TIMEOUT = 30.0  # seconds to wait for an answer
RETRIES = 3  # of a request that can be repeated
BUSY = (429, 500, 502, 503, 504)  # statuses after which it is
RENEWAL_SECONDS = 300  # before a token expires
GOOGLE_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
REMEDIES = {  # what to do about an HTTP status
    "vertex": {
        401: "run gcloud auth application-default login",
        403: "enable the API, or ask for the role that the message names",
        404: "correct launch.project or launch.region",
        429: "request more quota at https://console.cloud.google.com/iam-admin/quotas, or try regions by launch=sky",
    },
    "azureml": {
        401: "run az login",
        403: "ask for the role AzureML Data Scientist on the workspace",
        429: "try again later",
        409: "cancel the earlier job, or choose another name",
    },
}


class Api:
    """A REST API.

    Args:
        option: Of ``launch=``, for messages.
        authorize: Returns headers with a valid token.
        rejected: What it raises if there are no credentials, or they are rejected.
        silent: What it raises if there is no answer.

    Raises:
        ValueError: There are no valid credentials.
        UnreachableError: There is no answer.
    """

    def __init__(
        self,
        option: str,
        authorize: Callable[[], dict[str, str]],
        rejected: tuple[type[Exception], ...],
        silent: type[Exception],
    ) -> None:
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3 import Retry

        def add_token(request: Any) -> Any:
            try:
                request.headers.update(authorize())
            except rejected as error:
                text = str(error.args[0])  # others of google-auth have the whole answer
                found = re.search(r"\w+Credential: Authentication failed.*", text)  # of those that azure-identity tries
                reason = one_line(found[0] if found else text, 400)
                raise ValueError(f"launch={option}: no valid credentials ({reason}); {REMEDIES[option][401]}") from None
            except silent as error:
                line = f"launch={option}: no answer to the login ({one_line(error, 400)})"
                raise UnreachableError(f"{line}; check the network and try again") from None
            return request

        self._option, self._session = option, requests.Session()
        self._session.auth = add_token
        retry = Retry(RETRIES, backoff_factor=0.5, status_forcelist=BUSY, raise_on_status=False)  # not of POST
        for protocol in ("https://", "http://"):
            self._session.mount(protocol, HTTPAdapter(max_retries=retry))
        add_token(requests.Request())  # missing credentials are found at once

    def call(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request; returns the answer.

        Raises:
            ValueError: The request was rejected; the message has the reason that the API gives.
            UnreachableError: The API does not respond, or cannot answer now.
            NoAnswerError: The same, but the request may have had an effect.
        """
        import requests

        try:
            answer = self._session.request(method, url, json=body, timeout=TIMEOUT)
        except requests.RequestException as error:
            is_sent = "NewConnectionError" not in str(error) and not isinstance(error, requests.ConnectTimeout)
            line = f"launch={self._option}: no answer from {url.split('/')[2]} ({one_line(error, 400)})"
            raise (NoAnswerError if is_sent else UnreachableError)(f"{line}; check the network and try again") from None
        if answer.ok:
            return dict(answer.json()) if answer.content else {}
        try:
            fault = answer.json()["error"]
            reason = f"{fault.get('status') or fault.get('code', '')}: {fault['message']}"
        except (ValueError, KeyError, TypeError):
            reason = answer.text or answer.reason
        line = f"launch={self._option}: {answer.status_code} {one_line(reason, 400)}"
        if answer.status_code >= 500:
            raise NoAnswerError(f"{line}; try again later")
        kind = {403: ForbiddenError, 429: UnreachableError}.get(answer.status_code, ValueError)
        raise kind(
            f"{line}; {REMEDIES[self._option].get(answer.status_code, 'correct the setting that the message names')}"
        )


def google_endpoint(service: str, prefix: str = "") -> str:
    """Return the address of a service of Google: the one that gcloud is configured to use, or the public one."""
    override = os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service.upper()}")
    return (override or f"https://{prefix}{service}.googleapis.com").rstrip("/")


def connect_google() -> Api:
    """Return the APIs of Google Cloud with the Application Default Credentials; raises as ``Api`` does."""
    try:
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
        from google.auth.transport.requests import Request
    except ModuleNotFoundError:
        raise ValueError(f"launch=vertex: google-auth is not installed; {install_command('google-auth')}") from None
    credentials: Any = None

    def authorize() -> dict[str, str]:
        nonlocal credentials
        if credentials is None:
            credentials, _ = google.auth.default(scopes=GOOGLE_SCOPES)
        if not credentials.valid:
            credentials.refresh(lambda *args, **kwargs: Request()(*args, **{"timeout": TIMEOUT, **kwargs}))
        headers: dict[str, str] = {}
        credentials.apply(headers)
        return headers

    return Api("vertex", authorize, (DefaultCredentialsError, RefreshError), TransportError)


def connect_azure(endpoint: str) -> Api:
    """Return the API of Azure at an address, with the credentials of az login, of the environment or of this machine.

    Raises as ``Api`` does.
    """
    try:
        from azure.core.exceptions import AzureError, ClientAuthenticationError
        from azure.identity import DefaultAzureCredential
    except ModuleNotFoundError:
        raise ValueError(f"launch=azureml: adlfs is not installed; {install_command('adlfs')}") from None
    credential, token = DefaultAzureCredential(), None

    def authorize() -> dict[str, str]:
        nonlocal token
        if token is None or token.expires_on < time.time() + RENEWAL_SECONDS:
            token = credential.get_token(f"{endpoint}/.default")
        return {"Authorization": f"Bearer {token.token}"}

    return Api("azureml", authorize, (ClientAuthenticationError,), AzureError)
