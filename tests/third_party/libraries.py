"""Modules as in libraries: images, text, adapters, graphs, forecasts, segmentation and self-supervision."""

import math
from collections import OrderedDict, UserDict
from dataclasses import dataclass, fields
from pathlib import Path

import lightning as L
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MultilabelAUROC, MultilabelF1Score

# ---------------------------------------------------------------- timm

REGISTRY = {}


def register_model(factory):
    REGISTRY[factory.__name__] = factory
    return factory


@register_model
def tinynet(num_classes=10, in_chans=1, **kwargs):
    return nn.Sequential(
        nn.Conv2d(in_chans, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, num_classes)
    )


def create_model(model_name, pretrained=False, **kwargs):
    return REGISTRY[model_name](**kwargs)


def param_groups_weight_decay(model, weight_decay):
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]


class CosineScheduler:
    """A scheduler as in timm: not a torch class, stepped with the epoch, and with a ``state_dict``."""

    def __init__(self, optimizer, t_initial, lr_min=0.0):
        self.optimizer, self.t_initial, self.lr_min = optimizer, t_initial, lr_min
        self.base_values = [group["lr"] for group in optimizer.param_groups]

    def state_dict(self):
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state_dict):
        self.__dict__.update(state_dict)

    def step(self, epoch, metric=None):
        share = 0.5 * (1 + math.cos(math.pi * min(epoch, self.t_initial) / self.t_initial))
        for group, value in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = self.lr_min + (value - self.lr_min) * share


class TimmClassifier(L.LightningModule):
    def __init__(self, model_name: str, num_classes: int = 10, lr: float = 1e-2, weight_decay: float = 0.05, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.model = create_model(model_name, num_classes=num_classes, **kwargs)
        metrics = MetricCollection(
            {"top1": MulticlassAccuracy(num_classes), "top5": MulticlassAccuracy(num_classes, 5)}
        )
        self.valid_metrics = metrics.clone(prefix="val_")
        self.test_metrics = metrics.clone(prefix="test_")

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, target = batch
        loss = F.cross_entropy(self(x), target, label_smoothing=0.1)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, target = batch
        self.valid_metrics.update(self(x), target)

    def on_validation_epoch_end(self):
        self.log_dict(self.valid_metrics.compute(), sync_dist=True)
        self.valid_metrics.reset()

    def test_step(self, batch, batch_idx):
        x, target = batch
        self.test_metrics(self(x), target)
        self.log_dict(self.test_metrics)

    def predict_step(self, batch, batch_idx):
        x, _ = batch
        return self(x).softmax(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(param_groups_weight_decay(self.model, self.hparams.weight_decay), self.hparams.lr)
        return [optimizer], [{"scheduler": CosineScheduler(optimizer, t_initial=20), "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch)


# ---------------------------------------------------------------- transformers, PEFT


class PretrainedConfig:
    def __init__(self, **kwargs):
        self.num_labels = kwargs.pop("num_labels", 2)
        for key, value in kwargs.items():
            setattr(self, key, value)


class TinyConfig(PretrainedConfig):
    model_type = "tiny"

    def __init__(self, vocab_size=50, hidden_size=16, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**kwargs)


class ModelOutput(OrderedDict):
    """A dataclass as in transformers, whose fields are also keys and indices."""

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


@dataclass
class SequenceClassifierOutput(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class BatchEncoding(UserDict):
    """The output of a tokenizer: a mapping that is not a dict."""

    def __getattr__(self, item):
        try:
            return self.data[item]
        except KeyError:
            raise AttributeError(item) from None

    def to(self, device, non_blocking=False):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class TinyForSequenceClassification(nn.Module):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, input_ids=None, attention_mask=None, labels=None, return_dict=True):
        mask = attention_mask.unsqueeze(-1)
        hidden = (self.embeddings(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.classifier(torch.tanh(self.dense(hidden)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class TextDataset(Dataset):
    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.examples = []
        for _ in range(count):
            label = int(rng.integers(2))
            tokens = rng.integers(1 + 25 * label, 25 + 25 * label, size=int(rng.integers(3, 12)))
            self.examples.append({"input_ids": tokens.tolist(), "label": label})

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


def collate(examples):
    """Pads to the longest sequence of the batch."""
    longest = max(len(e["input_ids"]) for e in examples)
    ids = torch.tensor([e["input_ids"] + [0] * (longest - len(e["input_ids"])) for e in examples])
    labels = torch.tensor([e["label"] for e in examples])
    return BatchEncoding({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels})


class GLUEDataModule(L.LightningDataModule):
    def __init__(self, task_name: str = "mrpc", train_batch_size: int = 16, eval_batch_size: int = 16, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.train_batch_size, self.eval_batch_size = train_batch_size, eval_batch_size

    def setup(self, stage: str):
        self.dataset = {"train": TextDataset(96, 0), "validation": TextDataset(32, 1), "test": TextDataset(27, 2)}

    def train_dataloader(self):
        return DataLoader(self.dataset["train"], batch_size=self.train_batch_size, shuffle=True, collate_fn=collate)

    def val_dataloader(self):
        return DataLoader(self.dataset["validation"], batch_size=self.eval_batch_size, collate_fn=collate)

    def test_dataloader(self):
        return DataLoader(self.dataset["test"], batch_size=self.eval_batch_size, collate_fn=collate)

    def predict_dataloader(self):
        return self.test_dataloader()


class GLUETransformer(L.LightningModule):
    def __init__(
        self,
        config: PretrainedConfig,
        task_name: str = "mrpc",
        learning_rate: float = 2e-3,
        warmup_steps: int = 2,
        **kwargs,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.config = config
        self.model = TinyForSequenceClassification(config)
        self.outputs = []

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        outputs = self(**batch)
        return outputs[0]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        val_loss, logits = self(**batch)[:2]
        self.outputs.append({"loss": val_loss, "preds": logits.argmax(dim=1), "labels": batch["labels"]})

    def on_validation_epoch_end(self):
        preds = torch.cat([x["preds"] for x in self.outputs]).detach().cpu().numpy()
        labels = torch.cat([x["labels"] for x in self.outputs]).detach().cpu().numpy()
        loss = torch.stack([x["loss"] for x in self.outputs]).mean()
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("accuracy", float((preds == labels).mean()), prog_bar=True, sync_dist=True)
        self.outputs.clear()

    def test_step(self, batch, batch_idx):
        outputs = self(**batch)
        self.log("test_loss", outputs.loss, batch_size=len(batch["labels"]))
        return outputs

    def predict_step(self, batch, batch_idx):
        return self(**batch)

    def configure_optimizers(self):
        no_decay = ["bias", "LayerNorm.weight"]
        groups = [
            {
                "params": [p for n, p in self.model.named_parameters() if not any(nd in n for nd in no_decay)],
                "weight_decay": 0.01,
            },
            {
                "params": [p for n, p in self.model.named_parameters() if any(nd in n for nd in no_decay)],
                "weight_decay": 0.0,
            },
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate)
        total, warmup = self.trainer.estimated_stepping_batches, self.hparams.warmup_steps
        scheduler = LambdaLR(
            optimizer, lambda step: min(1.0, step / warmup) * max(0.0, (total - step) / max(1, total - warmup))
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int, lora_alpha: float):
        super().__init__()
        self.base, self.scaling = base, lora_alpha / r
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * 0.02)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        for parameter in base.parameters():
            parameter.requires_grad = False

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T * self.scaling


class LoraFineTuner(L.LightningModule):
    """Leaves frozen weights out of checkpoints, as they come from the pretrained model."""

    strict_loading = False

    def __init__(self, config: dict | None = None, r: int = 2, lora_alpha: float = 4.0, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1234)  # the pretrained weights
        self.model = TinyForSequenceClassification(TinyConfig(**(config or {})))
        self.model.requires_grad_(False)
        self.model.dense = LoraLinear(self.model.dense, r, lora_alpha)
        self.model.classifier.requires_grad_(True)

    def state_dict(self, *args, **kwargs):
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in trained}

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.model(**batch).loss, sync_dist=True)

    def test_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.log("test/accuracy", (output.logits.argmax(-1) == batch["labels"]).float().mean(), sync_dist=True)
        return {"logits": output.logits, "labels": batch["labels"]}

    def predict_step(self, batch, batch_idx):
        return self.model(**batch).logits.argmax(-1)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.hparams.lr)


# ---------------------------------------------------------------- graphs


class Graph:
    def __init__(self, x, edge_index, y):
        self.x, self.edge_index, self.y = x, edge_index, y


class GraphBatch:
    """A batch of graphs merged into one, without ``len`` and items."""

    def __init__(self, graphs):
        sizes = [len(g.x) for g in graphs]
        starts = np.cumsum([0, *sizes[:-1]])
        self.x = torch.cat([g.x for g in graphs])
        self.edge_index = torch.cat([g.edge_index + int(s) for g, s in zip(graphs, starts, strict=True)], dim=1)
        self.y = torch.stack([g.y for g in graphs])
        self.batch = torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(sizes))
        self.num_graphs = len(graphs)

    def to(self, device, non_blocking=False):
        for name in ("x", "edge_index", "y", "batch"):
            setattr(self, name, getattr(self, name).to(device))
        return self


class MoleculeDataset(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.graphs = []
        for _ in range(count):
            n = int(torch.randint(3, 9, (), generator=generator))
            x = torch.randn(n, 4, generator=generator)
            ring = torch.stack([torch.arange(n), torch.arange(n).roll(-1)])
            self.graphs.append(Graph(x, torch.cat([ring, ring.flip(0)], dim=1), x.sum(0)[:2]))

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, index):
        return self.graphs[index]


class MoleculeDataModule(L.LightningDataModule):
    def __init__(self, root: Path = Path("molecules"), batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def _loader(self, count, seed, shuffle=False):
        dataset = MoleculeDataset(count, seed)
        return DataLoader(dataset, batch_size=self.hparams.batch_size, shuffle=shuffle, collate_fn=GraphBatch)

    def train_dataloader(self):
        return self._loader(64, 0, True)

    def val_dataloader(self):
        return self._loader(32, 1)

    def test_dataloader(self):
        return self._loader(27, 2)

    def predict_dataloader(self):
        return self._loader(27, 2)


class MSE(Metric):
    """A loss that is a metric, as in chemprop."""

    def __init__(self, task_weights=1.0):
        super().__init__()
        self.register_buffer("task_weights", torch.as_tensor(task_weights, dtype=torch.float))
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, preds, targets):
        self.total += ((preds - targets) ** 2 * self.task_weights).sum()
        self.count += targets.numel()

    def compute(self):
        return self.total / self.count


class MPNN(L.LightningModule):
    def __init__(self, message_passing: nn.Module, criterion: Metric | None = None, metrics: list | None = None):
        super().__init__()
        self.save_hyperparameters(ignore=["message_passing", "criterion"])
        self.hparams["cls"] = self.__class__
        self.message_passing = message_passing
        self.head = nn.Linear(message_passing.out_features, 2)
        self.unused_branch = None
        self.criterion = criterion or MSE()
        self.metrics = nn.ModuleList([*(metrics or [MSE()]), self.criterion.clone()])

    def forward(self, bmg):
        h = torch.relu(self.message_passing(bmg.x))
        h = h + torch.zeros_like(h).index_add_(0, bmg.edge_index[1], h[bmg.edge_index[0]])
        return self.head(h.new_zeros(bmg.num_graphs, h.shape[1]).index_add_(0, bmg.batch, h))

    def training_step(self, batch, batch_idx):
        loss = self.criterion(self(batch), batch.y)
        self.log("train_loss", self.criterion, prog_bar=True, on_epoch=True, batch_size=batch.num_graphs)
        return loss

    def _evaluate(self, batch, label):
        preds = self(batch)
        for i, metric in enumerate(self.metrics[:-1]):
            metric.update(preds, batch.y)
            self.log(f"{label}/mse{i}", metric, batch_size=batch.num_graphs)

    def validation_step(self, batch, batch_idx=0):
        self._evaluate(batch, "val")
        self.metrics[-1](self(batch), batch.y)
        self.log("val_loss", self.metrics[-1], batch_size=batch.num_graphs, prog_bar=True)

    def test_step(self, batch, batch_idx=0):
        self._evaluate(batch, "test")

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), 1e-2)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": ReduceLROnPlateau(opt), "monitor": "val_loss"}}


# ---------------------------------------------------------------- forecasting


class TimeSeriesDataSet(Dataset):
    def __init__(self, data: pd.DataFrame, target: str = "value", max_encoder_length: int = 8, max_prediction_length=2):
        self.target, self.encoder, self.horizon = target, max_encoder_length, max_prediction_length
        self.scale = np.float64(data[target].std())
        self.values = torch.tensor(data[target].to_numpy() / self.scale, dtype=torch.float32)

    def get_parameters(self):
        return {"target": self.target, "scale": self.scale, "start": pd.Timestamp("2020-01-01"), "cache": Path("cache")}

    def __len__(self):
        return len(self.values) - self.encoder - self.horizon + 1

    def __getitem__(self, index):
        past = self.values[index : index + self.encoder]
        future = self.values[index + self.encoder : index + self.encoder + self.horizon]
        return {"encoder_cont": past, "groups": torch.tensor([0])}, (future, torch.ones_like(future))


def waves(length: int = 120) -> TimeSeriesDataSet:
    time = np.arange(length)
    return TimeSeriesDataSet(pd.DataFrame({"time_idx": time, "value": np.sin(time / 5)}))


class ForecastDataModule(L.LightningDataModule):
    def __init__(self, dataset: TimeSeriesDataSet, batch_size: int = 16):
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size

    def _loader(self, start, end, shuffle=False):
        part = Subset(self.dataset, range(start, min(end, len(self.dataset))))
        return DataLoader(part, batch_size=self.batch_size, shuffle=shuffle)

    def train_dataloader(self):
        return self._loader(0, 64, True)

    def val_dataloader(self):
        return self._loader(64, 88)

    def test_dataloader(self):
        return self._loader(88, 111)

    predict_dataloader = test_dataloader


class QuantileLoss(Metric):
    """A loss metric with a list state."""

    def __init__(self, quantiles=None):
        super().__init__()
        self.quantiles = quantiles or [0.1, 0.5, 0.9]
        self.add_state("losses", [], dist_reduce_fx="cat")

    def loss(self, y_pred, target):
        errors = target.unsqueeze(-1) - y_pred
        return torch.stack(
            [torch.max((q - 1) * errors[..., i], q * errors[..., i]) for i, q in enumerate(self.quantiles)]
        )

    def update(self, y_pred, target):
        self.losses.append(self.loss(y_pred, target[0]).mean(dim=(0, 2)) * target[1].mean(1))

    def compute(self):
        return torch.cat(list(self.losses) if isinstance(self.losses, list) else [self.losses]).mean()


class MAE(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("errors", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("lengths", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, y_pred, target):
        self.errors += (y_pred[..., 1] - target[0]).abs().sum()
        self.lengths += target[0].numel()

    def compute(self):
        return self.errors / self.lengths


class Forecaster(L.LightningModule):
    def __init__(
        self,
        hidden_size: int = 16,
        encoder_length: int = 8,
        horizon: int = 2,
        loss: Metric | None = None,
        logging_metrics: nn.ModuleList | None = None,
        learning_rate: float = 1e-2,
        dataset_parameters: dict | None = None,
        **kwargs,
    ):
        super().__init__()
        loss = loss if loss is not None else QuantileLoss()
        logging_metrics = logging_metrics if logging_metrics is not None else nn.ModuleList([MAE()])
        self.save_hyperparameters()
        self.loss, self.logging_metrics, self.horizon = loss, logging_metrics, horizon
        self.layers = nn.Sequential(
            nn.Linear(encoder_length, hidden_size), nn.ReLU(), nn.Linear(hidden_size, horizon * len(loss.quantiles))
        )

    @classmethod
    def from_dataset(cls, dataset: TimeSeriesDataSet, **kwargs) -> "L.LightningModule":
        return cls(
            encoder_length=dataset.encoder,
            horizon=dataset.horizon,
            dataset_parameters=dataset.get_parameters(),
            **kwargs,
        )

    def forward(self, x):
        prediction = self.layers(x["encoder_cont"]).view(len(x["encoder_cont"]), self.horizon, -1)
        return {"prediction": prediction, "index": None}

    def step(self, x, y, stage):
        out = self(x)
        loss = self.loss(out["prediction"], y)
        self.log(f"{stage}_loss", loss, on_step=stage == "train", on_epoch=True, batch_size=len(x["encoder_cont"]))
        for metric in self.logging_metrics:
            self.log(f"{stage}_{type(metric).__name__}", metric(out["prediction"], y), batch_size=len(y[0]))
        return {"loss": loss, "n_samples": len(x["encoder_cont"])}, out

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.step(x, y, "train")[0]

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return self.step(x, y, "val")[0]

    def test_step(self, batch, batch_idx):
        x, y = batch
        return self.step(x, y, "test")[0]

    def predict_step(self, batch, batch_idx):
        x, _ = batch
        return self(x)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = ReduceLROnPlateau(optimizer, patience=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


# ---------------------------------------------------------------- dense and multi-label targets


class ShapesDataset(Dataset):
    """Images with a square; targets are its mask, or the corners that it touches."""

    def __init__(self, count, seed, dense=True):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 1, 8, 8, generator=generator) * 0.1
        self.masks = torch.zeros(count, 8, 8, dtype=torch.long)
        corners = torch.randint(0, 5, (count, 2), generator=generator)
        for image, mask, (row, column) in zip(self.images, self.masks, corners.tolist(), strict=True):
            image[0, row : row + 4, column : column + 4] += 1
            mask[row : row + 4, column : column + 4] = 1
        self.labels = torch.stack([corners[:, 0] > 2, corners[:, 1] > 2, corners.sum(1) % 2 == 0], dim=1).long()
        self.dense = dense

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], (self.masks if self.dense else self.labels)[index]


class ShapesDataModule(L.LightningDataModule):
    def __init__(self, dense: bool = True, batch_size: int = 16):
        super().__init__()
        self.dense, self.batch_size = dense, batch_size

    def train_dataloader(self):
        return DataLoader(ShapesDataset(64, 0, self.dense), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(ShapesDataset(32, 1, self.dense), batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(ShapesDataset(27, 2, self.dense), batch_size=self.batch_size)

    predict_dataloader = test_dataloader


class SegmentationModel(L.LightningModule):
    def __init__(self, arch: str = "Unet", in_channels: int = 1, out_classes: int = 2, **kwargs):
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, out_classes, 1))
        self.register_buffer("mean", torch.tensor([0.1]).view(1, 1, 1, 1))
        self.training_step_outputs, self.validation_step_outputs, self.test_step_outputs = [], [], []

    def forward(self, image):
        return self.model(image - self.mean)

    def shared_step(self, batch, stage):
        image, mask = batch
        logits = self(image)
        loss = F.cross_entropy(logits, mask)
        pred = logits.argmax(1)
        tp = ((pred == 1) & (mask == 1)).flatten(1).sum(1)
        union = ((pred == 1) | (mask == 1)).flatten(1).sum(1)
        return {"loss": loss, "tp": tp, "union": union}

    def shared_epoch_end(self, outputs, stage):
        tp, union = (torch.cat([x[key] for x in outputs]) for key in ("tp", "union"))
        self.log_dict({f"{stage}_dataset_iou": tp.sum() / union.sum().clamp(min=1)}, prog_bar=True, sync_dist=True)

    def training_step(self, batch, batch_idx):
        train_loss_info = self.shared_step(batch, "train")
        self.training_step_outputs.append({key: value.detach() for key, value in train_loss_info.items()})
        return train_loss_info

    def on_train_epoch_end(self):
        self.shared_epoch_end(self.training_step_outputs, "train")
        self.training_step_outputs.clear()

    def validation_step(self, batch, batch_idx):
        info = self.shared_step(batch, "valid")
        self.validation_step_outputs.append(info)
        return info

    def on_validation_epoch_end(self):
        self.shared_epoch_end(self.validation_step_outputs, "valid")
        self.validation_step_outputs.clear()

    def test_step(self, batch, batch_idx):
        info = self.shared_step(batch, "test")
        self.test_step_outputs.append(info)
        return info

    def on_test_epoch_end(self):
        self.shared_epoch_end(self.test_step_outputs, "test")
        self.test_step_outputs.clear()

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-2)
        scheduler = CosineAnnealingLR(optimizer, T_max=20, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


class MultiLabel(L.LightningModule):
    def __init__(self, num_labels: int = 3):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, num_labels))
        metrics = MetricCollection({"auroc": MultilabelAUROC(num_labels), "f1": MultilabelF1Score(num_labels)})
        self.train_metrics = metrics.clone(prefix="train/")
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")

    def _step(self, batch, metrics):
        x, y = batch
        logits = self.net(x)
        metrics.update(logits, y)
        self.log_dict(metrics, on_step=False, on_epoch=True)
        return F.binary_cross_entropy_with_logits(logits, y.float()), logits

    def training_step(self, batch, batch_idx):
        loss, _ = self._step(batch, self.train_metrics)
        return loss

    def validation_step(self, batch, batch_idx):
        self._step(batch, self.val_metrics)

    def test_step(self, batch, batch_idx):
        _, logits = self._step(batch, self.test_metrics)
        losses = F.binary_cross_entropy_with_logits(logits, batch[1].float(), reduction="none").mean(1)
        return {"losses": losses, "predictions": logits.sigmoid()}

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).sigmoid()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


# ---------------------------------------------------------------- self-supervision


class Views(Dataset):
    """Samples of one tensor, without a target."""

    def __init__(self, count=64):
        self.images = torch.randn(count, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


class ViewsDataModule(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Views(), batch_size=16, shuffle=True, drop_last=True)

    def test_dataloader(self):
        return DataLoader(Views(27), batch_size=16)


class SimSiam(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
        self.prediction_head = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))

    def forward(self, x):
        z = self.backbone(x)
        return z.detach(), self.prediction_head(z)

    def _loss(self, x):
        (z0, p0), (z1, p1) = self(x + 0.1 * torch.randn_like(x)), self(x + 0.1 * torch.randn_like(x))
        return -0.5 * (F.cosine_similarity(p0, z1).mean() + F.cosine_similarity(p1, z0).mean())

    def training_step(self, x):
        loss = self._loss(x)
        self.log("train_loss_ssl", loss)
        return loss

    def test_step(self, x):
        self.log("test_loss_ssl", self._loss(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)
