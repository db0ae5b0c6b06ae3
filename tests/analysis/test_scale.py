from boltcutter.analysis.scale import Scale, rounded


def test_fractions_are_written_in_points() -> None:
    scale = Scale.of("val/accuracy", "max", [0.5, 0.9])
    assert (scale.size(0.0123), scale.signed(0.0123)) == ("1.2 points", "+1.23 points")
    assert Scale.of("val/accuracy", "max", [50.0, 90.0]).size(1.0) == "1 in val/accuracy"
    assert Scale.of("val/loss", "min", [0.5]).interval((-0.1, 0.2)) == "-0.10 to 0.20"
    assert rounded(123.4, 2) == "123"
