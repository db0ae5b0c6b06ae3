from boltcutter.strategy.errors import StrategyError


def test_the_message_is_printed_without_a_traceback() -> None:
    assert StrategyError("trainer=dp: …").hide_traceback
