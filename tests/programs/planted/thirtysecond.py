"""Arrays whose axes a function of this file reshapes, as it would move them."""

from programs import bug
from programs.planted.thirtyfirst import Waves, waves


def trials_by_reshape(wave):
    count = wave.shape[-1]
    return wave.reshape(count, 4, 24)


@bug("reshape-not-transpose")
def trials_are_put_first_by_a_reshape():
    class Net(Waves):
        """Is of this file, all functions of which are read."""

    return Net(), *waves(trials_by_reshape)
