"""Plain weights as a repository of the Hugging Face Hub: ``config.json``, ``model.safetensors`` and a model card."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError
from boltcutter.project import LIBRARY
from boltcutter.run.folder import read_record
from boltcutter_export import runner
from boltcutter_export.settings import ExportError

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

FORMAT = "safetensors"  # the format of repositories of the Hub
LICENSES = ("apache-2.0", "bsd-2-clause", "bsd-3-clause", "cc-by-4.0", "gpl-3.0", "lgpl-3.0", "mit", "mpl-2.0")
TEMPLATE = Path(__file__).with_name("model_card.md")


def check(repo: str) -> None:
    """Check that a repository can be uploaded.

    Raises:
        ConfigError: The name is invalid, huggingface_hub is not installed, or no token was found.
    """
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise ConfigError(
            f"export.push={repo}: huggingface_hub is not installed; pip install '{LIBRARY}[export]'"
        ) from None
    if not re.fullmatch(r"[\w.-]+/[\w.-]{1,96}", repo):
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
        ConfigError: The upload is impossible.
        ExportError: The Hub refused, or cannot be reached.
    """
    check(repo)
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    files = [file for name in names for file in sorted((folder / name).iterdir())]
    paths = [file.name if file.parent.name == FORMAT else f"{file.parent.name}/{file.name}" for file in files]
    operations = [CommitOperationAdd(path, file) for path, file in zip(paths, files, strict=True)]
    try:
        api.create_repo(repo, exist_ok=True)
        commit = api.create_commit(repo, operations, commit_message="Upload model")
    except Exception as error:  # which HTTP library raises them depends on the version of huggingface_hub
        reason = " ".join(str(error).split())[:200]
        raise ExportError(f"export.push={repo}: {type(error).__name__}: {reason}; try again") from error
    return str(commit.commit_url)


def write_readme(folder: Path) -> None:
    """Write ``README.md``, the model card, from ``card.json`` and the record of the run, if the export is in one.

    Args:
        folder: Folder of an export of plain weights.
    """
    card = runner.read_card(folder)
    run = folder.resolve().parents[1]
    record = read_record(run) if (run / "record.json").is_file() else {}
    data = (record.get("config") or {}).get("data") or {}
    label = str(data.get("path") or str(data.get("_target_", "")).rpartition(".")[2] or "not recorded")
    names = [str(name) for name in card["classes"]]
    body = TEMPLATE.read_text().format(
        name=card["run"]["name"],
        library=LIBRARY,
        purpose=(find_pipeline(card) or card["kind"] or "predictions").replace("-", " ").replace("_", " "),
        inputs=describe(card["inputs"]),
        outputs=describe(card["outputs"]),
        data=f"`{label}`",
        classes=f" Classes: {', '.join(names)}." if names else "",
        metrics="\n".join(f"| {name} | {value:.4g} |" for name, value in card["test"].items()) or "| – | – |",
        run=card["run"]["id"],
        commit=card["commit"],
    )
    write_text(folder / "README.md", f"---\n{header(card, label, data).to_yaml()}\n---\n\n{body}")


def header(card: dict[str, Any], label: str, data: dict[str, Any]) -> ModelCardData:
    """The metadata of the model card."""
    from huggingface_hub import EvalResult, ModelCardData

    pipeline = find_pipeline(card)
    on_hub = str(data.get("_target_", "")).endswith(".HuggingFace") and re.fullmatch(r"[\w.-]+/[\w.-]+", label)
    results = [
        EvalResult(
            task_type=pipeline or "other",
            dataset_type=label if on_hub else label.lower(),
            dataset_name=label,
            dataset_split="test",
            metric_type=name.rpartition("/")[2],
            metric_value=value,
        )
        for name, value in card["test"].items()
    ]
    return ModelCardData(
        library_name=LIBRARY,
        tags=["pytorch", "lightning", FORMAT],
        datasets=[label] if on_hub else None,
        pipeline_tag=pipeline,
        model_name=card["run"]["name"],
        eval_results=results or None,
        **find_license(card["license"]),
    )


def find_pipeline(card: dict[str, Any]) -> str | None:
    """The task of the Hub; None if it has none for the model."""
    kind = card["kind"]
    if kind == "language_modeling":
        return "text-generation"
    if card["features"] and kind in ("classification", "regression"):
        return f"tabular-{kind}"
    return "image-classification" if kind == "classification" and len(card["inputs"][0]["shape"]) == 4 else None


def find_license(name: str | None) -> dict[str, Any]:
    """A license by its identifier at the Hub, or as another one."""
    known = re.sub(r"-(only|or-later)$", "", (name or "").lower())
    if known in LICENSES:
        return {"license": known}
    return {"license": "other", "license_name": re.sub(r"[^\w.-]+", "-", known)} if known else {}


def describe(tensors: list[dict[str, Any]]) -> str:
    """Names, dtypes and shapes of tensors."""
    return ", ".join(f"`{tensor['name']}` ({tensor['dtype']}, {tensor['shape']})" for tensor in tensors)
