import subprocess
import sys
from pathlib import Path

import pytest

from boltcutter_trust import internals


@pytest.mark.parametrize(("name", "reason"), internals.USED.items())
def test_each_private_name_is_used_in_the_file_that_is_given_with_a_reason(name: str, reason: str) -> None:
    file, _, why = reason.partition(": ")
    assert name in Path(internals.__file__).with_name(f"{file}.py").read_text()
    assert why


def test_reading_a_checkpoint_does_not_import_lightning() -> None:
    code = (
        "import sys, boltcutter_trust.unpickle; sys.exit('lightning' in sys.modules or 'torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
