"""Find and redact secrets that must not be stored with a run: in keys, environment variables, files and URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

# Keys such as token and hf_token; pad_token and the like are tokens of a vocabulary.
_SERVICES = (
    "access api auth aws bearer bot client csrf deploy git github gitlab hf hub jwt oauth oauth2 personal refresh sas "
    "secret security session slack sts wandb"
)
_KEYS = "access account api client encryption license master private secret shared signing ssh storage"
_OTHER = (
    r"secrets?|passwords?|passwds?|pwd|passphrases?|credentials?|authorization|jwt|dsn|conn_str|netrc"
    r"|(connection|database|db)_(string|str|uri|url)|sas_(url|uri)|webhook(_url)?"
)
SECRET_KEY = re.compile(
    rf"(^|_)({_OTHER}|({'|'.join(_KEYS.split())})_?keys?|({'|'.join(_SERVICES.split())})_?tokens?)$|^token$", re.I
)
SECRET_FILE = re.compile(
    r"\.env(\.(?!example$|sample$|template$|dist$).*)?|.*\.env|\.envrc|\.netrc|\.pgpass|\.npmrc|\.pypirc|\.htpasswd"
    r"|\.git-credentials|\.dockercfg|kubeconfig|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|credentials(\.(json|ya?ml|toml|ini|csv))?"
    r"|secrets?\.(json|ya?ml|toml|ini|env|txt)|.*service[-_]?account.*\.json|application_default_credentials\.json"
    r"|.*\.(pem|key|p12|pfx|p8|jks|keystore|crt|cer|der|ppk|kdbx|asc|gpg|ovpn)",
    re.I,
)
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY")
MASK = "***"
MIN_SECRET_LENGTH = 6  # characters; shorter secrets are not searched for within other values
VARIABLE = re.compile(r"oc\.env:\s*['\"]?(\w+)")
URL = re.compile(r"([A-Za-z][\w+.-]*://)([^\s'\"<>,]*@[^\s'\"<>,]*)")
ASSIGNMENT = re.compile(r"(?<![\w$])([A-Z][A-Z0-9_]*)=[\"']?(?=[^\s\"'$])")  # in a shell command: export NAME=value
QUERY_PARAMETER = re.compile(r"[?&]([\w-]+)=[^\s&$]")  # in a URL
SIGNATURE_PARAMETERS = ("sig", "x-amz-signature", "x-goog-signature")
PASSWORD = re.compile(r"[^/@:\s]*:(?!\d+(/|$))[^\s]*@")  # user:password@ at the start of a URL, as opposed to host:port


def looks_secret(name: str) -> bool:
    """Return whether a key or an environment variable of this name probably holds a secret."""
    return bool(SECRET_KEY.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_")))


def is_secret_file(name: str) -> bool:
    """Return whether a file of this name probably holds keys, certificates or passwords."""
    return bool(SECRET_FILE.fullmatch(name.rpartition("/")[2]))


def without_credentials(url: str) -> str:
    """Remove user and password from a URL."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    if PASSWORD.match(rest):
        return f"{scheme}://{rest.rpartition('@')[2]}"
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def has_password(text: str) -> bool:
    """Return whether a string contains a URL with a literal password."""
    return any(PASSWORD.match(rest) and "${" not in rest.rpartition("@")[0] for _, rest in URL.findall(text))


def hide_passwords(text: str) -> str:
    """Redact passwords of URLs in a string."""

    def hidden(found: re.Match[str]) -> str:
        plain = without_credentials(found[0])
        return found[0] if not PASSWORD.match(found[2]) else f"{found[1]}{MASK}@{plain.partition('://')[2]}"

    return URL.sub(hidden, text)


def find_secrets(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Find literal secrets in an unresolved configuration; yield the dotted key, and the kind of secret."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            where = f"{path}.{key}" if path else str(key)
            literal = type(value) in (str, int, float) and value not in ("", "???") and "${" not in str(value)
            if literal and looks_secret(str(key)):
                yield where, "a secret"
            elif isinstance(value, str) and has_password(value):
                yield where, "a password in a URL"
            elif isinstance(value, str) and "://" in value and any(map(_is_signature, QUERY_PARAMETER.findall(value))):
                yield where, "a key in a URL"
            elif isinstance(value, str) and (names := [*filter(looks_secret, ASSIGNMENT.findall(value))]):
                yield where, f"the value of {names[0]}"
            else:
                yield from find_secrets(value, where)


def _is_signature(name: str) -> bool:
    return name.lower() in SIGNATURE_PARAMETERS or looks_secret(name)


def redact(resolved: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """Redact the secrets in a configuration.

    Args:
        resolved: The configuration, with all references resolved.
        raw: The same configuration, unresolved.
    """
    secrets = sorted(
        {text for text in _secrets(resolved, raw, False) if len(text) >= MIN_SECRET_LENGTH}, key=len, reverse=True
    )
    return dict(_hide(resolved, secrets))


def _secrets(node: Any, raw: Any, secret: bool) -> Iterator[str]:
    """Yield the values of references that are under a secret key, or to a secret environment variable."""
    if isinstance(node, dict):
        for key, value in node.items():
            below = raw.get(key) if isinstance(raw, dict) else raw
            yield from _secrets(value, below, secret or looks_secret(str(key)))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            below = raw[i] if isinstance(raw, list) and i < len(raw) else raw
            yield from _secrets(value, below, secret)
    elif isinstance(raw, str) and "${" in raw and isinstance(node, str):
        if secret:
            yield node
        yield from (os.environ.get(name, "") for name in VARIABLE.findall(raw) if secret or looks_secret(name))


def _hide(node: Any, secrets: Iterable[str]) -> Any:
    if isinstance(node, list):
        return [_hide(value, secrets) for value in node]
    if isinstance(node, dict):
        hidden = {key for key, value in node.items() if looks_secret(str(key)) and value and value is not True}
        return {key: MASK if key in hidden else _hide(value, secrets) for key, value in node.items()}
    if isinstance(node, str):
        for text in secrets:
            node = node.replace(text, MASK)
        return hide_passwords(node)
    return node
