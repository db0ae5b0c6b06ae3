import pytest

from boltcutter.task.errors import CompilerError, TotalStepsError


@pytest.mark.parametrize("error", [CompilerError, TotalStepsError])
def test_users_see_the_message_without_a_traceback(error: type[Exception]) -> None:
    assert error("task.compile=xla ...").hide_traceback  # type: ignore[attr-defined]
