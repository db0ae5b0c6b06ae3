"""Correct modules, written as those of papers are."""

import copy
import math

import torch
from programs import LossOnly, Manual, digits, halves, loaders, no_bug, segments, sequences, tokens
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset


@no_bug(max_epochs=4)
def beta_vae():
    """A convolutional VAE, whose KL term is annealed per step."""

    class M(LossOnly):
        def __init__(self, latent=8, kl_coeff=0.1):
            super().__init__()
            self.net, self.kl_coeff = None, kl_coeff
            self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.Flatten())
            self.fc_mu, self.fc_var = nn.Linear(128, latent), nn.Linear(128, latent)
            self.decoder = nn.Sequential(
                nn.Linear(latent, 128), nn.Unflatten(1, (8, 4, 4)), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid()
            )

        def step(self, batch):
            x, _ = batch
            h = self.encoder(x)
            mu, log_var = self.fc_mu(h), self.fc_var(h)
            q = torch.distributions.Normal(mu, (log_var / 2).exp())
            p = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(mu))
            z = q.rsample()
            recon = F.mse_loss(self.decoder(z), x, reduction="mean")
            kl = (q.log_prob(z) - p.log_prob(z)).mean() * self.kl_coeff * min(1.0, self.global_step / 40)
            return recon + kl, {"recon": recon, "kl": kl}

        def training_step(self, batch, batch_idx):
            loss, logs = self.step(batch)
            self.log_dict({f"train_{k}": v for k, v in logs.items()})
            return loss

        def validation_step(self, batch, batch_idx):
            loss, logs = self.step(batch)
            self.log_dict({f"val_{k}": v for k, v in logs.items()})
            return loss

    return M(), *digits()


@no_bug()
def simclr():
    """NT-Xent of two views that the loader makes, with LARS-like warm-up and cosine."""

    class Views(Dataset):
        def __init__(self, samples):
            self.samples = samples

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, i):
            x, y = self.samples[i]
            return [x + torch.randn_like(x) * 0.2, (x * (0.5 + torch.rand(1))).flip(-1)], y

    class M(LossOnly):
        def __init__(self, temperature=0.5):
            super().__init__()
            self.temperature = temperature
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
            self.projection = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))

        def shared_step(self, batch):
            (a, b), _ = batch
            z = F.normalize(self.projection(self.net(torch.cat([a, b]))), dim=-1)
            similarity = z @ z.T / self.temperature
            similarity.fill_diagonal_(float("-inf"))
            n = len(a)
            positives = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
            return F.cross_entropy(similarity, positives)

        def training_step(self, batch, batch_idx):
            return self.shared_step(batch)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.shared_step(batch))

        def configure_optimizers(self):
            decayed = [p for p in self.parameters() if p.ndim > 1]
            others = [p for p in self.parameters() if p.ndim <= 1]
            opt = torch.optim.SGD([{"params": decayed, "weight_decay": 1e-4}, {"params": others}], 0.1, momentum=0.9)
            steps = int(self.trainer.estimated_stepping_batches)
            warm = torch.optim.lr_scheduler.LinearLR(opt, 1e-3, total_iters=10)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps - 10)
            schedule = torch.optim.lr_scheduler.SequentialLR(opt, [warm, cosine], [10])
            return [opt], [{"scheduler": schedule, "interval": "step"}]

    train, val = digits(loaded=False)
    return M(), *loaders(Views(train), Views(val))


@no_bug()
def byol_with_callback():
    """Online, target and predictor; the target is updated in on_train_batch_end with a momentum that grows."""

    class Arm(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
            self.projector = nn.Linear(64, 16)

        def forward(self, x):
            return self.projector(self.encoder(x))

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = None
            self.online_network = Arm()
            self.target_network = copy.deepcopy(self.online_network)
            self.predictor = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            self.tau = 0.99

        def similarity(self, a, b):
            return -F.cosine_similarity(self.predictor(self.online_network(a)), b.detach(), dim=-1).mean()

        def loss(self, x, y):
            a, b = x + torch.randn_like(x) * 0.1, x + torch.randn_like(x) * 0.1
            with torch.no_grad():
                target_a, target_b = self.target_network(a), self.target_network(b)
            return self.similarity(a, target_b) + self.similarity(b, target_a)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            steps = self.trainer.estimated_stepping_batches
            tau = 1 - (1 - self.tau) * (math.cos(math.pi * self.global_step / steps) + 1) / 2
            pairs = zip(self.online_network.parameters(), self.target_network.parameters(), strict=True)
            for online, target in pairs:
                target.data = tau * target.data + (1 - tau) * online.data

        def configure_optimizers(self):
            return torch.optim.Adam([*self.online_network.parameters(), *self.predictor.parameters()], 1e-3)

    return M(), *digits()


@no_bug()
def moco_v2():
    """A key encoder, a queue with a pointer, and logits of positives beside negatives."""

    class M(LossOnly):
        def __init__(self, dim=16, size=128):
            super().__init__()
            self.net = None
            self.encoder_q = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, dim))
            self.encoder_k = copy.deepcopy(self.encoder_q)
            for p in self.encoder_k.parameters():
                p.requires_grad = False
            self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def enqueue(self, keys):
            start = int(self.pointer)
            self.queue[:, start : start + len(keys)] = keys.T
            self.pointer[0] = (start + len(keys)) % self.queue.shape[1]

        def training_step(self, batch, batch_idx):
            x, _ = batch
            q = F.normalize(self.encoder_q(x + torch.randn_like(x) * 0.1), dim=1)
            with torch.no_grad():
                for fast, slow in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                    slow.data = slow.data * 0.99 + fast.data * 0.01
                k = F.normalize(self.encoder_k(x), dim=1)
            positive = torch.einsum("nc,nc->n", q, k)[:, None]
            negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
            logits = torch.cat([positive, negative], 1) / 0.07
            loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
            self.enqueue(k)
            return loss

        def validation_step(self, batch, batch_idx):
            pass

    return M(), *digits()


@no_bug()
def ddpm():
    """Denoising diffusion with a sinusoidal embedding of time, an EMA of weights for samples, and a linear schedule."""

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 64))
            self.inner, self.middle, self.outer = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
            nn.init.zeros_(self.outer.weight)
            nn.init.zeros_(self.outer.bias)

        def forward(self, x, t):
            angles = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(8) / 8)
            h = self.inner(x) + self.time(torch.cat([angles.sin(), angles.cos()], -1))
            return self.outer(F.silu(self.middle(F.silu(h))))

    class M(LossOnly):
        def __init__(self, steps=50):
            super().__init__()
            self.steps, self.net = steps, Denoiser()
            self.ema = copy.deepcopy(self.net).eval().requires_grad_(False)
            self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.05, steps), 0))

        def loss(self, x, y):
            x = x.flatten(1) * 2 - 1
            t = torch.randint(0, self.steps, (len(x),))
            noise = torch.randn_like(x)
            a = self.alphas[t][:, None]
            network = self.net if self.training else self.ema
            return F.mse_loss(network(a.sqrt() * x + (1 - a).sqrt() * noise, t.float()), noise)

        def on_before_zero_grad(self, *args):
            with torch.no_grad():
                for slow, fast in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                    slow.mul_(0.99).add_(fast, alpha=0.01)

    return M(), *digits()


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(0.1))
        self.heads = heads
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def attention(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in (q, k, v))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")).softmax(-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@no_bug(gradient_clip_val=1.0, accumulate_grad_batches=2)
def nano_gpt():
    """A GPT with tied embeddings, scaled initialization, groups of decay, warm-up and cosine as a LambdaLR."""

    class M(LossOnly):
        def __init__(self, vocab=12, dim=32):
            super().__init__()
            self.net = None
            self.wte, self.wpe, self.drop = nn.Embedding(vocab, dim), nn.Embedding(32, dim), nn.Dropout(0.1)
            self.h, self.ln_f = nn.ModuleList(Block(dim) for _ in range(2)), nn.LayerNorm(dim)
            self.lm_head = nn.Linear(dim, vocab, bias=False)
            self.wte.weight = self.lm_head.weight
            self.apply(
                lambda m: nn.init.normal_(m.weight, 0, 0.02) if isinstance(m, nn.Linear | nn.Embedding) else None
            )

        def forward(self, idx):
            x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device)))
            for block in self.h:
                x = block(x)
            return self.lm_head(self.ln_f(x))

        def loss(self, x, y):
            logits = self(x)
            return F.cross_entropy(logits.view(-1, logits.size(-1)), y.reshape(-1), ignore_index=-1)

        def configure_optimizers(self):
            decay = [p for p in self.parameters() if p.dim() >= 2]
            rest = [p for p in self.parameters() if p.dim() < 2]
            groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
            opt = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
            total = self.trainer.estimated_stepping_batches

            def rate(step):
                return min((step + 1) / 10, 0.1 + 0.45 * (1 + math.cos(math.pi * step / total)))

            schedule = torch.optim.lr_scheduler.LambdaLR(opt, rate)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    t = tokens()
    return M(), *halves(t[:, :-1], t[:, 1:])


@no_bug()
def sequence_to_sequence():
    """Encoder and decoder of nn.Transformer, with padding masks, a shifted target and ignore_index of padding."""

    class M(LossOnly):
        def __init__(self, pad=0):
            super().__init__()
            self.pad, self.net = pad, nn.Linear(32, 14)
            self.source, self.target = nn.Embedding(14, 32, padding_idx=pad), nn.Embedding(14, 32, padding_idx=pad)
            self.places = nn.Embedding(20, 32)
            self.transformer = nn.Transformer(32, 4, 1, 1, 64, 0.1, batch_first=True)

        def loss(self, source, target):
            given, wanted = target[:, :-1], target[:, 1:]
            mask = nn.Transformer.generate_square_subsequent_mask(given.size(1))
            place = [self.places(torch.arange(t.size(1))) for t in (source, given)]
            source_pad, target_pad = source == self.pad, given == self.pad
            out = self.transformer(
                self.source(source) * math.sqrt(32) + place[0],
                self.target(given) * math.sqrt(32) + place[1],
                tgt_mask=mask,
                src_key_padding_mask=source_pad,
                tgt_key_padding_mask=torch.zeros_like(target_pad, dtype=torch.float).masked_fill(
                    target_pad, float("-inf")
                ),
                memory_key_padding_mask=source_pad,
            )
            return F.cross_entropy(self.net(out).transpose(1, 2), wanted, ignore_index=self.pad, label_smoothing=0.1)

    t = tokens(12) + 2
    source, target = t.clone(), torch.cat([torch.ones(len(t), 1, dtype=torch.long), t.flip(1)], 1)
    for i in range(len(t)):
        source[i, 4 + i % 9 :] = 0
        target[i, 5 + i % 9 :] = 0
    return M(), *halves(source, target)


@no_bug()
def detector():
    """Lists of images of different sizes, and targets that are dicts of boxes and labels."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = None
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()
            )
            self.boxes, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 3, 1)

        def one(self, image, target):
            h = self.backbone(image[None])
            boxes, scores = self.boxes(h).flatten(2)[0].T, self.scores(h).flatten(2)[0].T
            grid = torch.linspace(0, 1, len(boxes))
            near = (grid[:, None] - target["boxes"][:, 0][None]).abs().argmin(0)
            labels = torch.zeros(len(boxes), dtype=torch.long)
            labels[near] = target["labels"]
            return {
                "loss_box_reg": F.smooth_l1_loss(boxes[near], target["boxes"]),
                "loss_classifier": F.cross_entropy(scores, labels),
            }

        def training_step(self, batch, batch_idx):
            losses = [self.one(image, target) for image, target in zip(*batch, strict=True)]
            total = {k: torch.stack([each[k] for each in losses]).mean() for k in losses[0]}
            self.log_dict(total, batch_size=len(losses))
            return sum(total.values())

        def validation_step(self, batch, batch_idx):
            losses = [sum(self.one(image, target).values()) for image, target in zip(*batch, strict=True)]
            self.log("val_loss", torch.stack(losses).mean(), batch_size=len(losses))

    g = torch.Generator().manual_seed(0)
    rows = []
    for i in range(160):
        count, size = 1 + i % 3, 8 + 2 * (i % 3)
        target = {"boxes": torch.rand(count, 4, generator=g), "labels": torch.randint(1, 3, (count,), generator=g)}
        rows.append((torch.rand(1, size, size, generator=g), target))

    def collate(samples):
        return tuple(zip(*samples, strict=True))

    return (
        M(),
        *loaders(rows[:128], rows[128:], 8, collate_fn=collate)[:1],
        DataLoader(rows[128:], 8, collate_fn=collate),
    )


@no_bug()
def unet_with_dice():
    """Segmentation by cross-entropy and soft dice, with skip connections and deep supervision."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = None
            self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
            self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
            self.up, self.coarse = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 3, 1)
            self.out = nn.Conv2d(16, 3, 1)

        def forward(self, x):
            skip = self.down(x)
            deep = self.middle(skip)
            return self.out(torch.cat([skip, self.up(deep)], 1)), self.coarse(deep)

        def loss(self, x, y):
            fine, coarse = self(x)
            probability, wanted = fine.softmax(1), F.one_hot(y, 3).movedim(-1, 1).float()
            overlap = (probability * wanted).sum((0, 2, 3))
            dice = 1 - (2 * overlap + 1) / ((probability + wanted).sum((0, 2, 3)) + 1)
            return F.cross_entropy(fine, y) + dice.mean() + 0.4 * F.cross_entropy(coarse, y[:, ::2, ::2])

        def validation_step(self, batch, batch_idx):
            fine, _ = self(batch[0])
            self.log("val_miou", (fine.argmax(1) == batch[1]).float().mean())

    return M(), *halves(*segments(), split=256)


@no_bug(max_epochs=30)
def graph_network():
    """One graph; masks tell which nodes train; the loader yields the graph once per epoch."""

    class Graph(Dataset):
        def __init__(self):
            g = torch.Generator().manual_seed(0)
            self.y = torch.randint(0, 3, (90,), generator=g)
            self.x = F.one_hot(self.y, 3) + torch.randn(90, 3, generator=g)
            near = (self.y[:, None] == self.y[None]) & (torch.rand(90, 90, generator=g) < 0.2)
            self.edges = near.float() + torch.eye(90)
            self.mask = torch.rand(90, generator=g) < 0.5

        def __len__(self):
            return 1

        def __getitem__(self, i):
            return {"x": self.x, "adj": self.edges / self.edges.sum(1, keepdim=True), "y": self.y, "mask": self.mask}

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = None
            self.first, self.second = nn.Linear(3, 16), nn.Linear(16, 3)

        def forward(self, data):
            return self.second(data["adj"] @ F.dropout(self.first(data["adj"] @ data["x"]).relu(), 0.5, self.training))

        def training_step(self, data, batch_idx):
            return F.cross_entropy(self(data)[data["mask"]], data["y"][data["mask"]])

        def validation_step(self, data, batch_idx):
            out, held = self(data), ~data["mask"]
            self.log("val_acc", (out[held].argmax(-1) == data["y"][held]).float().mean(), batch_size=1)

    return M(), DataLoader(Graph(), batch_size=None), DataLoader(Graph(), batch_size=None)


@no_bug()
def actor_critic():
    """Advantage actor-critic, whose batches are rollouts that a dataset plays with the policy."""

    class Rollouts(torch.utils.data.IterableDataset):
        def __init__(self, module):
            self.module = module

        def __iter__(self):
            for _ in range(20):
                state = torch.randn(64, 4)
                with torch.no_grad():
                    action = torch.distributions.Categorical(logits=self.module.actor(state)).sample()
                yield state, action, (action == (state.sum(1) > 0).long()).float()

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = None
            self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
            self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

        def training_step(self, batch, batch_idx):
            state, action, reward = batch
            value = self.critic(state).squeeze(-1)
            policy = torch.distributions.Categorical(logits=self.actor(state))
            advantage = (reward - value).detach()
            actor_loss = -(policy.log_prob(action) * advantage).mean() - 0.01 * policy.entropy().mean()
            self.log("reward", reward.mean(), prog_bar=True)
            return actor_loss + 0.5 * F.mse_loss(value, reward)

        def val_dataloader(self):
            return []

        def train_dataloader(self):
            return DataLoader(Rollouts(self), batch_size=None)

    return M(), None, None


@no_bug()
def soft_actor_critic():
    """A learned temperature that is a plain tensor in an optimizer of its own; twin critics with targets."""

    class M(Manual):
        def __init__(self):
            super().__init__()
            self.net = None
            self.actor, self.q1, self.q2 = nn.Linear(4, 2), nn.Linear(5, 1), nn.Linear(5, 1)
            self.q1_target, self.q2_target = copy.deepcopy(self.q1), copy.deepcopy(self.q2)
            self.log_alpha = torch.zeros(1, requires_grad=True)

        def act(self, s):
            mean, log_std = self.actor(s).chunk(2, -1)
            policy = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
            a = policy.rsample()
            return a.tanh(), (policy.log_prob(a) - torch.log(1 - a.tanh() ** 2 + 1e-6)).sum(-1, keepdim=True)

        def training_step(self, batch, batch_idx):
            s, a, r, s2 = batch
            opt_q, opt_pi, opt_alpha = self.optimizers()
            with torch.no_grad():
                a2, log_p2 = self.act(s2)
                x2 = torch.cat([s2, a2], 1)
                goal = r + 0.9 * (torch.min(self.q1_target(x2), self.q2_target(x2)) - self.log_alpha.exp() * log_p2)
            x = torch.cat([s, a], 1)
            opt_q.zero_grad()
            self.manual_backward(F.mse_loss(self.q1(x), goal) + F.mse_loss(self.q2(x), goal))
            opt_q.step()
            new, log_p = self.act(s)
            y = torch.cat([s, new], 1)
            opt_pi.zero_grad()
            self.manual_backward((self.log_alpha.exp().detach() * log_p - torch.min(self.q1(y), self.q2(y))).mean())
            opt_pi.step()
            opt_alpha.zero_grad()
            self.manual_backward(-(self.log_alpha * (log_p + 1).detach()).mean())
            opt_alpha.step()
            for target, net in ((self.q1_target, self.q1), (self.q2_target, self.q2)):
                for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                    slow.data.copy_(0.005 * fast.data + 0.995 * slow.data)

        def configure_optimizers(self):
            critics = [*self.q1.parameters(), *self.q2.parameters()]
            return [torch.optim.Adam(p, 3e-4) for p in (critics, self.actor.parameters(), [self.log_alpha])], []

    s = torch.randn(640, 4)
    data = TensorDataset(s, torch.rand(640, 1) * 2 - 1, s[:, :1], torch.randn(640, 4))
    return M(), *loaders(data, data)


@no_bug()
def triplets():
    """Metric learning with hard negatives of the batch, and recall at one over the whole validation."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
            self.kept = []

        def loss(self, x, y):
            z = F.normalize(self(x), dim=-1)
            distance = torch.cdist(z, z)
            same = y[:, None] == y[None]
            positive = (distance * same).max(1).values
            negative = (distance + 10 * same).min(1).values
            return F.relu(positive - negative + 0.2).mean()

        def validation_step(self, batch, batch_idx):
            self.kept.append((F.normalize(self(batch[0]), dim=-1), batch[1]))

        def on_validation_epoch_end(self):
            z, y = (torch.cat(part) for part in zip(*self.kept, strict=True))
            near = (z @ z.T).fill_diagonal_(-2).argmax(1)
            self.log("val_recall@1", (y[near] == y).float().mean())
            self.kept.clear()

    return M(), *digits()


@no_bug()
def knowledge_distillation():
    """A frozen teacher in evaluation mode, which is no child of the module, and features that a projection matches."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            teacher = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)
            )
            self.__dict__["teacher"] = teacher.eval().requires_grad_(False)
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
            self.project = nn.Linear(32, 128)

        def loss(self, x, y, t=4.0):
            hidden = self.net[:3](x)
            out = self.net[3](hidden)
            with torch.no_grad():
                soft, features = self.teacher(x), self.teacher[:4](x)
            kd = F.kl_div(F.log_softmax(out / t, -1), F.softmax(soft / t, -1), reduction="batchmean") * t * t
            return F.cross_entropy(out, y) + kd + F.mse_loss(self.project(hidden), features)

        def validation_step(self, batch, batch_idx):
            self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    return M(), *digits()


@no_bug()
def low_rank_adapters():
    """A frozen body with LoRA, whose B is 0 at the start, a trained head, and only adapters in the optimizer."""

    class Lora(nn.Module):
        def __init__(self, base, rank=4, alpha=8):
            super().__init__()
            self.base, self.scale = base.requires_grad_(False), alpha / rank
            self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
            self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

        def forward(self, x):
            return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scale

    class M(LossOnly):
        def network(self):
            head = nn.Linear(64, 10)
            nn.init.zeros_(head.weight)
            return nn.Sequential(
                nn.Flatten(), Lora(nn.Linear(64, 64)), nn.GELU(), Lora(nn.Linear(64, 64)), nn.GELU(), head
            )

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 2e-3, weight_decay=0.0)

    return M(), *digits()


@no_bug()
def two_stage_finetuning():
    """A frozen backbone in evaluation mode for two epochs, then a lower rate for it by add_param_group."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = None
            self.backbone = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1)
            )
            self.head = nn.Linear(64, 10)
            self.backbone.requires_grad_(False)

        def forward(self, x):
            return self.head(self.backbone(x))

        def on_train_epoch_start(self):
            if self.current_epoch < 2:
                self.backbone.eval()
            elif self.current_epoch == 2:
                self.backbone.train().requires_grad_(True)
                self.optimizers().optimizer.add_param_group({"params": self.backbone.parameters(), "lr": 1e-3})

        def configure_optimizers(self):
            return torch.optim.Adam(self.head.parameters(), 1e-2)

    return M(), *digits()


@no_bug()
def real_nvp():
    """A normalizing flow of coupling layers; its masks are buffers."""

    class M(LossOnly):
        def __init__(self, dim=6, layers=4):
            super().__init__()
            self.net = None
            self.register_buffer("masks", torch.stack([torch.arange(dim) % 2 == i % 2 for i in range(layers)]).float())
            self.s = nn.ModuleList(
                nn.Sequential(nn.Linear(dim, 16), nn.Tanh(), nn.Linear(16, dim), nn.Tanh()) for _ in range(layers)
            )
            self.t = nn.ModuleList(
                nn.Sequential(nn.Linear(dim, 16), nn.Tanh(), nn.Linear(16, dim)) for _ in range(layers)
            )

        def log_prob(self, x):
            log_det = x.new_zeros(len(x))
            for mask, scale, shift in zip(self.masks, self.s, self.t, strict=True):
                kept = x * mask
                s, t = scale(kept) * (1 - mask), shift(kept) * (1 - mask)
                x = kept + (1 - mask) * (x * s.exp() + t)
                log_det = log_det + s.sum(1)
            return torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(1) + log_det

        def training_step(self, batch, batch_idx):
            return -self.log_prob(batch).mean()

        def validation_step(self, batch, batch_idx):
            self.log("val_nll", -self.log_prob(batch).mean())

    g = torch.Generator().manual_seed(0)
    x = torch.randn(640, 6, generator=g)
    x[:, 1] = x[:, 0].square() + 0.3 * x[:, 1]
    return M(), *halves(x)


@no_bug(gradient_clip_val=0.5)
def nerf():
    """Rays with a positional encoding, alpha compositing, and a coarse and a fine network with both losses."""

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
            self.sigma, self.rgb = nn.Linear(32, 1), nn.Linear(32, 3)

        def forward(self, x):
            h = self.body(torch.cat([x, x.sin(), x.cos()], -1))
            return F.softplus(self.sigma(h))[..., 0], self.rgb(h).sigmoid()

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.net = None
            self.coarse, self.fine = Field(), Field()

        def render(self, field, rays, depth):
            points = rays[:, None, :3] + rays[:, None, 3:] * depth[..., None]
            sigma, rgb = field(points)
            alpha = 1 - torch.exp(-sigma * 0.1)
            through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
            weights = alpha * through
            return (weights[..., None] * rgb).sum(1), weights

        def loss(self, rays, color):
            depth = torch.linspace(2, 6, 12).expand(len(rays), -1)
            if self.training:
                depth = depth + torch.rand_like(depth) * 0.3
            coarse, weights = self.render(self.coarse, rays, depth)
            more = torch.multinomial(weights.detach() + 1e-5, 8, replacement=True)
            fine, _ = self.render(self.fine, rays, torch.cat([depth, depth.gather(1, more) + 0.05], 1).sort(1).values)
            return F.mse_loss(coarse, color) + F.mse_loss(fine, color)

    g = torch.Generator().manual_seed(0)
    rays = torch.randn(640, 6, generator=g)
    return M(), *halves(rays, (rays[:, 3:] * 0.5 + 0.5).clamp(0, 1))


@no_bug()
def masked_autoencoder():
    """MAE: three quarters of the patches are dropped, fixed positions, a mask token, loss of masked patches."""

    class M(LossOnly):
        def __init__(self, dim=32):
            super().__init__()
            self.net = None
            self.embed = nn.Conv2d(1, dim, 2, 2)
            self.pos_embed = nn.Parameter(torch.randn(1, 16, dim) * 0.02, requires_grad=False)
            self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
            self.encoder = nn.TransformerEncoderLayer(dim, 4, 64, 0.0, batch_first=True, norm_first=True)
            self.decoder = nn.TransformerEncoderLayer(dim, 4, 64, 0.0, batch_first=True, norm_first=True)
            self.predict = nn.Linear(dim, 4)

        def loss(self, x, y):
            patches = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(len(x), 16, 4)
            tokens_ = self.embed(x).flatten(2).transpose(1, 2) + self.pos_embed
            order = torch.rand(len(x), 16).argsort(1)
            back, kept = order.argsort(1), order[:, :4]
            seen = self.encoder(tokens_.gather(1, kept[..., None].expand(-1, -1, tokens_.shape[-1])))
            full = torch.cat([seen, self.mask_token.expand(len(x), 12, -1)], 1)
            full = full.gather(1, back[..., None].expand(-1, -1, full.shape[-1])) + self.pos_embed
            mask = (back >= 4).float()
            error = (self.predict(self.decoder(full)) - patches).square().mean(-1)
            return (error * mask).sum() / mask.sum()

    return M(), *digits()


@no_bug()
def checkpointed_ctc():
    """Speech-like features, a checkpointed body, CTC of log-probabilities in (T, N, C), and lengths."""

    class M(LossOnly):
        def __init__(self):
            super().__init__()
            self.inputs, self.rnn, self.net = nn.Linear(5, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 5)

        def body(self, x):
            return self.net(self.rnn(self.inputs(x).relu())[0])

        def loss(self, x, y):
            out = checkpoint(self.body, x, use_reentrant=False) if self.training else self.body(x)
            log_p = out.log_softmax(-1).transpose(0, 1)
            lengths = torch.full((len(x),), x.shape[1]), torch.full((len(x),), 1)
            return F.ctc_loss(log_p, y[:, None] + 1, *lengths, blank=0, zero_infinity=True)

    return M(), *halves(*sequences())
