"""A callback that writes one row for each optimizer step, without waiting for a device."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, BinaryIO

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from xxhash import xxh3_64_intdigest

from boltcutter import files
from boltcutter.callback.guard import Guard
from boltcutter.data.sampler import EpochState, find_sampler
from boltcutter.internals import averaged_weights, foreach_norm, local_shard, saved_buffers
from boltcutter.protocols import ReducesGradientNorms, gather_objects
from boltcutter.run.folder import update_record
from boltcutter.run.ledger import SIZE, header, ledger_path, read_ledger
from boltcutter.run_files import RECORD
from boltcutter.structure import tensors
from boltcutter.task.host_copy import HostCopy, copy_to_host

PACK = struct.Struct("<IIdddQQQII").pack  # ROW of run/ledger.py
BLOCK = 64  # rows that are written together
MAX_SECONDS = 1.0  # after which fewer are written, too
AVERAGING = (WeightAveraging, StochasticWeightAveraging)
HASHED = 2  # gradients, evenly spread over the model, of which each step hashes the bits; of all others the norms
MAX_BYTES = 1 << 12  # of each: small ones where the model has them, else from the beginning of one
LAST_CONTENT = 64  # batches, of which the 1st, 2nd, 3rd, 5th, 9th … are hashed for the record
CONTENT_SECONDS = 0.02  # after which no further ones are
CHUNK = 1 << 20  # numbers that are multiplied at once on a GPU
ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number


class RanksDifferError(RuntimeError):
    """Ranks that must have equal weights have not; all ranks raise it, and rank 0 reports it."""

    hide_traceback = True

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.is_reported = dist.get_rank() != 0  # now, as the process group is gone when errors are printed


@dataclass(slots=True)
class Step:
    """A row that is not written yet; on a GPU, its tensors are not computed yet."""

    step: int
    epoch: int
    losses: list[Tensor]
    norm: Tensor | None
    lr: float
    samples: int | Tensor
    indices: list[Any]  # of the samples of each batch, which are hashed later
    norms: list[Tensor]  # of each gradient at each step of an optimizer, which are hashed later
    gradient: int
    scale: int  # by which Lightning has divided losses: batches of the step
    state: tuple[int | Tensor, ...] = ()  # digests of weights, optimizer and buffers


class StepLedger(Callback):
    """Write what each optimizer step has computed to ``steps.ledger``, by which two runs are compared step by step.

    A row has 64 bytes: ``run/ledger.py`` has the columns. Each rank writes its own file. Values of a GPU are copied
    while it computes, and written later; nothing waits for it. A resumed run continues after the step of its
    checkpoint. If replicas of the weights differ between ranks, training stops. ``record.json`` gets digests of the
    content of some of the first batches of rank 0.

    Args:
        folder: Folder of the run.
        every_n_steps: Number of steps after which weights and the state of the optimizer are hashed, and replicas
            compared; also before each checkpoint.

    Raises:
        ValueError: ``every_n_steps`` is not positive.
    """

    def __init__(self, folder: Path, *, every_n_steps: int = 100) -> None:
        if every_n_steps < 1:
            raise ValueError(f"callback.ledger.every_n_steps={every_n_steps} must be 1 or more; try 100")
        self.folder, self.every_n_steps = Path(folder), every_n_steps
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._file: BinaryIO | None = None
        self._handles: list[Any] = []  # of hooks of optimizers
        self._rows: list[Step] = []
        self._copied: tuple[list[Step], list[HostCopy | None]] | None = None
        self._losses: list[Tensor] = []  # of the batches since the last step
        self._samples: int | Tensor = 0
        self._indices: list[Any] = []
        self._gradient = 0
        self._norms: list[Tensor] = []
        self._measured: Tensor | None = None  # norms of the gradients, where the guard computes none
        self._in_graph: Tensor | None = None  # the same, in the memory of a CUDA graph
        self._lr, self._epoch = math.nan, 0
        self._sampler: EpochState | None = None
        self._guard: Guard | None = None
        self._step, self._due = step, monotonic() + MAX_SECONDS
        self._compared: tuple[int, list[Tensor]] | None = None  # the last comparison of ranks: step, digest of each
        self._contents: dict[int, int | HostCopy] | None = None  # of batches, by their number from 1; None: no more
        self._content_seconds = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """A copy writes nothing: a trainer may be pickled while it trains."""
        return {"folder": self.folder, "every_n_steps": self.every_n_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew."""
        vars(self).update(state)
        self._begin(0)

    # Life cycle

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the file, without what was done after the checkpoint from which training is resumed."""
        self._close()
        self._begin(trainer.global_step)
        self._file = self._open(ledger_path(self.folder, trainer.global_rank), pl_module.device.type)
        found = [getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers]
        self._optimizers = [optimizer for optimizer in found if isinstance(optimizer, Optimizer)]
        optimized = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        is_sharded = isinstance(trainer.strategy, ReducesGradientNorms)
        if any(hasattr(p, "full_tensor") for p in optimized):  # the module may have gathered weights at this moment
            is_sharded, self._parameters = True, optimized
        else:
            self._parameters = [p for p in pl_module.parameters() if p.requires_grad and not p.is_meta]
        self._is_sharded = is_sharded
        self._hashed = hashed_parts(self._parameters) if pl_module.device.type == "cpu" and not is_sharded else []
        guards = [callback for callback in trainer.callbacks if isinstance(callback, Guard)]  # type: ignore[attr-defined]
        if guards and getattr(trainer.precision_plugin, "scaler", None) is None:
            self._guard = guards[0]
        elif not is_sharded:
            vars(self)["on_before_optimizer_step"] = self._measure
        self._handles = [optimizer.register_step_post_hook(self._after_step) for optimizer in self._optimizers]
        self._averaging = [callback for callback in trainer.callbacks if isinstance(callback, AVERAGING)]  # type: ignore[attr-defined]
        # Those of other ranks may differ, and are not saved.
        self._buffers = [*saved_buffers(pl_module)] if trainer.is_global_zero else []
        self._has_replicas = has_replicas(trainer)
        if trainer.is_global_zero and not self._step:
            self._contents = {}
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the sampler that knows the indices of the samples; without one, hash each batch."""
        self._epoch, self._sampler = trainer.current_epoch, find_sampler(trainer.train_dataloader)
        if self._sampler is None or self._contents is not None:
            vars(self)["on_train_batch_start"] = self._hash_batch  # else no hook that each step would call

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss and the samples; after an optimizer step, add a row."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss if not loss.ndim and not loss.requires_grad else loss.detach().reshape(()))
        if self._sampler is not None:
            self._indices.append(self._sampler.indices_of(batch_idx))
        step = trainer.global_step
        if step == self._step:
            return
        if len(self._rows) >= BLOCK or monotonic() > self._due:
            self._flush()
        norm = None if self._guard is None else self._guard.norm
        if norm is None and self._measured is not None:
            norm = torch.linalg.vector_norm(self._measured)
        row = Step(
            step,
            self._epoch,
            self._losses,
            norm,
            self._lr,
            self._samples,
            self._indices,
            self._norms,
            self._gradient,
            trainer.accumulate_grad_batches,
        )
        self._rows.append(row)
        self._losses, self._samples, self._indices, self._norms, self._gradient = [], 0, [], [], 0
        before, self._step = self._step, step
        if step // self.every_n_steps != before // self.every_n_steps:
            self._hash_state(row)
            if self._has_replicas:
                self._compare_ranks(row, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hash what is saved, and write all rows."""
        if self._file is not None:
            # While it validates, weights may be those of an average.
            if self._rows and self._rows[-1].step == trainer.global_step and not trainer.validating:
                self._hash_state(self._rows[-1])
            self._flush(waits=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hash the last weights, unless averages have replaced them by now, and write all rows."""
        if self._rows and not self._averaging:
            self._hash_state(self._rows[-1])
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write all rows."""
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write all rows."""
        self._close()

    # What a row has

    def _hash_batch(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        found = tensors(batch)
        if self._sampler is None:
            self._samples = digest(found, self._samples)
        if self._contents is not None:
            begin = perf_counter()
            if trainer.current_epoch or batch_idx > LAST_CONTENT or self._content_seconds > CONTENT_SECONDS:
                self._record_contents()  # they were copied at a batch before
                if self._sampler is not None:
                    del vars(self)["on_train_batch_start"]
            elif not batch_idx & (batch_idx - 1):
                each = digest(found)
                self._contents[batch_idx + 1] = copy_to_host(each) if isinstance(each, Tensor) else each
            self._content_seconds += perf_counter() - begin

    def _record_contents(self) -> None:
        found, self._contents = self._contents, None
        if found and (self.folder / RECORD).is_file():
            each = {n: int(one.wait()) if isinstance(one, HostCopy) else one for n, one in found.items()}
            update_record(self.folder, batches={str(n): f"{one % (1 << 64):016x}" for n, one in each.items()})

    def _measure(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None and not p.grad.is_sparse]
        self._measured = torch.stack(foreach_norm(gradients)) if gradients else None
        if "is_capturing" in vars(pl_module):
            self._in_graph = self._measured

    def refuses_capture(self, optimizer: Optimizer) -> str | None:
        """Nothing does."""
        return None

    def after_replay(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Take what the graph has measured, which its next replay overwrites."""
        self._measured = None if self._in_graph is None else self._in_graph.clone()

    def _after_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        """Note with what an optimizer has done its step, before others change it."""
        groups = optimizer.param_groups  # none, if configure_optimizers returns None
        self._lr = float(groups[0].get("lr", math.nan)) if groups else math.nan
        norms = self._measured if self._guard is None else self._guard.norms
        if norms is not None:
            self._norms.append(norms)
        found = self._gradient
        for parameter, size in self._hashed:
            if (gradient := parameter.grad) is not None:
                found = hash_bytes(gradient, found, size)
        self._gradient = found

    def _hash_state(self, row: Step) -> None:
        states = (optimizer.state.get(p, {}) for optimizer in self._optimizers for p in self._parameters)
        values = (value for state in states for _, value in sorted(state.items()))
        tensors = (value for value in values if isinstance(value, Tensor) and value.numel() > 1)  # on a GPU, none else
        averages = (average for callback in self._averaging for average in averaged_weights(callback))
        kept = {"copies": self._is_sharded}
        buffers = digest(self._buffers, **kept)
        row.state = digest(self._parameters, **kept), digest(tensors, **kept), digest(averages, buffers, **kept)

    def _compare_ranks(self, row: Step, module: L.LightningModule) -> None:
        """Compare replicas of the weights: on a GPU, those of the last time, so that nothing waits for it.

        Raises:
            RanksDifferError: They differ.
        """
        weights = row.state[0]
        local = weights if isinstance(weights, Tensor) else torch.tensor(weights - (weights >> 63 << 64))
        everywhere = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, local)
        before, self._compared = self._compared, (row.step, everywhere)
        step, gathered = before if before and local.is_cuda else self._compared
        digests = torch.stack(gathered).tolist()
        if len(set(digests)) == 1:
            return
        usual = digests.index(max(digests, key=digests.count))
        rank = next(rank for rank, value in enumerate(digests) if value != digests[usual])
        names = [name for name, p in module.named_parameters() if p.requires_grad and not p.is_meta]
        each = gather_objects([int(digest([parameter])) for parameter in self._parameters])
        different = [name for name, one, two in zip(names, each[rank], each[usual], strict=True) if one != two]
        raise RanksDifferError(
            f"after step {step} the weights of rank {rank} differ from those of rank {usual}, although both are "
            f"replicas{f', first in {different[0]}' if different else ''}; "
            "change weights and gradients alike on all ranks, as what one rank does alone is not averaged, or set "
            "callback.ledger=null if that is meant"
        )

    # Writing

    def _open(self, path: Path, device: str) -> BinaryIO:
        """Open a file whose rows go up to the step from which training continues."""
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = read_ledger(path) if self._step else None
        file = open(path, "r+b" if earlier else "wb", opener=files.opener(self.folder))  # noqa: SIM115
        if earlier:
            file.truncate(SIZE * (1 + int(np.count_nonzero(earlier.rows["step"] <= self._step))))
            file.seek(0, 2)
        else:
            file.write(header(device))
        return file

    def _flush(self, *, waits: bool = False) -> None:
        """Write the rows of the block before, whose tensors are on the host by now, and copy those of this one.

        Args:
            waits: Whether to wait for the device and to write these, too.
        """
        self._due = monotonic() + MAX_SECONDS
        self._write()
        rows, self._rows = self._rows, []
        losses = [loss for row in rows for loss in row.losses]
        norm = [row.norm for row in rows if row.norm is not None]
        norms = [norms for row in rows for norms in row.norms]
        digests = [each for row in rows for each in (row.samples, *row.state) if isinstance(each, Tensor)]
        copies = [copy_to_host(torch.stack(column)) if column else None for column in (losses, norm, digests)]
        copies.append(copy_to_host(torch.cat(norms)) if norms else None)
        self._copied = rows, copies
        if waits or all(copy is None or copy.ready is None for copy in copies):
            self._write()

    def _write(self) -> None:
        """Write the rows that were copied."""
        copied, self._copied = self._copied, None
        if copied is None or self._file is None:
            return
        rows, copies = copied  # of a block before, so this does not wait
        *numbers, norms = (copy and copy.wait() for copy in copies)
        losses, norm, digests = (iter(()) if each is None else iter(each.tolist()) for each in numbers)
        bits = memoryview(b"") if norms is None else norms.double().numpy().data
        lines, at = [], 0
        for row in rows:
            loss = [next(losses) for _ in row.losses]
            mean = row.scale * sum(loss) / len(loss) if loss else math.nan
            whole = math.nan if row.norm is None else next(norm)
            each = [next(digests) % (1 << 64) if isinstance(n, Tensor) else n for n in (row.samples, *row.state)]
            samples, weights, *short = each if row.state else (*each, 0, 0, 0)
            for indices in row.indices:
                samples = hash_indices(indices, samples)
            gradient = row.gradient
            for part in row.norms:
                end = at + len(part)
                gradient, at = xxh3_64_intdigest(bits[at:end], gradient), end
            lines.append(PACK(row.step, row.epoch, mean, whole, row.lr, samples, gradient, weights, *map(_half, short)))
        self._file.write(b"".join(lines))
        self._file.flush()

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for name in ("on_train_batch_start", "on_before_optimizer_step"):
            vars(self).pop(name, None)
        self._record_contents()
        if self._file is not None:
            self._flush(waits=True)
            self._file.close()
        self._begin(self._step)


def _half(found: int) -> int:
    """32 bits of a digest; 0 only if it was not computed."""
    return found % (1 << 32) or int(found != 0)


def has_replicas(trainer: L.Trainer) -> bool:
    """Whether all ranks must have equal weights after each step."""
    strategy = trainer.strategy
    is_replicated = isinstance(strategy, DDPStrategy) and not isinstance(strategy, ReducesGradientNorms)
    averages = getattr(strategy, "_model_averaging_period", None) is not None  # they differ in between
    on_known_device = strategy.root_device.type in ("cpu", "cuda")
    return is_replicated and not averages and on_known_device and dist.is_initialized() and trainer.world_size > 1


def hashed_parts(parameters: Sequence[Tensor]) -> list[tuple[Tensor, int | None]]:
    """Of which parameters the bits of gradients are hashed, and how many elements of each; None: all."""
    small = [parameter for parameter in parameters if parameter.numel() * parameter.element_size() <= MAX_BYTES]
    among = small if len(small) >= HASHED else parameters
    chosen = among[:: -(-len(among) // HASHED) or 1]
    return [(parameter, None if among is small else MAX_BYTES // parameter.element_size()) for parameter in chosen]


def hash_indices(indices: Any, seed: int | Tensor) -> int | Tensor:
    """Digest of which samples are in a batch, and of a number."""
    if indices is None or isinstance(seed, Tensor):
        return seed
    found = np.asarray(indices)
    return int(xxh3_64_intdigest(found.tobytes() if found.dtype.kind in "iu" else repr(indices).encode(), seed))


def digest(tensors: Iterable[Tensor], found: int | Tensor = 0, *, copies: bool = True) -> int | Tensor:
    """A 64-bit digest of all bits of tensors: of those on a GPU a tensor, which is not computed yet.

    Args:
        tensors: On the CPU or on a GPU; on other devices they are left out.
        found: Digest of what was before them.
        copies: Whether copies are hashed, as FSDP cannot resize a storage that NumPy has seen.

    Source: Dietzfelbinger, Universal Hashing and k-Wise Independent Random Variables via Integer Arithmetic without
    Primes, 1996: sums of products with random odd numbers, on a GPU.
    """
    for tensor in tensors:
        local = local_shard(tensor.detach())
        if flatten := getattr(local, "__tensor_flatten__", None):  # it holds others, as a quantized state does
            found = digest((getattr(local, name) for name in flatten()[0]), found, copies=copies)
        elif local.is_cuda:
            for chunk in torch.split(as_integers(local), CHUNK):
                found = found * ODD + (chunk * multipliers(local.device)[: len(chunk)]).sum()
        elif local.device.type == "cpu" and isinstance(found, int):
            found = hash_bytes(local.clone() if copies else local, found)
    return found


def as_integers(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers, of 32 bits where that is possible."""
    flat = tensor.coalesce().values() if tensor.is_sparse else tensor
    flat = flat.contiguous().reshape(-1)
    kinds = {1: torch.uint8, 2: torch.int16}
    return flat.view(kinds.get(flat.element_size(), torch.int32))


@lru_cache(8)
def multipliers(device: torch.device) -> Tensor:
    """Random odd numbers of 64 bits, always the same."""
    generator = np.random.default_rng(0)
    return torch.from_numpy(generator.integers(-(1 << 62), 1 << 62, CHUNK) * 2 + 1).to(device)


def hash_bytes(tensor: Tensor, seed: int, size: int | None = None) -> int:
    """Digest of the bytes of a tensor on the CPU, of at most ``size`` elements from its beginning, and of a number."""
    try:
        array: Any = tensor.numpy()
    except (TypeError, RuntimeError):  # sparse, of a type that NumPy does not have, or with a gradient
        array = as_integers(tensor.detach()).numpy()
    if size is not None and array.size > size:
        array = array.reshape(-1)[:size]
    return int(xxh3_64_intdigest(array if array.flags.c_contiguous else array.copy(), seed))
