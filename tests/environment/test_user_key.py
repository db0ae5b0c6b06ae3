import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.environment import user_key
from boltcutter.project import Project
from boltcutter.run import trust

PROJECT = Project.find(__file__)


def test_two_processes_create_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "home" / "key"
    monkeypatch.setattr(user_key, "KEY_FILE", key)

    def meanwhile(size: int) -> str:
        key.touch(mode=0o600)
        key.write_text("0" * 64)  # by another process
        return "1" * 2 * size

    monkeypatch.setattr(user_key.secrets, "token_hex", meanwhile)
    assert user_key.is_signed({"a": 1}, user_key.sign({"a": 1}))
    assert key.read_text() == "0" * 64
    assert list(key.parent.iterdir()) == [key]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda key: key.chmod(0o640), "not private (owner {}, mode 640, 64 bytes)"),
        (lambda key: key.chmod(0o602), "not private (owner {}, mode 602, 64 bytes)"),
        (lambda key: key.write_text(""), "not private (owner {}, mode 600, 0 bytes)"),
        (lambda key: key.write_text("short"), "not private (owner {}, mode 600, 5 bytes)"),
        (lambda key: key.rename(key.with_name("a")).chmod(0o604) or key.symlink_to("a"), "mode 604, 64 bytes)"),
        (lambda key: key.unlink() or key.mkdir(), "not an ordinary file"),
        (lambda key: key.unlink() or os.mkfifo(key), "not an ordinary file"),
        (lambda key: key.unlink() or key.symlink_to("/dev/zero"), "not an ordinary file"),
    ],
    ids=["group", "writable", "empty", "short", "link", "folder", "fifo", "device"],
)
def test_a_key_that_others_may_know_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], reason: str
) -> None:
    """With it, they could sign records whose classes are called."""
    monkeypatch.setattr(user_key, "KEY_FILE", key := tmp_path / "key")
    signature = user_key.sign({})
    change(key)
    for uses in (lambda: user_key.sign({}), lambda: trust.check_record({}, "run=x", tmp_path, signature=signature)):
        with pytest.raises(ConfigError, match=re.escape(reason.format(os.getuid()))) as error:
            uses()
        assert re.fullmatch(r".*/key: .*; chmod 600 if it is yours, or remove it for a new one", str(error.value))


def test_a_key_of_another_user_is_refused_outside_of_their_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where HOME is /tmp; but a container may run as root with the home of a user."""
    monkeypatch.setattr(user_key, "KEY_FILE", tmp_path / "key")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_key.sign({})
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert user_key.sign({})
    home = os.stat_result([0o40755, *[0] * 3, user + 2, *[0] * 5])
    monkeypatch.setattr(Path, "stat", lambda path, **_: home if path == tmp_path else os.stat(path))
    with pytest.raises(ConfigError, match=rf"key: not private \(owner {user}, mode 600, 64 bytes\); chmod 600"):
        user_key.sign({})


def test_a_signature_is_valid_only_for_these_values_and_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    key = tmp_path / "home" / ".config" / "boltcutter" / "key"
    node = {"task": {"_target_": "other_package.Net", "sizes": {2: 1.5, 10: None}}, "folder": "/a"}
    signature = user_key.sign(node)
    stored = json.loads(json.dumps({**node, "folder": "/moved"}))
    assert user_key.is_signed(stored, signature)
    trust.check_record(stored, "run=x", tmp_path, PROJECT, signature=signature)
    assert key.stat().st_mode & 0o777 == 0o600
    stored["task"]["sizes"]["2"] = 2
    assert not any(user_key.is_signed(stored, given) for given in (signature, None, 1, "é"))
    key.unlink()
    assert user_key.sign(node) not in (None, signature)
    monkeypatch.setattr(user_key, "KEY_FILE", Path("/proc/nowhere/key"))
    assert user_key.sign(node) is None
    assert not user_key.is_signed(node, signature)
