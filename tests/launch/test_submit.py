from pathlib import Path

import pytest

from boltcutter.config.errors import ConfigError

from .conftest import Launch


def test_a_refused_submission_creates_no_folder(launch: Launch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sbatch is not installed"):
        launch("launch=slurm", f"folder={tmp_path}/array", "launch.array=seed=1,2")
    assert not (tmp_path / "array").exists()


def test_an_unconfirmed_submission_keeps_its_folder(launch: Launch, tmp_path: Path) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/bash\necho 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1\n")
    sbatch.chmod(0o755)
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=f"may or may not be queued: .* remove {folder} and launch again"):
        launch("launch=slurm", f"folder={folder}")
    assert (folder / "job.sh").is_file()
