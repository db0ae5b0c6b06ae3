import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from boltcutter.callback.announced import Announced
from boltcutter.environment import announcement, hang


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux names memory files in /proc")
def test_a_rank_that_was_forked_announces_itself_until_its_function_ends(tmp_path: Path) -> None:
    def state() -> tuple[Any, Any]:
        (found,) = hang.find(str(tmp_path.resolve()))
        found.close()
        return found.facts["rank"], found.facts["state"]

    callback, trainer = Announced(str(tmp_path), 60.0), cast(Any, SimpleNamespace(global_rank=2))
    try:
        callback.setup(trainer, cast(Any, None), "fit")
        assert state() == (2, "running")
        callback.on_exception(trainer, cast(Any, None), ZeroDivisionError())
        assert state() == (2, "failed")
        callback.teardown(trainer, cast(Any, None), "fit")
        assert state() == (2, "done")
    finally:
        announcement.withdraw()
