"""Plain weights as a repository of the Hugging Face Hub: ``config.json``, ``model.safetensors`` and a model card."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError
from boltcutter.export import runner
from boltcutter.export.settings import ExportError
from boltcutter.project import LIBRARY
from boltcutter.run.folder import read_record

FORMAT = "safetensors"  # the format of repositories of the Hub
README = "README.md"
TEMPLATE = Path(__file__).with_name("model_card.md")


def check_repository(repo: str) -> None:
    """Check that a repository can be uploaded.

    Raises:
        ConfigError: The name is invalid, or no token was found.
    """
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+/[\w.-]{1,96}", repo, re.ASCII):
        raise ConfigError(f"export.push={repo}: not a repository of the Hub; use <user>/<name>")
    if not get_token():
        raise ConfigError(f"export.push={repo}: not logged in to the Hub; run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, names: Sequence[str], repo: str) -> str:
    """Upload exports to the Hub; the repository is created if it is new.

    Args:
        folder: Folder of the exports.
        names: Formats. Plain weights and their model card go to the root of the repository, others to a folder each.
        repo: User or organization, and name, as in ``user/name``.

    Returns:
        URL of the commit.

    Raises:
        ExportError: The Hub refused, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    files = [file for name in names for file in written_files(folder / name)]
    paths = [file.name if file.parent.name == FORMAT else f"{file.parent.name}/{file.name}" for file in files]
    operations = [CommitOperationAdd(path, file) for path, file in zip(paths, files, strict=True)]
    try:
        api.create_repo(repo, exist_ok=True)
        commit = api.create_commit(repo, operations, commit_message="Upload model")
    except Exception as error:  # which HTTP library raises them depends on the version of huggingface_hub
        reason = " ".join(str(error).split())[:200]
        raise ExportError(f"export.push={repo}: {type(error).__name__}: {reason}; try again") from error
    return str(commit.commit_url)


def written_files(folder: Path) -> list[Path]:
    """The files of an export that were written by it, and no others, which somebody may have put there meanwhile.

    Raises:
        ExportError: One of them was changed.
    """
    written = {*runner.read_card(folder)["files"], runner.CARD, *([README] if (folder / README).is_file() else [])}
    for name, facts in runner.read_card(folder)["files"].items():
        if (folder / name).is_symlink() or runner.sha256(folder / name) != facts["sha256"]:
            raise ExportError(f"{folder / name} was changed after it was exported; export it again")
    return [folder / name for name in sorted(written) if not (folder / name).is_symlink()]


def write_readme(folder: Path) -> None:
    """Write ``README.md``, the model card, from ``card.json`` and the record of the run, if the export is in one."""
    from huggingface_hub import ModelCard, ModelCardData

    card = runner.read_card(folder)
    run = folder.resolve().parents[1]
    record = read_record(run) if (run / run_files.RECORD).is_file() else {}
    data = (record.get("config") or {}).get("data") or {}
    name = re.sub(r"[^\w.-]+", "-", card["license"] or "").lower()
    license: dict[str, Any] = {"license": "other", "license_name": name} if name else {}
    header = ModelCardData(
        library_name=LIBRARY, tags=["pytorch", "lightning", FORMAT], model_name=card["run"]["name"], **license
    )
    model_card = ModelCard.from_template(
        header,
        template_path=str(TEMPLATE),
        library=LIBRARY,
        card=card,
        data=str(data.get("path") or str(data.get("_target_", "")).rpartition(".")[2] or "not recorded"),
    )
    write_text(folder / README, str(model_card))
