from boltcutter.planning.device_checks import check_step


def test_a_device_computes_the_gradients_of_the_cpu() -> None:
    assert check_step("cpu") == "gradients differ from those of the CPU by 0.0e+00"
