"""A probe of link prediction: whether messages pass along the edges that validation asks for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from boltcutter.diagnosis.checks import Line, Lines, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.inputs import plain_tensors
from boltcutter.diagnosis.probe import is_close
from boltcutter.structure import flatten

FEWEST = 10  # edges, and pairs that are none
MOST_NODES = 20_000  # of a matrix
KNOWN, UNKNOWN = 0.95, 0.05  # shares of the pairs that a graph has
INTEGERS = (torch.int64, torch.int32)


@check("known-edges", "likely", at="probe")
def known_edges(seen: Evidence) -> Lines:
    """A graph of the module has the edges that validation asks for; without them, layers return other values."""
    probe, kind = seen.probe, "validation_step"
    pairs = pairs_of(flatten(probe.batches[kind])) if probe is not None and kind in probe.batches else None
    if probe is None or pairs is None:
        return
    (sources, targets), are_edges = pairs
    for name, graph in graphs_of(seen):
        found = places(graph, sources, targets)
        if found is None:
            continue
        is_known = found.any(1) if found.ndim > 1 else found
        shares = [float(is_known[chosen].double().mean()) for chosen in (are_edges, ~are_edges)]
        if shares[0] < KNOWN or shares[1] > UNKNOWN:
            continue
        base, before = probe.base(kind, training=False), graph.clone()
        remove(graph, sources[are_edges], targets[are_edges])
        try:
            other = probe.run(kind, probe.batches[kind], training=False)
        finally:
            graph.copy_(before)
        if any(not is_close(a, b) for (_, a), (_, b) in zip(base.tensors, other.tensors, strict=False)):
            yield Line(
                f"{name} has {shares[0]:.0%} of the edges that validation asks for, and {shares[1]:.0%} of the pairs "
                "that are none, and layers depend on these, so each edge tells of itself; pass messages along edges of "
                "training only",
                subject=name,
            )
            return


def pairs_of(leaves: list[object]) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
    """Both nodes of each pair of a batch, shapes (N,), and whether it is an edge, by its label; None without them."""
    tensors = [t for t in leaves if isinstance(t, Tensor) and t.ndim]
    labels = [t for t in tensors if t.ndim == 1 and bool(((t == 0) | (t == 1)).all()) and bool((t != t[0]).any())]
    if len(labels) != 1 or min(int((labels[0] == k).sum()) for k in (0, 1)) < FEWEST:
        return None
    count = len(labels[0])
    integers = [t for t in tensors if t.dtype in INTEGERS and t is not labels[0]]
    columns = [t.unbind(1) for t in integers if t.shape == (count, 2)]
    columns += [t.unbind(0) for t in integers if t.shape == (2, count)]
    single = [t for t in integers if t.shape == (count,)]
    columns += [tuple(single)] if len(single) == 2 else []
    return ((columns[0][0].long(), columns[0][1].long()), labels[0] == 1) if columns else None


def graphs_of(seen: Evidence) -> Iterator[tuple[str, Tensor]]:
    """Square matrices, and lists of edges (2, E) or (E, 2), that are buffers or plain attributes of the module."""
    named = [*seen.module.named_buffers()]
    named += [(f"{name}.{key}".lstrip("."), t) for (name, key), t in plain_tensors(seen.module).items()]
    named += [(k, t) for k, t in vars(seen.module).items() if isinstance(t, Tensor) and t.dtype in INTEGERS]
    for name, t in named:
        is_square = t.ndim == 2 and t.shape[0] == t.shape[1] <= MOST_NODES and not t.is_sparse
        if is_square or (t.ndim == 2 and 2 in t.shape and t.dtype in INTEGERS):
            yield name, t


def places(graph: Tensor, sources: Tensor, targets: Tensor) -> Tensor | None:
    """Of each pair, whether a graph has it; None if its nodes are others."""
    count = int(torch.stack([sources, targets]).max()) + 1
    if graph.dtype not in INTEGERS or graph.shape[0] == graph.shape[1] > 2:
        return graph[sources, targets] != 0 if count <= len(graph) else None
    first, second = (graph if len(graph) == 2 else graph.T).long()
    count = max(count, int(graph.max()) + 1 if graph.numel() else 0)
    known = torch.cat([first * count + second, second * count + first])
    return torch.isin(sources * count + targets, known)


def remove(graph: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Take edges out of a graph, in place, in both directions."""
    if graph.dtype not in INTEGERS or graph.shape[0] == graph.shape[1] > 2:
        graph[sources, targets] = 0
        graph[targets, sources] = 0
        return
    edges = graph if len(graph) == 2 else graph.T
    count = int(max(int(edges.max()), int(sources.max()), int(targets.max()))) + 1
    gone = torch.cat([sources * count + targets, targets * count + sources])
    chosen = torch.isin(edges[0].long() * count + edges[1].long(), gone)
    edges[1, chosen] = edges[0, chosen]  # an edge of a node to itself
