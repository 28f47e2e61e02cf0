"""Every error that Pagoda raises on purpose, in one tree.

    PagodaError
    ├── ConfigError            a flag, file or argument that cannot work; raised before weights load
    ├── ModelError             the model cannot be built: unknown architecture, unread key, missing primitive
    │   └── CheckpointError    its files are corrupt, truncated, incomplete or misshapen
    ├── DeviceError            a device is absent, misbehaves or lacks a feature
    │   └── KernelError        no registered kernel fits a primitive that was asked for by name
    ├── CapacityError          it does not fit: memory, pages, rows, disk
    ├── RequestError           one request is wrong; nobody else is harmed (HTTP 400)
    │   └── NotFoundError      it names a model, adapter or response that is not here (HTTP 404)
    └── EngineDeadError        the engine process ended; every request it held is answered with this (HTTP 503)

A message says what was asked, what is there, and what to do.
"""

from __future__ import annotations


class PagodaError(Exception):
    """Base of the tree; catch this to catch everything that Pagoda raises on purpose."""


class ConfigError(PagodaError):
    """A setting that cannot work, found before any weight is loaded."""


class ModelError(PagodaError):
    """The model cannot be built from its configuration on this device."""


class CheckpointError(ModelError):
    """The files of a checkpoint are corrupt, truncated, incomplete or have wrong shapes."""


class DeviceError(PagodaError):
    """A device is absent or lacks what was asked of it."""


class KernelError(DeviceError):
    """A kernel that was asked for by name, or demanded by strictness, does not fit."""


class CapacityError(PagodaError):
    """Something does not fit.

    Args:
        message: what was asked, what is there, what to do.
        asked: units asked for (bytes, pages or tokens, as the message says).
        available: units there.
    """

    def __init__(self, message: str, *, asked: int | None = None, available: int | None = None) -> None:
        super().__init__(message)
        self.asked = asked
        self.available = available


class RequestError(PagodaError):
    """One request is wrong.

    Args:
        message: what was asked, what is allowed.
        param: the name of the offending field, in the protocol's spelling.
        code: a short machine-readable reason.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotFoundError(RequestError):
    """The request names something that is not here."""


class EngineDeadError(PagodaError):
    """The engine ended; its requests can not be answered."""
