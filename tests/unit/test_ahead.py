"""A checkpoint's own layer for several tokens: its drafts are those of the same tensors in transformers, and change no answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pagoda.hal.errors import ConfigError, ModelError
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.spec.ahead import AheadDrafter, open_drafter
from pagoda.serving.engine.spec.drafter import DraftState, TokenStates
from pagoda.serving.sdk import LLM
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make

VALUES: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
IDS = [(37 * i + 11) % 120 + 5 for i in range(30)]
AT = "model.layers.2."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, and a third one that looks ahead."""
    path = tmp_path_factory.mktemp("ahead")
    make(path, "DeepseekV3", **VALUES)
    tensors = load_file(path / "model.safetensors")
    torch.manual_seed(5)
    like = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
    own = {name.replace("layers.1", "layers.2"): tensor + 0.2 * torch.randn_like(tensor) for name, tensor in like.items()}
    own |= {f"{AT}{name}.weight": 1 + 0.2 * torch.randn(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    own |= {f"{AT}eh_proj.weight": torch.randn(32, 64) * 0.2, f"{AT}shared_head.head.weight": torch.randn(131, 32) * 0.3}
    own[f"{AT}embed_tokens.weight"] = torch.randn(131, 32)
    save_file({**tensors, **own}, path / "model.safetensors", metadata={"format": "pt"})
    return path


class Oracle:
    """The same in transformers' modules: the main model, and one of a single layer with the third one's tensors."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        load = transformers.DeepseekV3ForCausalLM.from_pretrained
        self.tensors = load_file(folder / "model.safetensors")
        self.main = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}
        names = {"shared_head.norm": "model.norm", "shared_head.head": "lm_head", "embed_tokens": "model.embed_tokens"}
        names = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in names.items()}
        own = {name.removeprefix(AT): tensor for name, tensor in self.tensors.items() if name.startswith(AT)}
        inner = {names.get(name, f"model.layers.0.{name}"): tensor for name, tensor in own.items()}
        (scratch / "config.json").write_text(json.dumps(config | {"first_k_dense_replace": 0}))
        kept = {name: tensor for name, tensor in inner.items() if not name.endswith(("enorm.weight", "hnorm.weight", "eh_proj.weight"))}
        save_file(kept, scratch / "model.safetensors", metadata={"format": "pt"})
        self.ahead = load(scratch, dtype=torch.float32, attn_implementation="eager").eval()
        self.ahead.model.norm.register_forward_hook(lambda _, inputs, __: setattr(self, "before", inputs[0][0]))
        self.own = own

    @torch.no_grad()
    def stream(self, ids: list[int]) -> torch.Tensor:
        """After the last layer, before the last norm."""
        kept: list[torch.Tensor] = []
        hook = self.main.model.norm.register_forward_hook(lambda _, inputs, __: kept.append(inputs[0][0]))
        self.main(torch.tensor([ids]), use_cache=False)
        hook.remove()
        return kept[0]

    @torch.no_grad()
    def drafts(self, ids: list[int], count: int) -> list[int]:
        states, follow, found = self.main.model.norm(self.stream(ids[:-1])), ids[1:], []
        for _ in range(count):
            rows = self.own["embed_tokens.weight"][torch.tensor(follow)]
            both = torch.cat([self._norm(rows, "enorm"), self._norm(states, "hnorm")], dim=-1)
            logits = self.ahead(inputs_embeds=(both @ self.own["eh_proj.weight"].t())[None], use_cache=False).logits[0, -1]
            found.append(int(logits.argmax()))
            states, follow = torch.cat([states, self.before[-1:]]), [*follow, found[-1]]
        return found

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.own[f"{name}.weight"]


def asked(oracle: Oracle, texts: dict[int, list[int]], starts: dict[int, int]) -> DraftState:
    given = tuple(TokenStates(starts[slot], oracle.stream(ids[:-1])[starts[slot] :][None].numpy()) for slot, ids in texts.items())
    tokens = tuple(np.array(ids, np.int32) for ids in texts.values())
    return DraftState(np.array(list(texts), np.int32), tokens, np.full(len(texts), 3, np.int32), given)


def test_its_drafts_are_those_of_the_same_tensors_in_transformers(folder: Path, tmp_path: Path) -> None:
    """In pieces, side by side, after tokens that were taken back, and for another text in the same slot."""
    oracle = Oracle(folder, tmp_path)
    speculation = {"method": "mtp", "num_speculative_tokens": 3}
    drafter = open_drafter(EngineConfig(model=str(folder), device="cpu", dtype="float32", max_num_seqs=3, speculative_config=speculation))
    assert isinstance(drafter, AheadDrafter) and drafter.wants == (1,)
    rounds: list[tuple[dict[int, list[int]], dict[int, int]]] = [
        ({0: IDS[:9], 2: IDS[3:20]}, {0: 0, 2: 0}),
        ({0: IDS[:12], 2: IDS[3:21]}, {0: 8, 2: 16}),
        ({0: [*IDS[:11], 7, 9]}, {0: 9}),
        ({0: IDS[5:25], 2: IDS[3:22]}, {0: 0, 2: 17}),
    ]
    for texts, starts in rounds:
        draft = drafter.propose(asked(oracle, texts, starts))
        assert draft.ids.tolist() == [oracle.drafts(ids, 3) for ids in texts.values()]
        assert draft.parents[0].tolist() == [-1, 0, 1]


def answers(folder: Path, **engine: Any) -> tuple[list[list[int]], Any]:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options = {"max_model_len": 96, "kv_cache_memory_bytes": 16 << 20, "skip_tokenizer_init": True, "max_num_batched_tokens": 16}
    with LLM(str(folder), device="cpu", dtype="float32", **options, **engine) as llm:
        outputs = llm.generate([{"prompt_token_ids": IDS[i:]} for i in (0, 9, 18)], params, use_tqdm=False)
        again = llm.generate([{"prompt_token_ids": IDS}], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in (*outputs, *again)], llm.stats()


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_are_those_without(folder: Path, ranks: int) -> None:
    plain, _ = answers(folder)
    drafted, stats = answers(folder, tensor_parallel_size=ranks, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    assert drafted == plain and stats.draft_tokens > 0


def test_what_has_no_such_layer_is_told_so(folder: Path, tmp_path: Path) -> None:
    asked = {"method": "mtp", "num_speculative_tokens": 1}
    make(tmp_path, "DeepseekV3", **VALUES)
    with pytest.raises(ModelError, match="no layer that predicts several tokens"):
        open_drafter(EngineConfig(model=str(tmp_path), device="cpu", speculative_config=asked))
    make(tmp_path, "Lfm2", num_hidden_layers=3, full_attn_idxs=[1], block_multiple_of=16)
    with pytest.raises(ModelError, match="no layer that predicts several tokens"):
        open_drafter(EngineConfig(model=str(tmp_path), device="cpu", speculative_config=asked))
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        EngineConfig(model=str(folder), speculative_config={"method": "mtp"})
