"""The programs of ``planted/twentyeighth.py`` without their bugs, and what looks like them."""

import torch
from programs import digits, no_bug
from programs.planted.twentyeighth import Followed


def returns_up_to_now(rewards, gamma):
    found, total = [], 0.0
    for reward in rewards:
        total = reward + gamma * total
        found.append(total)
    return found


@no_bug()
def target_follows_the_network_by_its_state():
    class Net(Followed):
        def sync(self):
            self.target.load_state_dict(self.net.state_dict())

    return Net(), *digits()


@no_bug()
def target_follows_the_network_by_its_parameters():
    class Net(Followed):
        @torch.no_grad()
        def sync(self):
            for p, q in zip(self.net.parameters(), self.target.parameters(), strict=True):
                q.data.copy_(0.1 * p.data + 0.9 * q.data)

    return Net(), *digits()


@no_bug()
def average_is_validated_in_place_of_the_network():
    class Net(Followed):
        def sync(self):
            self.target.load_state_dict(self.net.state_dict())

        def on_validation_start(self):
            self.kept = {name: value.clone() for name, value in self.net.state_dict().items()}
            self.net.load_state_dict(self.target.state_dict())

        def on_validation_end(self):
            self.net.load_state_dict(self.kept)

    return Net(), *digits()


@no_bug()
def network_begins_as_its_target():
    class Net(Followed):
        def sync(self):
            self.target.load_state_dict(self.net.state_dict())

        def on_train_start(self):
            self.net.load_state_dict(self.target.state_dict())

    return Net(), *digits()
