import numpy as np
import pytest

from boltcutter.data.permutation import permute


@pytest.mark.parametrize("length", [1, 2, 3, 1000, 4099])
def test_a_lazy_permutation_has_each_index_once(length: int) -> None:
    places = np.arange(length)
    found = permute(places, length, 5, 1)
    assert sorted(found.tolist()) == places.tolist()
    assert np.array_equal(found[length // 2 :], permute(places[length // 2 :], length, 5, 1))
    if length >= 1000:
        assert not np.array_equal(found, permute(places, length, 5, 2))
        assert abs(np.corrcoef(found, places)[0, 1]) < 0.1
        assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.1
