"""Where the API processes of one server keep their metrics together: prometheus_client's multiprocess mode, chosen before its import."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "PROMETHEUS_MULTIPROC_DIR"  # how the library is told, in this process and in those that it starts


@contextmanager
def shared_metrics(wanted: bool) -> Iterator[None]:
    """Until the end, processes that are started share their metrics, where `wanted`."""
    if not wanted:
        yield
        return
    folder = tempfile.mkdtemp(prefix="pagoda-metrics-")
    os.environ[_NAME] = folder
    try:
        yield
    finally:
        del os.environ[_NAME]
        shutil.rmtree(folder, ignore_errors=True)


def metrics_folder() -> str | None:
    """None where a process has its metrics to itself."""
    return os.environ.get(_NAME)
