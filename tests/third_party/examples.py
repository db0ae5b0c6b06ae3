"""Modules as in Lightning's examples and lightning-hydra-template, and modules without a data module."""

import random
from collections import deque, namedtuple

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.demos import Transformer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import Accuracy


def digits(count=192):
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels[:count], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.tensor(labels[:count]))


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 32):
        super().__init__()
        dataset = digits()
        self.train_set, self.val_set, self.test_set = random_split(
            dataset, [128, 32, 32], generator=torch.Generator().manual_seed(42)
        )
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test_set, batch_size=self.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.test_set, batch_size=self.batch_size)


class LitAutoEncoder(L.LightningModule):
    def __init__(self, hidden_dim: int = 16, learning_rate: float = 10e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        return self._common_step(batch, batch_idx, "train")

    def validation_step(self, batch, batch_idx):
        self._common_step(batch, batch_idx, "val")

    def test_step(self, batch, batch_idx):
        self._common_step(batch, batch_idx, "test")

    def predict_step(self, batch, batch_idx, dataloader_idx=None):
        return self(self._prepare_batch(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    def _prepare_batch(self, batch):
        x, _ = batch
        return x.view(x.size(0), -1)

    def _common_step(self, batch, batch_idx, stage: str):
        x = self._prepare_batch(batch)
        loss = F.mse_loss(x, self(x))
        self.log(f"{stage}_loss", loss, on_step=True)
        return loss


class SequenceDataset(Dataset):
    """Windows of a token stream."""

    def __init__(self, vocab_size=32, block_size=12, count=96):
        generator = torch.Generator().manual_seed(0)
        self.data = torch.randint(vocab_size, (count + block_size + 1,), generator=generator)
        self.vocab_size, self.block_size = vocab_size, block_size

    def __len__(self):
        return len(self.data) - self.block_size - 1

    def __getitem__(self, index):
        chunk = self.data[index : index + self.block_size + 1]
        return chunk[:-1], chunk[1:]


class SequenceDataModule(L.LightningDataModule):
    def setup(self, stage):
        self.dataset = SequenceDataset()
        n = len(self.dataset)
        self.train, self.val, self.test = random_split(
            self.dataset, [n - 32, 16, 16], torch.Generator().manual_seed(42)
        )

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=16, shuffle=False)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=16, shuffle=False)


class LanguageModel(L.LightningModule):
    def __init__(self, vocab_size=32):
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size, ninp=16, nhead=2, nhid=16, nlayers=1)

    def training_step(self, batch, batch_idx):
        input, target = batch
        output = self.model(input, target)
        loss = F.nll_loss(output, target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        input, target = batch
        output = self.model(input, target)
        loss = F.nll_loss(output, target.view(-1))
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        input, target = batch
        output = self.model(input, target)
        loss = F.nll_loss(output, target.view(-1))
        self.log("test_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MilestonesFinetuning(BaseFinetuning):
    def __init__(self, milestone: int = 1, train_bn: bool = False):
        super().__init__()
        self.milestone = milestone
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module):
        self.freeze(modules=pl_module.feature_extractor, train_bn=self.train_bn)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.milestone:
            self.unfreeze_and_add_param_group(
                modules=pl_module.feature_extractor[-2:], optimizer=optimizer, train_bn=self.train_bn
            )


class TransferLearningModel(L.LightningModule):
    def __init__(self, milestone: int = 1, lr: float = 1e-2, lr_scheduler_gamma: float = 1e-1, num_classes: int = 10):
        super().__init__()
        self.milestone, self.lr, self.lr_scheduler_gamma = milestone, lr, lr_scheduler_gamma
        self.feature_extractor = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1)
        )
        self.fc = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, num_classes))
        self.train_acc = Accuracy(task="multiclass", num_classes=num_classes)
        self.valid_acc = Accuracy(task="multiclass", num_classes=num_classes)
        self.save_hyperparameters()

    def configure_callbacks(self):
        return [MilestonesFinetuning(self.milestone)]

    def forward(self, x):
        return self.fc(self.feature_extractor(x).squeeze(-1).squeeze(-1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_logits = self.forward(x)
        train_loss = F.cross_entropy(y_logits, y)
        self.log("train_acc", self.train_acc(y_logits, y), prog_bar=True)
        return train_loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", self.valid_acc(self.forward(x), y), prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        y_logits = self(x)
        self.log("test_loss", F.cross_entropy(y_logits, y))
        return y_logits.argmax(dim=1)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self):
        parameters = filter(lambda p: p.requires_grad, self.parameters())
        optimizer = torch.optim.Adam(parameters, lr=self.lr)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=self.lr_scheduler_gamma)
        return [optimizer], [scheduler]


class Generator(nn.Module):
    def __init__(self, latent_dim: int = 8, img_shape: tuple = (1, 8, 8)):
        super().__init__()
        self.img_shape = img_shape
        self.model = nn.Sequential(nn.Linear(latent_dim, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, z):
        return self.model(z).view(z.size(0), *self.img_shape)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, img):
        return self.model(img.view(img.size(0), -1))


class GAN(L.LightningModule):
    def __init__(self, latent_dim: int = 8, lr: float = 2e-4, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(latent_dim=self.hparams.latent_dim)
        self.discriminator = Discriminator()
        self.validation_z = torch.randn(8, self.hparams.latent_dim)
        self.example_input_array = torch.zeros(2, self.hparams.latent_dim)

    def forward(self, z):
        return self.generator(z)

    @staticmethod
    def adversarial_loss(y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        imgs, _ = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)

        self.toggle_optimizer(opt_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        sample_imgs = self(self.validation_z.type_as(self.generator.model[0].weight))
        experiment = self.logger.experiment
        if hasattr(experiment, "add_images"):
            experiment.add_images("validation/generated_images", sample_imgs, self.current_epoch)

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], []


Experience = namedtuple("Experience", ["state", "action", "reward", "done", "new_state"])


class Walk:
    """An environment with the interface of gymnasium: walk along a line to its right end."""

    def reset(self):
        self.place = 3
        return [float(self.place)]

    def step(self, action):
        self.place += 1 if action else -1
        return [float(self.place)], float(self.place == 6), self.place in (0, 6), {}


class ReplayBuffer:
    def __init__(self, capacity: int):
        self.buffer = deque(maxlen=capacity)

    def __len__(self):
        return len(self.buffer)

    def append(self, experience):
        self.buffer.append(experience)

    def sample(self, batch_size: int):
        experiences = [random.choice(self.buffer) for _ in range(batch_size)]
        states, actions, rewards, dones, next_states = zip(*experiences, strict=True)
        return states, actions, rewards, dones, next_states


class RLDataset(IterableDataset):
    """Experiences that the agent collects while training."""

    def __init__(self, buffer: ReplayBuffer, sample_size: int = 64):
        self.buffer, self.sample_size = buffer, sample_size

    def __iter__(self):
        states, actions, rewards, dones, new_states = self.buffer.sample(self.sample_size)
        for i in range(len(dones)):
            yield torch.tensor(states[i]), actions[i], rewards[i], dones[i], torch.tensor(new_states[i])


class DQNLightning(L.LightningModule):
    def __init__(self, lr: float = 1e-2, gamma: float = 0.99, sync_rate: int = 4, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target_net = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2))
        self.env = Walk()
        self.state = self.env.reset()
        self.buffer = ReplayBuffer(200)
        self.total_reward = 0.0
        for _ in range(64):
            self.play_step(epsilon=1.0)

    @torch.no_grad()
    def play_step(self, epsilon: float):
        greedy = int(self.net(torch.tensor([self.state], device=self.device)).argmax())
        action = random.randrange(2) if random.random() < epsilon else greedy
        new_state, reward, done, _ = self.env.step(action)
        self.buffer.append(Experience(self.state, action, reward, done, new_state))
        self.state = self.env.reset() if done else new_state
        return reward, done

    def forward(self, x):
        return self.net(x)

    def dqn_mse_loss(self, batch):
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
            next_values[dones] = 0.0
        return F.mse_loss(values, next_values * self.hparams.gamma + rewards.to(values.dtype))

    def training_step(self, batch, nb_batch):
        reward, _ = self.play_step(max(0.01, 1.0 - self.global_step / 100))
        self.total_reward += reward
        loss = self.dqn_mse_loss(batch)
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"reward": reward, "train_loss": loss})
        self.log("total_reward", self.total_reward, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)

    def train_dataloader(self):
        return DataLoader(RLDataset(self.buffer), batch_size=self.hparams.batch_size)


class MNISTDataModule(L.LightningDataModule):
    def __init__(
        self,
        data_dir: str = "data/",
        train_val_test_split: tuple[int, int, int] = (128, 32, 32),
        batch_size: int = 32,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train = None
        self.data_val = None
        self.data_test = None
        self.batch_size_per_device = batch_size

    @property
    def num_classes(self) -> int:
        return 10

    def prepare_data(self) -> None:
        digits()

    def setup(self, stage: str | None = None) -> None:
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size != 0:
                raise RuntimeError(f"Batch size is not divisible by the number of devices ({self.trainer.world_size}).")
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if not self.data_train and not self.data_val and not self.data_test:
            self.data_train, self.data_val, self.data_test = random_split(
                dataset=digits(),
                lengths=self.hparams.train_val_test_split,
                generator=torch.Generator().manual_seed(42),
            )

    def _loader(self, dataset, shuffle):
        return DataLoader(
            dataset=dataset,
            batch_size=self.batch_size_per_device,
            num_workers=self.hparams.num_workers,
            pin_memory=self.hparams.pin_memory,
            shuffle=shuffle,
        )

    def train_dataloader(self):
        return self._loader(self.data_train, True)

    def val_dataloader(self):
        return self._loader(self.data_val, False)

    def test_dataloader(self):
        return self._loader(self.data_test, False)

    def teardown(self, stage: str | None = None) -> None:
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict) -> None:
        pass


class SimpleDenseNet(nn.Module):
    def __init__(self, input_size: int = 64, lin1_size: int = 32, output_size: int = 10) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(input_size, lin1_size), nn.BatchNorm1d(lin1_size), nn.ReLU(), nn.Linear(lin1_size, output_size)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch_size, _, _, _ = x.size()
        return self.model(x.view(batch_size, -1))


class MNISTLitModule(L.LightningModule):
    def __init__(
        self,
        net: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler,
        compile: bool,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.criterion = torch.nn.CrossEntropyLoss()
        self.train_acc = Accuracy(task="multiclass", num_classes=10)
        self.val_acc = Accuracy(task="multiclass", num_classes=10)
        self.test_acc = Accuracy(task="multiclass", num_classes=10)
        self.train_loss = MeanMetric()
        self.val_loss = MeanMetric()
        self.test_loss = MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.forward(x)
        loss = self.criterion(logits, y)
        preds = torch.argmax(logits, dim=1)
        return loss, preds, y

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        acc = self.val_acc.compute()
        self.val_acc_best(acc)
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.test_loss(loss)
        self.test_acc(preds, targets)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def setup(self, stage: str) -> None:
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is not None:
            scheduler = self.hparams.scheduler(optimizer=optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1},
            }
        return {"optimizer": optimizer}


class OwnLoaders(L.LightningModule):
    """A module as Lightning's BoringModel: two validation dataloaders of its own, and no training metrics."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def forward(self, x):
        return self.layer(x)

    def loss(self, preds):
        return F.mse_loss(preds, torch.ones_like(preds))

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(self(batch))}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(self(batch)))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(self(batch)))

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def _loader(self, count=32):
        return DataLoader(torch.randn(count, 32, generator=torch.Generator().manual_seed(count)), batch_size=8)

    def train_dataloader(self):
        return self._loader(64)

    def val_dataloader(self):
        return [self._loader(), self._loader(16)]

    def test_dataloader(self):
        return self._loader()

    def predict_dataloader(self):
        return self._loader()
