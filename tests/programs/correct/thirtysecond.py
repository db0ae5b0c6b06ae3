"""The programs of ``thirtyfirst.py`` and ``thirtysecond.py`` of ``planted`` without their bugs."""

import torch
from programs import Base, digits, halves, no_bug, segments
from programs.planted import thirtyfirst as planted
from torch.utils.data import DataLoader


@no_bug()
def trials_are_put_first_by_a_transpose():
    return planted.Waves(), *planted.waves(planted.trials_first)


@no_bug()
def own_average_moves_with_each_step():
    return planted.OwnAverage(), *digits()


@no_bug(max_epochs=-1, max_steps=40)
def average_of_a_training_by_steps():
    return planted.OwnAverage(), *digits()


@no_bug()
def own_hook_restores_the_mode():
    return planted.Looking(), *digits()


class Shuffled(planted.Lessons):
    """Draws its order by a seed and the epoch, as a resumed run needs it."""

    def train_dataloader(self):
        seed = 7 + self.trainer.current_epoch
        order = torch.Generator().manual_seed(seed)
        return DataLoader(digits(loaded=False)[0], 32, shuffle=True, generator=order)


@no_bug()
def order_begins_at_the_epoch_of_resuming():
    return Base(), Shuffled(), None


@no_bug()
def overlap_gets_shares():
    return planted.Marked(), *halves(*segments(), split=240)


@no_bug()
def digits_have_other_neighbours():
    return planted.Found(), *digits()


@no_bug()
def second_nearest_of_each_digit_is_taken():
    class Net(planted.Found):
        def nearest(self, alike):
            return alike.topk(2).indices[:, 1]

    return Net(), *digits()


@no_bug(reload_dataloaders_every_n_epochs=1)
def lessons_are_made_for_each_epoch():
    return Base(), planted.Lessons(), None


@no_bug(callbacks=lambda: [planted.ThawAll()])
def thawed_body_gets_a_group():
    return planted.Headed(), *digits()
