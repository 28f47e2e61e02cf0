"""Layers for several tokens that lie below `mtp`, of models with recurrent and with sliding layers: drafts are those of the same tensors in
transformers' own such layer, and change no answer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.spec.ahead import AheadDrafter, open_drafter
from pagoda.serving.engine.spec.drafter import DraftState, TokenStates
from pagoda.serving.sdk import LLM
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make
from transformers.modeling_layers import MtpLayer

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16}
NEXT = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc", "post_norm": "mtp.norm"}
HEAD = {"post_norm": "model.mtp.layers.0.final_layernorm", "post_attention_layernorm": "model.mtp.layers.0.pre_mlp_layernorm"}
FULL = {"layer_types": ["full_attention"]}
SLIDES = 8


class Case(NamedTuple):
    """`one`: what a configuration of that layer alone says; `names`: of its modules in the checkpoint, others lie below `at`."""

    name: str
    values: dict[str, Any]
    one: dict[str, Any]
    at: str
    names: dict[str, str]
    kind: str | None = None


CASES = {
    "qwen3_next": Case("Qwen3Next", {**EXPERTS, **DELTA, "num_hidden_layers": 4}, FULL, "mtp.layers.0", NEXT),
    "qwen3_5": Case("Qwen3_5", {**DELTA, "num_hidden_layers": 4}, FULL, "mtp.layers.0", NEXT),
    "mimo": Case(
        "MiMoV2Flash",
        {
            "num_hidden_layers": 3, "head_dim": 12, "v_head_dim": 8, "num_key_value_heads": 2, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "sliding_window": SLIDES,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        "model.mtp.layers.0", HEAD, "sliding_attention",
    ),
}  # fmt: skip
IDS = [(37 * i + 11) % 120 + 5 for i in range(30)]


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as checkpoints keep them."""
    listed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".experts.")
        if not stem:
            listed[name] = tensor
            continue
        for expert, part in enumerate(tensor):
            pairs = zip(("gate", "up"), part.chunk(2), strict=True) if last == "gate_up_proj" else [("down", part)]
            listed |= {f"{stem}.experts.{expert}.{kind}_proj.weight": half for kind, half in pairs}
    return listed


class Oracle:
    """The main model and transformers' layer."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.main = case, make(folder, case.name, **case.values)
        config = copy.deepcopy(self.main.config)
        for key, value in {**case.one, "num_hidden_layers": 1}.items():
            setattr(config, key, value)
        last = self.main.model.layers[-1]
        self.layer = MtpLayer(config, type(last), type(last.input_layernorm), 0).eval()
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                spread = 1.2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
                parameter.copy_(torch.randn_like(parameter) * spread + (parameter.dim() == 1))
        tensors = {name.removeprefix("mtp_block."): tensor for name, tensor in self.layer.state_dict().items()}
        own = {self._name(name): tensor.clone().contiguous() for name, tensor in one_by_one(tensors).items()}
        save_file({**load_file(folder / "model.safetensors"), **own}, folder / "model.safetensors", metadata={"format": "pt"})

    def _name(self, name: str) -> str:
        first, _, rest = name.replace("self_attn.sinks", "self_attn.attention_sink_bias").partition(".")
        return f"{self.case.names[first]}.{rest}" if first in self.case.names else f"{self.case.at}.{first}.{rest}"

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
        states, follow, found = self.main.model.norm(self.stream(ids[:-1])), ids[1:], list[int]()
        for _ in range(count):
            rows, places = self.main.get_input_embeddings()(torch.tensor([follow])), torch.arange(len(follow))
            back = places[:, None] - places
            seen = (back >= 0) & (back < (SLIDES if self.case.kind else len(follow)))
            mask = torch.where(seen, 0.0, float("-inf"))[None, None]
            kind = [self.case.kind] if self.case.kind else []
            turned = self.main.model.rotary_emb(rows, places[None], *kind)
            out = self.layer(rows, states[None], turned, mask, places[None], None)
            found.append(int(self.main.lm_head(out)[0, -1].argmax()))
            states, follow = torch.cat([states, out[0, -1:]]), [*follow, found[-1]]
        return found


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Path]:
    folder = tmp_path_factory.mktemp("ahead")
    return Oracle(CASES[request.param], folder), folder


def test_its_drafts_are_those_of_the_same_tensors_in_transformers(made: tuple[Oracle, Path]) -> None:
    """In pieces, side by side, after tokens that were taken back, and for another text in the same slot."""
    oracle, folder = made
    speculation = {"method": "mtp", "num_speculative_tokens": 3}
    drafter = open_drafter(EngineConfig(model=str(folder), device="cpu", dtype="float32", max_num_seqs=3, speculative_config=speculation))
    assert isinstance(drafter, AheadDrafter) and drafter.wants == (oracle.main.config.num_hidden_layers - 1,)
    rounds: list[tuple[dict[int, list[int]], dict[int, int]]] = [
        ({0: IDS[:9], 2: IDS[3:20]}, {0: 0, 2: 0}),
        ({0: IDS[:12], 2: IDS[3:21]}, {0: 8, 2: 16}),
        ({0: [*IDS[:11], 7, 9]}, {0: 9}),
        ({0: IDS[5:25], 2: IDS[3:22]}, {0: 0, 2: 17}),
    ]
    for texts, starts in rounds:
        given = tuple(TokenStates(starts[slot], oracle.stream(ids[:-1])[starts[slot] :][None].numpy()) for slot, ids in texts.items())
        tokens = tuple(np.array(ids, np.int32) for ids in texts.values())
        draft = drafter.propose(DraftState(np.array(list(texts), np.int32), tokens, np.full(len(texts), 3, np.int32), given))
        assert draft.ids.tolist() == [oracle.drafts(ids, 3) for ids in texts.values()]


def answers(folder: Path, **engine: Any) -> tuple[list[list[int]], Any]:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options = {"max_model_len": 96, "kv_cache_memory_bytes": 16 << 20, "skip_tokenizer_init": True, "max_num_batched_tokens": 16}
    with LLM(str(folder), device="cpu", dtype="float32", **options, **engine) as llm:
        outputs = llm.generate([{"prompt_token_ids": IDS[i:]} for i in (0, 9, 18)], params, use_tqdm=False)
        again = llm.generate([{"prompt_token_ids": IDS}], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in (*outputs, *again)], llm.stats()


@pytest.mark.parametrize("speculation", [{"method": "mtp"}, {"method": "ngram", "prompt_lookup_min": 1}], ids=["mtp", "ngram"])
def test_answers_are_those_without(made: tuple[Oracle, Path], speculation: dict[str, Any]) -> None:
    _, folder = made
    plain, _ = answers(folder)
    drafted, stats = answers(folder, speculative_config={**speculation, "num_speculative_tokens": 2})
    assert drafted == plain and stats.draft_tokens > 0


def test_drafts_are_taken_as_often_as_the_layer_is_right(made: tuple[Oracle, Path]) -> None:
    """One at a time: of a plain answer's tokens, those that the layer guesses after the tokens before are its drafts that are taken."""
    oracle, folder = made
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"max_model_len": 96, "kv_cache_memory_bytes": 16 << 20, "skip_tokenizer_init": True}
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    with LLM(str(folder), device="cpu", dtype="float32", speculative_config=speculation, **options) as llm:
        (output,) = llm.generate([{"prompt_token_ids": IDS}], params, use_tqdm=False)
        stats = llm.stats()
    answer = list(output.outputs[0].token_ids)
    recurrent, known, drafted, taken = oracle.case.kind is None, 1, 0, 0
    while known < len(answer) - 1:
        right = oracle.drafts([*IDS, *answer[:known]], 1)[0] == answer[known]
        drafted, taken = drafted + 1, taken + right
        known += 1 + right
        if not right and recurrent:
            known += 1  # what was accepted is computed again, without drafts
    assert (stats.draft_tokens, stats.accepted_tokens) == (drafted, taken)
