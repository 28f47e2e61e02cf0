"""What a server keeps beside weights and pages: memory of its own of both processes, after prompts and answers."""

from __future__ import annotations

from pathlib import Path

import openai
from frontend_samples import byte_level
from pagoda.serving.cli.bench.process_tree import tree
from tiny_checkpoints import make
from toy_process import SERVE, ServerProcess

POOL_MIB = 8
BUDGET_MIB = 230
"""Python, its packages, torch's registries, vocabulary and working memory, 195 MiB with the pool when this was written. What torch
imports to compile costs 70 more."""


def _own_mib(root: int) -> float:
    """Pages of the tree that are no file's: those are shared by whoever else runs torch here."""
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in tree(root)]
    return sum(int(line.split()[1]) for lines in rollups for line in lines if line.startswith("Pss_Anon:")) / 1024


def test_a_server_keeps_little_beside_weights_and_pages(tmp_path, require) -> None:
    require("Linux", Path("/proc/self/smaps_rollup").exists())
    tokenizer = byte_level()
    make(tmp_path, "Llama", vocab_size=tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=1, pad_token_id=2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    flags = ["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--kv-cache-memory-bytes", f"{POOL_MIB}M", "--max-num-seqs", "32"]
    with ServerProcess([*SERVE, str(tmp_path), *flags], patience=180) as server:
        with openai.OpenAI(base_url=f"{server.where}/v1", api_key="none", max_retries=0, timeout=60) as client:
            model = client.models.list().data[0].id
            for length in (7, 60, 100):
                prompt = [(11 * k + 17) % 480 + 5 for k in range(length)]
                client.completions.create(model=model, prompt=prompt, max_tokens=8, extra_body={"ignore_eos": True})
        used = _own_mib(server.process.pid)
    assert 50 < used < BUDGET_MIB + POOL_MIB, f"{used:.0f} MiB"
