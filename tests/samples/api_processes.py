"""The API processes of a server with several, and connections to each of them."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
from patience import until

BURST = 16


def fronts(server):
    """The API processes but the first."""
    return [child for child in psutil.Process(server.process.pid).children(recursive=True) if _is_front(child)]


def _is_front(child):
    with contextlib.suppress(psutil.NoSuchProcess):  # nor is one that has just ended
        return "serving.api.front:serve" in " ".join(child.cmdline())
    return False


def processes(server):
    return [server.process.pid, *(front.pid for front in fronts(server))]


def holds(pid, peer):
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(one.raddr and one.raddr.port == peer for one in psutil.Process(pid).net_connections("tcp"))
    return False


def holder(server, port):
    """The process that has accepted the connection from this port, or will in a moment."""
    found = []
    until(lambda: found.extend(pid for pid in processes(server) if holds(pid, port)) or found)
    return found[0]


def connected(server):
    """A client with an open connection, and the process that holds it."""
    client = httpx.Client(base_url=server.where, timeout=60)
    with client.stream("GET", "/version") as answer:
        port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
        answer.read()
    return client, holder(server, port)


def connections(server, most=400):
    """Clients with an open connection each, and the processes that hold them: as many as it takes until each process has one.

    They come in bursts: of those that come one after another the same process may take all. One that has just been started needs time.
    """
    made = []
    with ThreadPoolExecutor(BURST) as threads:
        while {pid for _, pid in made} != set(processes(server)):
            assert len(made) < most, [pid for _, pid in made]
            time.sleep(len(made) // (3 * BURST))
            made += threads.map(lambda _: connected(server), range(BURST))
    return [client for client, _ in made], [pid for _, pid in made]


def of_each(server):
    """A client for each process, by its pid, and all that were opened for it."""
    clients, pids = connections(server)
    return dict(zip(pids, clients, strict=True)), clients
