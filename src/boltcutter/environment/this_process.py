"""What is true of this process as a whole, such as a signal that it has received, in one object: ``this_process``.

Handlers of signals, of forks and of ``atexit`` have no argument that could pass it. What is of a run or a component is
an attribute of that instead.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boltcutter.environment.announcement import Announcement
    from boltcutter.environment.lease import Lease
    from boltcutter.environment.reads import Reads
    from boltcutter.environment.startup import SignalWatchdog


@dataclass
class ThisProcess:
    """The state of this process; the module that sets it is named before each group."""

    # stop_signals
    received_signal: int = 0  # the last one; 0 for none
    immediate_signals: tuple[int, ...] = ()  # which raise an exception at once
    previous_handlers: dict[int, Any] = field(default_factory=dict)  # by signal number
    c_handler: int = 0  # address of the C function by which Python calls its handlers
    fork_hook_registered: bool = False  # such a hook cannot be unregistered
    # startup
    watchdog: SignalWatchdog | None = None
    training_started: threading.Event = field(default_factory=threading.Event)
    ends_with_launcher: int = 0  # ID of this process, if the kernel kills it when its launcher exits
    # process
    distributed_rank: int | None = None  # in the process group of several ranks that there was
    launcher: Any = None  # of the ranks that this process has started
    # identity
    rendezvous_stores: list[Any] = field(default_factory=list)  # which this process serves until it ends
    # lease
    lease: Lease | None = None  # of the folder in which it trains
    # announcement
    announcement: Announcement | None = None  # what others can read of it
    written_parts: int = 0  # of files
    # reads
    reads: Reads | None = None  # what the user's code has read
    is_audited: bool = False  # such a hook cannot be removed
    # threads
    free_cores: float | None = None  # which no other program used when it started
    # run/trust
    trusts_all: bool = False  # whatever others have recorded
    trusted_digests: frozenset[str] = frozenset()  # of records


this_process = ThisProcess()
