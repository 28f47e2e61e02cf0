"""Pages that left the pool come back from host memory and from files: the same tokens; what cannot be read is computed again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pagoda.hal.errors import CapacityError, ConfigError
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.engine.build import start_engine
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.transfer.config import Disk, HostMemory
from tiny import tiny_config
from toy import toy_request

PROMPT = [(7 * i) % 200 for i in range(100)]
OTHERS = [[(11 * i + k) % 200 for i in range(150)] for k in range(3)]


def disk(folder: Path) -> dict[str, Any]:
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}


async def ask(client: InProcessClient, name: str, prompt: list[int]) -> tuple[list[int], int]:
    tokens, cached = [], 0
    async for delta in client.generate(toy_request(name, prompt, 12)):
        cached = max(cached, delta.cached_tokens)
        tokens += [token for part in delta.sequences for token in part.token_ids]
    return tokens, cached


async def evicted(config: EngineConfig) -> tuple[tuple[list[int], int], tuple[list[int], int], Any]:
    """The same prompt before and after others have swept a pool that holds one of them."""
    client = await InProcessClient.start(partial(start_engine, config))
    first = await ask(client, "first", PROMPT)
    for number, other in enumerate(OTHERS):
        await ask(client, f"other{number}", other)
    again = await ask(client, "again", PROMPT)
    stats = await client.stats()
    await client.close()
    return first, again, stats


SMALL = {"num_gpu_blocks_override": 12, "block_size": 16, "max_model_len": 180}


@pytest.mark.parametrize(
    "changes", [{}, {"num_hidden_layers": 3, "sliding_window": 24, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}]
)
@pytest.mark.parametrize("kind", ["size", "host", "disk"])
async def test_an_evicted_prefix_comes_back(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    flags: dict[str, dict[str, Any]] = {
        "size": {"kv_offloading_size": 0.01},
        "host": {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 10**7}}},
        "disk": {"kv_transfer_config": disk(tmp_path / "kv")},
    }
    plain_first, plain_again, _ = await evicted(tiny_config(tmp_path / "model", changes, **SMALL))
    first, again, stats = await evicted(tiny_config(tmp_path / "model", changes, **SMALL, **flags[kind]))
    assert plain_again[1] == 0, "the pool is too large for this test"
    assert again[0] == first[0] == plain_first[0] == plain_again[0]
    if not changes:
        assert (again[1], stats.external_hits, stats.external_queries) == (96, 96, 96)


async def test_files_outlive_the_engine_and_damaged_ones_are_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config(tmp_path / "model", **SMALL, kv_transfer_config=disk(tmp_path / "kv"))
    first, _, _ = await evicted(config)
    files = sorted((tmp_path / "kv").rglob("*.kv"))
    assert len(files) >= 6 and not list((tmp_path / "kv").rglob("*.[0-9]*"))
    client = await InProcessClient.start(partial(start_engine, config))
    assert await ask(client, "new engine", PROMPT) == (first[0], 96)
    await client.close()
    for file in files:
        file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    client = await InProcessClient.start(partial(start_engine, config))
    assert await ask(client, "damaged", PROMPT) == (first[0], 0)
    await client.close()
    assert sum("damaged" in record.getMessage() for record in caplog.records) == 1
    other = tiny_config(tmp_path / "model", **SMALL, kv_transfer_config=disk(tmp_path / "kv"), seed=5)
    client = await InProcessClient.start(partial(start_engine, other))
    assert (await ask(client, "other weights", PROMPT))[1] == 0
    await client.close()


@pytest.mark.heavy
async def test_ranks_bring_back_their_own_pages(tmp_path: Path) -> None:
    plain, _, _ = await evicted(tiny_config(tmp_path / "model", **SMALL))
    for flags in ({"kv_offloading_size": 0.01}, {"kv_transfer_config": disk(tmp_path / "kv")}):
        first, again, _ = await evicted(tiny_config(tmp_path / "model", **SMALL, tensor_parallel_size=2, **flags))
        assert again == (first[0], 96) and first[0] == plain[0]


def test_a_store_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="holds no unit"):
        start_engine(tiny_config(tmp_path / "model", **SMALL, kv_offloading_size=1e-6), None)  # type: ignore[arg-type]


def test_the_flags_as_in_vllm() -> None:
    parser = Parser("serve", "")
    parser.add_config(EngineConfig)
    assert build(EngineConfig, parser.values(["--kv-offloading-size", "1.5"])).storage == HostMemory(3 * 2**29)
    line = '{"kv_connector":"SharedStorageConnector","kv_role":"kv_both","kv_connector_extra_config":{"shared_storage_path":"/x"}}'
    assert build(EngineConfig, parser.values(["--kv-transfer-config", line])).storage == Disk("/x")


HOST = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1000}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "kv_connector 'NixlConnector' is not one of OffloadingConnector"),
        ({"kv_transfer_config": HOST | {"kv_role": "kv_producer"}}, "kv_role='kv_producer' is not served"),
        ({"kv_transfer_config": HOST | {"kv_load_failure_policy": "fail"}}, "kv_load_failure_policy='fail'"),
        ({"kv_transfer_config": HOST | {"kv_rank": 0}}, "unknown key 'kv_rank'"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector"}}, "takes 'shared_storage_path'"),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 0.5}}},
            "number of",
        ),
        ({"kv_transfer_config": HOST, "kv_offloading_size": 1.0}, "two ways"),
        ({"kv_offloading_size": 0.0}, "must be above 0"),
        ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, "needs enable_prefix_caching"),
    ],
)
def test_what_cannot_work_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**given)
