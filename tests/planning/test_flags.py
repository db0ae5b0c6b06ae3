from boltcutter.cli.main import FLAGS
from boltcutter.planning.flags import CHECK_FLAGS, DOCTOR_FLAGS


def test_flags_of_commands_are_none_of_all_commands() -> None:
    for flag in {**CHECK_FLAGS, **DOCTOR_FLAGS}:
        assert flag.startswith("--")
        assert flag not in FLAGS
