"""Let the nodes of a job find one another through the storage of the run, where their platform does not."""

from __future__ import annotations

import ipaddress
import time
from contextlib import suppress

from boltcutter.checkpoint.storage import resolve_filesystem

FRESH_SECONDS = 60.0  # an older entry is from an earlier start
REFRESH_SECONDS = 20.0
POLL_SECONDS = 2.0
ENDED = "ended"  # written when a node gives up, or has completed the run


class EndedError(ValueError):
    """A node of the job will not start again."""


def join(place: str, address: str, num_nodes: int, max_minutes: float | None = None) -> tuple[int, str]:
    """Wait for the other nodes; they agree on ranks by sorting their addresses, as after a restart.

    Each node writes an entry with its address again and again until the entries of all nodes are recent, by the clock
    of the storage.

    Args:
        place: URL of a folder of the job.
        address: IP address of this node.
        num_nodes: Number of nodes.
        max_minutes: How long to wait; None: without limit.

    Returns:
        Rank of this node, and address of the first.

    Raises:
        EndedError: A node has ended for good, or was not there in time.
    """
    store, folder = resolve_filesystem(place)
    store.makedirs(folder, exist_ok=True)
    own, written, begin = f"{folder}/{address}", float("-inf"), time.monotonic()
    while True:
        if time.monotonic() > written + REFRESH_SECONDS:
            store.pipe_file(own, address.encode())
            written = time.monotonic()
        store.invalidate_cache()
        names = {path.rpartition("/")[2] for path in store.find(folder)}
        if ENDED in names:
            reason = store.cat(f"{folder}/{ENDED}").decode().strip()
            raise EndedError(f"another node of the job {place.rpartition('/')[2]} has ended for good: {reason}")
        now, recent = store.modified(own), []
        for name in names:
            with suppress(FileNotFoundError):  # a node has left since they were listed
                if (now - store.modified(f"{folder}/{name}")).total_seconds() < FRESH_SECONDS:
                    recent.append(name)
        if len(recent) == num_nodes:
            ranked = sorted(recent, key=ipaddress.ip_address)
            return ranked.index(address), ranked[0]
        if max_minutes is not None and time.monotonic() > begin + 60 * max_minutes:
            raise EndedError(f"only {len(recent)} of {num_nodes} nodes were there within {max_minutes:g} minutes")
        time.sleep(POLL_SECONDS)
