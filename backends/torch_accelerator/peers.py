"""Which ranks of a group still live, by a connection of each with rank 0: a vendor's collectives notice a loss after minutes, or never."""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Callable
from threading import Thread, current_thread
from typing import Any

from pagoda.hal.comm import Topology

GRACE_S = 1.0
"""After a rank has left, until that is a loss: all leave one after the other at the end, and a last collective may still run here."""
KEY = "peers"
_RANK = struct.Struct("!i")


class Peers:
    """Connections between the ranks, watched by a thread until `close`.

    Args:
        topology: the group; its host is where rank 0 listens.
        store: c10d key-value store of the group.
        lost: told once, in that thread, which rank has gone, by whatever end.

    Raises `OSError` where the ranks do not find each other in the group's time.
    """

    def __init__(self, topology: Topology, store: Any, lost: Callable[[str], None]) -> None:
        self._topology, self._lost = topology, lost
        self._wake, self._woken = socket.socketpair()
        self._links = _joined(topology, store)
        self._thread = Thread(target=self._watch, name=f"peers-{topology.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave; whoever leaves last hears of no loss. Idempotent."""
        self._wake.close()
        if self._thread is not current_thread():
            self._thread.join()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            selector.register(self._woken, selectors.EVENT_READ, None)
            gone = self._gone([key.data for key, _ in selector.select()])
        if gone is not None and not self._left_within(GRACE_S):
            self._lost(f"rank {gone} of {self._topology.world} has gone")
        for link in (*self._links.values(), self._woken):
            link.close()

    def _gone(self, heard: list[int | None]) -> int | None:
        """The rank that has gone; the others are told. None where it is this one that leaves."""
        if None in heard:
            return None
        rank = next(rank for rank in heard if rank is not None)
        try:
            told = self._links[rank].recv(_RANK.size, socket.MSG_WAITALL)
        except OSError:
            told = b""
        gone = int(_RANK.unpack(told)[0]) if len(told) == _RANK.size else rank
        for other, link in self._links.items() if self._topology.rank == 0 else ():
            if other != gone:
                try:
                    link.sendall(_RANK.pack(gone))
                except OSError:
                    continue  # it has gone as well
        return gone

    def _left_within(self, seconds: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            return bool(selector.select(seconds))


def _joined(topology: Topology, store: Any) -> dict[int, socket.socket]:
    host = topology.address.rpartition(":")[0].strip("[]")
    if topology.rank > 0:
        link = socket.create_connection((host, int(store.get(KEY))), timeout=topology.timeout_s)
        link.sendall(_RANK.pack(topology.rank))
        link.settimeout(None)
        return {0: link}
    found = dict[int, socket.socket]()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(("", 0), family=family) as listener:
        listener.settimeout(topology.timeout_s)
        store.set(KEY, str(listener.getsockname()[1]))
        while len(found) < topology.world - 1:
            link, _ = listener.accept()
            link.settimeout(topology.timeout_s)
            said = link.recv(_RANK.size, socket.MSG_WAITALL)
            rank = _RANK.unpack(said)[0] if len(said) == _RANK.size else 0
            if 0 < rank < topology.world and rank not in found:
                link.settimeout(None)
                found[rank] = link
            else:
                link.close()  # a stranger
    return found
