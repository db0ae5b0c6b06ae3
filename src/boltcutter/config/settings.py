"""The settings of a command, as composed: typed at the top level, plain values below, and never changed in place.

OmegaConf, in which they are kept with their references, is used in this package only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from boltcutter.config import redaction, values
from boltcutter.config.errors import ConfigError


@dataclass(kw_only=True)
class TopLevel:
    """The settings of the top level that are no components, with what each may be; ``train.yaml`` explains them.

    Args:
        choices: The selected option of each config group.
        ckpt: Checkpoint to resume from: best, last, its name or path.
    """

    name: str
    choices: dict[str, str]
    tags: list[str] = field(default_factory=list)
    seed: int = 0
    runs: Path = Path("runs")
    folder: Path | None = None
    checkpoints: str | None = None
    timeout: float = 1800.0
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    init_from: Path | None = None
    test: bool = True
    final_validation: bool = True
    report: bool = True
    resume: Path | None = None
    ckpt: str | None = None
    resume_exact: bool = True
    reproduce: Path | None = None


DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(TopLevel) if each.default is not MISSING}
DEFAULTS |= {
    "name": "",
    "runs": "runs",
    "choices": {},
    "trainer": {},
    "task": {},
    "data": {},
    "callback": {},
    "logger": {},
}


@dataclass(frozen=True)
class RunPlace:
    """Where a run writes.

    Args:
        folder: Its folder, on this machine.
        checkpoints: Folder or URL of its checkpoints, without a slash at the end.
    """

    folder: Path
    checkpoints: str


class Settings:
    """The settings of a command, such as a training: attributes are those of ``TopLevel`` and the config groups.

    An attribute is a plain value with all references resolved; where the configuration has none, the default of
    ``TopLevel``, an empty mapping for a group that every training has, or else None. Paths are texts, as they may be
    URLs. References are resolved when a value is read: one that needs what only another machine has, such as a
    variable, is an error only where it is used.

    Args:
        content: Values by key, as read from YAML: references as texts.
    """

    name: str
    choices: Mapping[str, str]
    seed: int
    runs: str
    folder: str | None
    checkpoints: str | None
    timeout: float
    matmul_precision: Literal["highest", "high", "medium"]
    init_from: str | None
    test: bool
    final_validation: bool
    report: bool
    resume: str | None
    ckpt: str | None
    resume_exact: bool
    reproduce: str | None
    trainer: Mapping[str, Any]
    task: Mapping[str, Any]
    data: Mapping[str, Any]
    model: Mapping[str, Any] | None
    optimizer: Mapping[str, Any] | None
    callback: Mapping[str, Mapping[str, Any] | None]
    logger: Mapping[str, Mapping[str, Any] | None]

    def __init__(self, content: Mapping[str, Any] | DictConfig) -> None:
        self.__dict__["_content"] = content if isinstance(content, DictConfig) else DictConfig(content)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        found = self.__dict__[key] = self.get(key, DEFAULTS.get(key))
        return found

    def __setattr__(self, key: str, value: Any) -> None:
        raise AttributeError(f"{key}: settings do not change; use changed()")

    def __contains__(self, key: str) -> bool:
        return key in self._content

    def __iter__(self) -> Iterator[str]:
        return map(str, self._content)

    def __repr__(self) -> str:
        return f"Settings({self.written})"

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the top level, with references resolved; ``default`` if there is none, or null.

        Raises:
            ConfigError: A reference points to nothing.
        """
        try:
            found = self._content.get(key)
            if isinstance(found, values.CONTAINERS):
                found = OmegaConf.to_container(found, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(values.format_unresolved(error, self._content)) from None
        return default if found is None else found

    @property
    def texts(self) -> dict[str, Any]:
        """All values, references as they are written, and ``Written`` where the text may be meant."""
        return dict(values.with_texts(self._content))

    @property
    def has_texts(self) -> bool:
        """Whether a value may be meant as text: until an annotation has decided."""
        return values.has_written(self._content)

    @property
    def written(self) -> dict[str, Any]:
        """All values, references as they are written."""
        return values.plain(self._content)

    @property
    def resolved(self) -> dict[str, Any]:
        """All values, references resolved.

        Raises:
            ConfigError: A reference points to nothing.
        """
        return values.resolved(self._content)

    @property
    def redacted(self) -> dict[str, Any]:
        """All values, references resolved and secrets masked.

        Raises:
            ConfigError: A reference points to nothing.
        """
        return redaction.redact(self.resolved, self.written)

    @property
    def place(self) -> RunPlace:
        """Where the run writes, once it has a folder.

        Raises:
            ValueError: It has none yet.
        """
        if not self.folder:
            raise ValueError("folder is not set yet")
        return RunPlace(Path(self.folder), str(self.checkpoints).rstrip("/"))

    def changed(self, new: Mapping[str, Any]) -> Settings:
        """Return the settings with other values; mappings are merged."""
        node = self._content.copy()
        node.merge_with(new)
        return Settings(node)

    def without(self, *keys: str) -> Settings:
        """Return the settings without some keys of the top level."""
        return Settings({key: value for key, value in self.texts.items() if key not in keys})

    def keys_below(self) -> Iterator[str]:
        """List every dotted key."""
        return values.paths(self._content)

    def leaf_values(self) -> Iterator[tuple[str, Any, Any]]:
        """List the dotted key of each value, as it is written, and resolved; None if it cannot be."""
        return values.leaf_values(self._content)

    def target_of(self, key: str) -> str:
        """The dotted key to which a key refers, as for ``task.model: ${model}``; itself if it refers to none."""
        return values.resolve_reference(self._content, key)
