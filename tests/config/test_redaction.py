from typing import Any

import pytest

from boltcutter.config import redaction
from boltcutter.config.redaction import (
    find_secrets,
    hide_passwords,
    hide_variables,
    is_secret_file,
    looks_secret,
    redact,
    redact_arguments,
    without_credentials,
)

words = str.split
# Keys in the forms of their services, put together here so that no scanner takes them for real ones.
KEYS = [
    f"hf_{'a1' * 17}",
    f"sk-{'b2' * 20}",
    f"AKIA{'C3' * 8}",
    f"ghp_{'d4' * 18}",
    f"hvs.{'e5' * 12}",
    f"-----BEGIN {''}PRIVATE KEY",
]


@pytest.mark.parametrize(
    "name",
    words(
        "api_key apikey apiKey API-KEY token hf_token access_token password db_password passwd secret "
        "client_secret secret_key secretKey session_token connection_string private_key passphrase "
        "credentials refresh_token AWS_SECRET_ACCESS_KEY GITHUB_TOKEN WANDB_API_KEY dsn database_url "
        "signing_key account_key sas_token openai_key db_pass gh_pat vault_token databricks_token "
        "KAGGLE_KEY PGPASSWORD VAULT_TOKEN DATABRICKS_TOKEN OPENAI_KEY GH_PAT MY_SERVICE_KEY SMTP_PASS MYSQL_PWD "
        "SSHPASS PGPASS API_KEY_2 TOKEN1 CI_JOB_JWT_V2 --token MY_CREDS MYAPIKEY SIGNING_KEY_BASE64 KUBE_CONFIG_DATA "
        "GOOGLE_APPLICATION_CREDENTIALS_JSON"
    ),
)
def test_names_of_secrets(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    words(
        "pad_token eos_token tokens max_tokens tokenizer key keys monkey key_size num_key_value_heads url "
        "image_key label_key bypass pass_through num_passes PassengerId pattern EOS_TOKEN PAD_TOKEN MAX_TOKENS PATH "
        "GOOGLE_APPLICATION_CREDENTIALS_PATH PWD OLDPWD KEYMAP COMPASS BYPASS NUM_PASSES KEYS_1 GIT_CONFIG_KEY_0"
    ),
)
def test_names_of_other_values(name: str) -> None:
    assert not looks_secret(name)


@pytest.mark.parametrize(
    "name",
    words(
        ".env a/.env .env.local prod.env server.pem tls.key cert.crt id_rsa .netrc .npmrc credentials.json "
        "secrets.yaml my-service-account-1.json key.p12 .envrc kaggle.json hf_token client_secret.json "
        "client_secret_1.apps.json "
        "project-key.json terraform.tfstate rclone.conf .s3cfg prod.tfvars"
    ),
)
def test_files_of_secrets(name: str) -> None:
    assert is_secret_file(name)


@pytest.mark.parametrize(
    "name",
    words(".env.example env.py token.py tokens.json loss_history keys.py model.py secret_sharing.py environment.yml"),
)
def test_other_files(name: str) -> None:
    assert not is_secret_file(name)


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("https://me:hidden@example.org/x.git", "https://example.org/x.git"),
        ("https://me:hid@den@example.org/x.git", "https://example.org/x.git"),
        ("https://me:hid/den@example.org/x.git", "https://example.org/x.git"),
        ("https://token@example.org/x.git", "https://example.org/x.git"),
        ("https://example.org:8080/a@b", "https://example.org:8080/a@b"),
        ("https://example.org/@scope/x", "https://example.org/@scope/x"),
        ("git@example.org:x.git", "git@example.org:x.git"),
    ],
)
def test_credentials_are_removed_from_urls(url: str, plain: str) -> None:
    assert without_credentials(url) == plain


def test_passwords_in_texts_are_hidden() -> None:
    assert hide_passwords("from s3://me:pw@host/x and ssh://git@host") == "from s3://***@host/x and ssh://git@host"


@pytest.mark.parametrize(
    ("node", "path", "what"),
    [
        ({"a": [{"name": "x"}, {"api_key": "abc"}]}, "a.1.api_key", "a secret"),
        ({"a": {"private_key": 12}}, "a.private_key", "a secret"),
        ({"setup": ["ulimit -n 9", "export WANDB_API_KEY='abc'"]}, "setup.1", "the value of WANDB_API_KEY"),
        ({"sbatch": ["--export=ALL,HF_TOKEN=abc"]}, "sbatch.0", "the value of HF_TOKEN"),
        ({"url": "https://a.blob.core.windows.net/c?sv=1&sig=abc"}, "url", "a key in a URL"),
        ({"urls": ["https://me:pw@host"]}, "urls.0", "a password in a URL"),
        ({"setup": ["export KAGGLE_KEY=abc"]}, "setup.0", "the value of KAGGLE_KEY"),
        ({"setup": [f"curl -H {KEYS[0]}"]}, "setup.0", "a secret"),
    ],
)
def test_stored_secrets_are_found(node: Any, path: str, what: str) -> None:
    assert list(find_secrets(node)) == [(path, what)]


def test_the_value_of_a_secret_variable_is_found_under_any_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_KEY", "0123456789ab")
    monkeypatch.setenv("MY_KEY", __file__)  # a file with a key, whose path is none
    node = {"notes": ["by 0123456789ab"], "size": 123456789, "file": f"{__file__}.x"}
    assert list(find_secrets(node)) == [("notes.0", "the value of MY_SERVICE_KEY")]


def test_values_of_secret_variables_are_hidden_in_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_KEY", "0123456789ab")
    monkeypatch.setenv("A_LONGER_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("AN_ORDINARY_NAME", "nothing secret")
    assert hide_variables("x=0123456789abcdef, 0123456789ab") == "x=***, ***"
    assert hide_variables("0123456789a, nothing secret") == "0123456789a, nothing secret"


def test_references_are_not_secrets() -> None:
    node: dict[str, Any] = {
        "setup": ["export HF_TOKEN=$MINE", "KEYMAP=1 y"],
        "page": "https://a/?pad_token=1&key_size=2",
    }
    assert list(find_secrets(node)) == []
    node = {"api_key": "${oc.env:KEY}", "password": None, "token": "", "url": "https://${oc.env:U}:${oc.env:P}@host"}
    assert list(find_secrets(node)) == []
    node = {"launch": {"secrets": {"HF_TOKEN": "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf"}}}
    assert list(find_secrets(node)) == []


def test_of_secrets_that_contain_one_another_the_longest_is_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"A_TOKEN": "planted", "B_TOKEN": "planted-and-more", "C_TOKEN": "more-planted-and-more"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    raw = {"list": [f"${{oc.env:{name}}}" for name in names]} | {name.lower()[0]: name for name in names}
    resolved = {"list": [*names.values()]} | {name.lower()[0]: f"<{value}>" for name, value in names.items()}
    assert redact(resolved, raw) == {"list": ["***"] * 3, "a": "<***>", "b": "<***>", "c": "<***>"}


def test_of_a_partial_reference_only_the_secret_is_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "planted1")
    monkeypatch.setenv("ORDINARY", "planted2")
    monkeypatch.setenv("SHORT_TOKEN", "12345")
    raw: dict[str, Any] = {
        "header": "Bearer ${oc.env:MY_TOKEN} for ${oc.env:ORDINARY}",
        "lines": ["a", "--key=${oc.env:MY_TOKEN}"],
        "copy": "planted1 and planted2",
        "passphrase": "x-${oc.env:ORDINARY}-y",
        "short": "${oc.env:SHORT_TOKEN}",
        "size": "12345",
    }
    resolved = raw | {"header": "Bearer planted1 for planted2", "lines": ["a", "--key=planted1"]}
    resolved |= {"passphrase": "x-planted2-y", "short": "12345", "log": "x-planted2-y"}
    assert redact(resolved, raw) == {
        "header": "Bearer *** for ***",  # as a secret key refers to the other variable, too
        "lines": ["a", "--key=***"],
        "copy": "*** and ***",
        "passphrase": "***",
        "short": "12345",
        "size": "12345",
        "log": "***",
    }
    del raw["passphrase"], resolved["passphrase"]
    assert redact(resolved, raw)["header"] == "Bearer *** for planted2"


def test_values_of_secret_references_are_redacted_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "unused")
    monkeypatch.setenv("SERVICE_API_KEY", "planted1")
    raw = {
        "plain": "${oc.env:SERVICE_API_KEY}",
        "again": "${plain}",
        "list": [{"passphrase": "${other}"}],
        "other": "${oc.env:ORDINARY}",
        "header": "Basic ${other}",
        "url": "https://${oc.env:USER}:${oc.env:PW}@host/x",
        "size": 3,
        "session_token": None,
    }
    resolved = raw | {"plain": "planted1", "again": "planted1", "list": [{"passphrase": "planted2"}]}
    resolved |= {"other": "planted2", "header": "Basic planted2", "url": "https://me:pw@host/x"}
    found = redact(resolved, raw)
    assert "planted" not in str(found)
    assert found["header"] == "Basic ***"
    assert found["url"] == "https://***@host/x"
    assert (found["size"], found["session_token"], found["list"]) == (3, None, [{"passphrase": "***"}])


@pytest.mark.parametrize(
    "name",
    [
        "smtp_pw",
        "sessionCookie",
        "creds",
        "REDIS_URL",
        "MONGO_URI",
        "AWS_ACCESS_KEY_ID",
        "user_token",
        "CELERY_BROKER_URL",
        "db_uri",
    ],
)
def test_names_of_services_and_of_keys_are_secret(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    words(
        ".vault-token auth.json .my.cnf id_rsa_work id_ed25519.old _netrc pgpass.conf .pypirc.bak kubeconfig.yaml "
        "token api_key.txt .token passwords.txt cookies.txt .vault_pass .bash_history credentials.db"
    ),
)
def test_files_of_services_and_renamed_keys_are_secret(name: str) -> None:
    assert is_secret_file(f"a/{name}")
    assert not is_secret_file("id_rsa_work.pub")


@pytest.mark.parametrize(
    "text",
    [f"wandb login {'a1' * 20}", f"wandb login --relogin {'0' * 40}", "curl -H 'Authorization: Bearer abcdef12'"],
)
def test_commands_with_a_key_are_found(text: str) -> None:
    assert next(find_secrets({"launch": {"setup": [text]}}))
    assert not next(find_secrets({"launch": {"setup": ["wandb login", "Authorization: none"]}}), None)


def test_values_of_the_project_variables_are_masked_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PLAIN": "hunter2", "PLACE": "/tmp", "TEAM": "digits", "API_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setattr(redaction, "private_variables", {"PLAIN", "PLACE", "TEAM", "API_KEY"})
    assert hide_variables("refused hunter2 in /tmp of digits: secret") == "refused *** in /tmp of digits: ***"


@pytest.mark.parametrize(
    "text",
    [
        f"sk_live_{'a1B2' * 6}",
        f"npm_{'a1B2' * 9}",
        f"pypi-AgEI{'a1B2' * 12}",
        f"gsk_{'a1B2' * 13}",
        f"nvapi-{'a1B2' * 16}",
        f"wandb_v1_{'a1B2' * 10}",
        f"//registry.npmjs.org/:_authToken={'a1B2' * 3}",
        f"https://{'a1B2' * 5}@example.com/a.git",
        f"https://hooks.slack.com/services/T0/B0/{'a1B2' * 6}",
        f"machine example.com login me password {'a1B2' * 3}",
        f"aws_secret_access_key = {'a1B2' * 10}",
        f"SG.{'a' * 22}.{'b' * 43}",
        f"dp.st.dev_a.{'a1B2' * 10}",
        f"pscale_tkn_{'a1B2' * 10}",
        f"dckr_pat_{'a1B2' * 7}",
        f"glsa_{'a1B2' * 8}_0a1b2c3d",
        f"PMAK-{'0a1b' * 6}-{'0a1b' * 8}ff",
        f"ATATT3{'a1B2' * 10}=0A1B2C3D",
        f"Ab3dEf6hIj9lMn.atlasv1.{'a1B2' * 16}",
        f"lsv2_pt_{'0a1b' * 8}_0a1b2c3d4e",
        f"pcsk_{'a1B2' * 12}",
        "curl -sS -u me:hunter2 https://example.com",
        "curl --user=me:hunter2 https://example.com",
        "curl -H 'X-API-Key: hunter2hunter2' https://example.com",
        f"AccountName=a;AccountKey={'aB3d' * 21}Eg==;EndpointSuffix=core.windows.net",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIiwibiI6MX0.dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk",
    ],
)
def test_keys_of_services_are_found_by_their_form(text: str) -> None:
    assert next(find_secrets({"note": f"see {text}"}))
    assert not next(find_secrets({"note": f"sha256:{'0123456789abcdef' * 4} eyJ.eyJ.a sk_live npm_ SG.a.b"}), None)
    ordinary = (
        "curl -u $USER:$TOKEN a.com; curl -o a:b https://a.com; dp.pt.state disk-usage_of-the-whole x-api-key: $KEY"
    )
    assert not next(find_secrets({"note": ordinary}), None)


def test_secrets_among_arguments_are_masked() -> None:
    words = ["train.py", "--token=abc", "--api-key", "def", "--password", "-v", "x.api_key=ghi", "lr=0.1", "--out", "x"]
    masked = ["--token=***", "--api-key", "***", "--password", "-v", "x.api_key=***", "lr=0.1", "--out", "x"]
    assert redact_arguments(words) == ["train.py", *masked]
    assert redact_arguments(["client.api_key=${oc.env:KEY}", "--token"]) == ["client.api_key=${oc.env:KEY}", "--token"]
    assert redact_arguments(["https://user:secret1@a.com/b"]) == ["https://***@a.com/b"]
