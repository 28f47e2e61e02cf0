"""The incremental detokenizer against the library's full decode, at every split."""

from __future__ import annotations

from functools import cache

import pytest
from frontend_samples import CORPUS, SHAPES
from hypothesis import given, settings
from hypothesis import strategies as st
from pagoda.serving.frontend.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = st.one_of(st.text(max_size=60), st.sampled_from(CORPUS), st.lists(st.sampled_from(list("".join(CORPUS))), max_size=40).map("".join))


@cache
def tokenizer(shape: str) -> Tokenizer:
    return Tokenizer(SHAPES[shape](), SPECIAL)


def byte_run_is_broken(tok: Tokenizer, ids: list[int], skip: bool) -> bool:
    run, broken = b"", False
    for i in [*(i for i in ids if not (skip and i in tok.special_ids)), -1]:
        piece = (tok.core.id_to_token(i) or "") if i >= 0 else ""
        if piece.startswith("<0x") and piece.endswith(">"):
            run += bytes.fromhex(piece[3:-1])
        else:
            broken |= run != run.decode(errors="ignore").encode()
            run = b""
    return broken


def streamed(tok: Tokenizer, ids: list[int], skip: bool) -> str:
    stream = tok.detokenizer(skip_special_tokens=skip)
    return "".join(stream.push([i]) for i in ids) + stream.flush()


@pytest.mark.parametrize("shape", SHAPES)
@settings(deadline=None, max_examples=200)
@given(text=TEXTS, skip=st.booleans())
def test_deltas_of_text_equal_the_full_decode(shape: str, text: str, skip: bool) -> None:
    tok = tokenizer(shape)
    ids = tok.encode(text)
    assert streamed(tok, ids, skip) == tok.core.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("shape", SHAPES)
@settings(deadline=None, max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_random_ids_equal_the_full_decode(shape: str, data: st.DataObject, skip: bool) -> None:
    tok = tokenizer(shape)
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size + 3), max_size=40))
    if shape.startswith("sentencepiece") and byte_run_is_broken(tok, ids, skip):
        assert streamed(tok, ids, skip) == tok.decode(ids, skip_special_tokens=skip)
    else:
        assert streamed(tok, ids, skip) == tok.core.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("shape", ["byte-level", "sentencepiece", "sentencepiece-bare"])
@settings(deadline=None)
@given(text=TEXTS, data=st.data())
def test_a_prompt_and_its_continuation_join_at_every_split(shape: str, text: str, data: st.DataObject) -> None:
    tok = tokenizer(shape)
    ids = tok.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    before = tok.detokenizer().push(ids[:cut])
    tail = tok.detokenizer(prompt=ids[:cut])
    assert before + tail.push(ids[cut:]) + tail.flush() == tok.decode(ids)


def test_an_unfinished_character_waits_and_is_replaced_at_the_end() -> None:
    tok = tokenizer("byte-level")
    ids = tok.encode("\U0001f9ff")  # not in the corpus
    assert len(ids) == 3
    stream = tok.detokenizer()
    assert [stream.push([i]) for i in ids] == ["", "", "\U0001f9ff"]
    assert stream.push(ids[:1]) == ""
    assert stream.flush() == "\ufffd"


def test_broken_byte_tokens_are_replaced_one_by_one_and_the_rest_survives() -> None:
    tok = tokenizer("sentencepiece")
    ids = [tok.token_to_id(f"<0x{b:02X}>") for b in (0x41, 0xFF, 0x42)]
    assert tok.decode(ids) == "A\ufffdB"


def test_a_continuation_keeps_the_space_that_a_first_token_drops() -> None:
    tok = tokenizer("sentencepiece")
    ids = tok.encode("the lazy", add_special_tokens=False)
    assert tok.detokenizer().push(ids) == "the lazy"
    assert tok.detokenizer(prompt=tok.encode("over")).push(ids) == " the lazy"
    assert tok.detokenizer(prompt=[0]).push(ids) == "the lazy"  # a special token leaves no text
