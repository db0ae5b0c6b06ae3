"""Find and redact secrets that must not be stored with a run: in keys, environment variables, files and URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from boltcutter.project import private_variables

# Keys such as token and hf_token; pad_token and the like are tokens of a vocabulary, and image_key names a column.
_VENDORS = (
    "anthropic aws azure cohere comet databricks deepseek gcp gemini git github gitlab google groq hf hub huggingface "
    "kaggle mistral neptune ngc openai openrouter replicate slack stripe together vault wandb"
)
_SERVICES = (
    f"{_VENDORS} access api auth bearer bot client csrf deploy jwt oauth oauth2 personal refresh sas secret security "
    "session sts user"
)
_KEYS = f"{_VENDORS} access account api client encryption license master private secret shared signing ssh storage"
_OTHER = (
    r"secrets?|passwords?|passwds?|pass|pwd|passphrases?|credentials?|authorization|jwt|dsn|conn_str|netrc"
    r"|(git|gh|github|gitlab|ado|azure|devops)_pat"
    r"|(connection|database|db|redis|mongo|mongodb|amqp|postgres|postgresql|mysql|broker|celery_broker|sentry)_(string|str|uri|url)"
    r"|sas_(url|uri)|webhook(_url)?|(aws_)?access_key_id|creds|((auth|http|login|session)_)?cookies?"
    r"|(admin|db|ftp|imap|ldap|login|mail|proxy|root|smtp|sudo|user)_pw"
)
SECRET_KEY = re.compile(
    rf"(^|_)({_OTHER}|({'|'.join(_KEYS.split())})_?keys?|({'|'.join(_SERVICES.split())})_?tokens?)$|^token$", re.I
)
# Environment variables: any name that ends so, such as MY_SERVICE_KEY and PGPASSWORD.
SECRET_VARIABLE = re.compile(
    r"(^|_)(TOKEN|KEY|PAT|SECRET|CREDENTIALS?|JWT|DSN)(_?V?[0-9]+)?$|(?<!COM)(?<!BY)PASS(_?[0-9]+)?$|PASSW(OR)?D|PASSPHRASE|PASSFILE"
    r"|(^|_)(API_?KEY|TOKEN|SECRET|PRIVATE_KEY|ACCESS_KEY|SIGNING_KEY|CREDENTIALS|KUBE_?CONFIG)_(?!(.*_)?(FILE|PATH|DIR|NAME|ID|ARN|UR[IL]|TYPE|SIZE|LENGTH|COUNT|LIMIT|HOST|PORT|VERSION)$)[A-Z0-9_]+$"
    r"|(^|_)(SECRETS|BEARER|PASSCODE|SAS|COOKIES?|AUTH|AUTH_CONFIG|PW|CREDS)$|APIKEY$"
    r"|(^|_)(REDIS|MONGO(DB)?|AMQP|POSTGRES(QL)?|MYSQL|DATABASE|DB|BROKER|SENTRY|RABBITMQ|CLICKHOUSE)_(URL|URI)$|(^|_)ACCESS_KEY_ID$"
)
ORDINARY_VARIABLE = re.compile(
    r"(^|_)(PAD|EOS|BOS|UNK|MASK|CLS|SEP|IMAGE|MAX|MIN|NUM|STOP|NEXT)_TOKEN$|PUBLIC_KEY$|^(OLD)?PWD$"
    r"|^GIT_CONFIG_KEY_[0-9]+$"  # a name, such as safe.directory
)
SECRET_FILE = re.compile(
    r"\.env(\.(?!example$|sample$|template$|dist$).*)?|.*\.env|\.envrc|[._]netrc|\.?pgpass(\.conf)?|\.npmrc|\.pypirc.*|\.htpasswd"
    r"|\.git-credentials|\.dockercfg|\.dockerconfigjson|kubeconfig(\.ya?ml)?|id_(rsa|dsa|ecdsa|ed25519).*(?<!\.pub)|\.?vault-token|auth\.json|\.my\.cnf|\.mylogin\.cnf|\.pg_service\.conf|credentials(\.(json|ya?ml|toml|ini|csv))?"
    r"|kaggle\.json|hf_token|client_secrets?.*\.json|.*-key\.json|terraform\.tfstate(\.backup)?|.*\.tfvars|rclone\.conf"
    r"|\.?(api[-_]?key|access[-_]?token|token|passwords?|cookies)(\.(txt|json|sqlite))?|\.vault[-_]pass(word)?|\..*_history"
    r"|(credentials|access_tokens)\.db|accessTokens\.json|msal_token_cache\..*|.*-sa\.json"
    r"|\.s3cfg|\.boto|\.databrickscfg|secrets?\.(json|ya?ml|toml|ini|env|txt)|.*service[-_]?account.*\.json|application_default_credentials\.json"
    r"|.*\.(pem|key|p12|pfx|p8|jks|keystore|crt|cer|der|ppk|kdbx|asc|gpg|ovpn)",
    re.I,
)
# Keys by their form: PEM, Hugging Face, OpenAI and Anthropic, AWS, GitHub, GitLab, HashiCorp Vault, Google, Slack,
# Databricks, Stripe, npm, SendGrid, Azure, JSON Web Tokens, PyPI, Replicate, Groq, xAI, Perplexity, NVIDIA, W&B,
# DigitalOcean, Sentry, Notion, Linear, Shopify, age, Telegram, Doppler, PlanetScale, Docker, Grafana, New Relic,
# Postman, Figma, Atlassian, Supabase, Terraform, Pulumi, RubyGems, LangSmith, Pinecone, RunPod, Tavily, Discord; in
# files of npm, netrc, AWS and Kubernetes; in options and headers of curl; and tokens in place of the user of a URL.
# Source: the documentation of each. None is shorter than 15 characters, which most words are.
# detect-secrets was tried instead: its import takes 0.9 s of each start, it has no rules for Hugging Face, OpenAI,
# Anthropic, Google, Databricks and Vault, and those for entropy, which find these, take each digest for a key.
SECRET_TEXT = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(?=[\w.:=+/-]{15})(hf_[A-Za-z0-9]{30,}|sk-[\w-]{20,}|A[KS]IA[0-9A-Z]{16}"
    r"|gh[oprsu]_[A-Za-z0-9]{36}|github_pat_\w{22,}|gl(pat|cbt|rt|ptt|dt|oas|ft|soat)-[\w-]{20,}|hv[bs]\.[\w-]{20,}|AIza[\w-]{35}"
    r"|xox[abprs]-[\w-]{10,}|dapi[0-9a-f]{32}|[rs]k_live_[A-Za-z0-9]{24,}|npm_[A-Za-z0-9]{36}"
    r"|pypi-AgE[\w-]{40,}|ya29\.[\w-]{30,}|GOCSPX-[\w-]{28}|r8_[A-Za-z0-9]{37}|gsk_[A-Za-z0-9]{40,}|xai-\w{60,}|pplx-\w{40,}"
    r"|nvapi-[\w-]{50,}|wandb_v1_\w{40,}|do[op]_v1_[0-9a-f]{64}|sntr[yu]s_[\w=+/-]{40,}|ntn_[A-Za-z0-9]{40,}|lin_api_\w{40}"
    r"|shp(at|ca|pa|ss)_[0-9a-fA-F]{32}|[0-9]{8,10}:AA[\w-]{33}|AGE-SECRET-KEY-1[A-Z0-9]{58}"
    r"|dp\.(pt|st|sa|ct|scim|audit)\.(?:[\w-]{2,35}\.)?[A-Za-z0-9]{40,44}|pscale_(tkn|pw|oauth)_[\w=.-]{32,}|dckr_[op]at_[\w-]{27,}"
    r"|gl(sa|c)_[\w=+/]{32,}|NRAK-[A-Z0-9]{27}|PMAK-[0-9a-f]{24}-[0-9a-f]{34}|figd_[\w-]{40,}|AT(ATT3|BB)[\w=-]{28,}"
    r"|sb[ps]_[\w-]{36,}|[A-Za-z0-9]{14}\.atlasv1\.[\w-]{60,}|pul-[0-9a-f]{40}|rubygems_[0-9a-f]{48}|lsv2_[ps][tk]_[0-9a-f]{32}_[0-9a-f]{10}"
    r"|pcsk_\w{40,}|rpa_[A-Z0-9]{30,}\w*|tvly-[\w-]{30,}"
    r"|SG\.[\w-]{22}\.[\w-]{43}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})(?![\w-])|\bAccountKey=[A-Za-z0-9+/]{86}=="
    r"|\bwandb login(?: +-\S+)* +[0-9a-f]{40}\b|\b(?i:authorization: *(?:bearer|basic)) +[\w.~+/=-]{8,}"
    r"|(?<=hooks\.slack\.com/services/)[\w/]{20,}|(?<=/api/webhooks/)[0-9]{17,20}/[\w-]{60,}|(?<=://)[\w.~+-]{20,}(?=@)"
    r"|(?<=_authToken=)[\w.~+/=-]{8,}|(?<=client-key-data: )[\w+/=]{20,}|\b(?i:aws_secret_access_key *= *)[\w+/]{40}\b"
    r"|(?<=[Xx]-[Aa][Pp][Ii]-[Kk][Ee][Yy]: )[\w.~+/=-]{8,}"
    r"|\bcurl (?:[^\n|;&]{0,400}? )?(?:-u|--user)[ =]*[\"']?[^\s:\"'$]+:(?!\$)[^\s\"']+"
    r"|(?<=machine )\S+ +login +\S+ +password +\S+"
)
MASK = "***"
MAX_COMMAND = 1 << 15  # characters of a recorded command that are split, which takes quadratic time
MIN_SECRET_LENGTH = 6  # characters; shorter secrets are not searched for within other values
MIN_VARIABLE_LENGTH = 12  # of a secret variable of the environment, whose value may be meant to be anything
VARIABLE = re.compile(r"oc\.env:\s*['\"]?(\w+)")
URL = re.compile(r"([A-Za-z][\w+.-]{0,30}://)([^\s'\"<>,]*)")  # in linear time, as somebody else's text may be long
ASSIGNMENT = re.compile(r"(?<![\w$])([A-Z][A-Z0-9_]*)=[\"']?(?=[^\s\"'$])")  # in a shell command: export NAME=value
QUERY_PARAMETER = re.compile(r"([?&]([\w-]+)=)[^\s&$'\"]+")  # in a URL
SIGNATURE_PARAMETERS = ("sig", "x-amz-signature", "x-goog-signature")
PASSWORD = re.compile(r"[^/@:\s]*:(?![0-9]+(/|$))[^\s]*@")  # user:password@ at the start of a URL, not host:port


def looks_secret(name: str) -> bool:
    """Return whether a key or an environment variable of this name probably holds a secret."""
    if ORDINARY_VARIABLE.search(name):
        return False
    if name.isupper() and SECRET_VARIABLE.search(name):
        return True
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").strip("_")  # also of an option, as --token
    return bool(SECRET_KEY.search(words))


def hide_variables(text: str) -> str:
    """Replace the values of secret environment variables, and of the project's ``.env``, in a text, as of an error.

    Also keys of a known form, passwords of URLs and their signatures, which an error may quote.
    """
    private = [os.environ[name] for name in private_variables if _is_private(name, os.environ.get(name, ""))]
    for value in sorted([*private, *(value for _, value in secret_variables(text))], key=len, reverse=True):
        text = text.replace(value, MASK)
    text = SECRET_TEXT.sub(MASK, text)
    return hide_passwords(text) if "://" in text else text


def holds_value(text: str) -> bool:
    """Return whether a text has the value of a secret variable, of the environment or of the project's ``.env``."""
    private = (os.environ.get(name, "") for name in private_variables if looks_secret(name))
    return bool(secret_variables(text)) or any(len(value) >= MIN_SECRET_LENGTH and value in text for value in private)


def _is_private(name: str, value: str) -> bool:
    """Whether to mask a value of ``.env``: a path, a short word or number may occur in any text."""
    is_word = len(value) < MIN_VARIABLE_LENGTH and (value.isalpha() or value.isdecimal()) and not looks_secret(name)
    return len(value) >= MIN_SECRET_LENGTH and not is_word and not os.path.exists(value)


def secret_variables(text: str) -> list[tuple[str, str]]:
    """The secret environment variables whose values a text contains, the longest first."""
    if len(text) < MIN_VARIABLE_LENGTH:
        return []
    found = [item for item in os.environ.items() if len(item[1]) >= MIN_VARIABLE_LENGTH and item[1] in text]
    return sorted(
        (item for item in found if looks_secret(item[0]) or has_password(item[1])), key=lambda item: -len(item[1])
    )


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
    """Redact passwords of URLs in a string, and keys and signatures among their parameters."""

    def hidden(found: re.Match[str]) -> str:
        plain = without_credentials(found[0])
        url = found[0] if not PASSWORD.match(found[2]) else f"{found[1]}{MASK}@{plain.partition('://')[2]}"
        return QUERY_PARAMETER.sub(lambda each: f"{each[1]}{MASK}" if _is_signature(each[2]) else each[0], url)

    return URL.sub(hidden, text)


def find_secrets(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Find literal secrets in an unresolved configuration; yield the dotted key, and the kind of secret."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            where = f"{path}.{key}" if path else str(key)
            if where == "launch.secrets":
                continue  # where a platform has them, which the launcher checks
            literal = type(value) in (str, int, float) and value not in ("", "???") and "${" not in str(value)
            if literal and (looks_secret(str(key)) or SECRET_TEXT.search(str(value))):
                yield where, "a secret"
            elif literal and (known := [n for n, text in secret_variables(str(value)) if not os.path.exists(text)]):
                yield where, f"the value of {known[0]}"
            elif isinstance(value, str) and has_password(value):
                yield where, "a password in a URL"
            elif (
                isinstance(value, str)
                and "://" in value
                and any(_is_signature(name) for _, name in QUERY_PARAMETER.findall(value))
            ):
                yield where, "a key in a URL"
            elif isinstance(value, str) and (names := [*filter(looks_secret, ASSIGNMENT.findall(value))]):
                yield where, f"the value of {names[0]}"
            else:
                yield from find_secrets(value, where)


def _is_signature(name: str) -> bool:
    return name.lower() in SIGNATURE_PARAMETERS or looks_secret(name)


def redact_arguments(words: Iterable[str]) -> list[str]:
    """Redact secrets in the words of a command: in ``key=value``, in ``--token=value``, and after ``--token``."""
    found, follows = list[str](), False
    for word in words:
        key, sign, value = word.partition("=")
        is_secret = looks_secret(key.rpartition(".")[2])
        if follows and not word.startswith("-"):
            found.append(MASK)
        else:  # a reference is none
            found.append(f"{key}={MASK}" if is_secret and value and "${" not in value else hide_passwords(word))
        follows = is_secret and not sign and word.startswith("-")
    return found


def redact(resolved: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """Redact the secrets in a configuration, of which ``resolved`` has all references resolved, and ``raw`` none."""
    secrets = {text for text in _secrets(resolved, raw, False) if len(text) >= MIN_SECRET_LENGTH}
    return dict(_hide(resolved, sorted(secrets, key=len, reverse=True)))


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
        names = [n for n in VARIABLE.findall(raw) if secret or n in private_variables or looks_secret(n)]
        yield from (os.environ.get(name, "") for name in names)


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
