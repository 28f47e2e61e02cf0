"""The API processes of a server with several, and connections to each of them."""

from __future__ import annotations

import psutil


def fronts(server):
    """The API processes but the first."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "serving.api.front:serve" in " ".join(child.cmdline())]


def processes(server):
    return [server.process.pid, *(front.pid for front in fronts(server))]


def holds(pid, peer):
    return any(one.raddr and one.raddr.port == peer for one in psutil.Process(pid).net_connections("tcp"))


def holder(server, port):
    """The process that has accepted the connection from this port."""
    return next(pid for pid in processes(server) if holds(pid, port))
