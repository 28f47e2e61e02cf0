"""How byte-level BPE vocabularies cut text into words before merging: GGUF names the rule, these are the rules."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.hal.errors import ConfigError
from tokenizers import Regex, normalizers, pre_tokenizers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{TAIL}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")
SLASHED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = rf"{CASED[0]}{CONTRACTIONS}?|{CASED[1]}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{SLASHED_TAIL}"
TEKKEN = rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{SLASHED_TAIL}"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class Split:
    """A rule.

    Attributes:
        cuts: patterns whose matches are isolated, one after the other.
        digits: digits stand alone first.
        gpt2: GPT-2's own pattern comes last.
        nfc: text is composed first.
        ignore_merges: a whole word that is in the vocabulary is taken as it is.
        bos: a begin token is put in front when the metadata does not say.
    """

    cuts: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in self.cuts]
        if self.digits:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)])


GPT2 = Split(gpt2=True)

_NAMES: tuple[tuple[str, Split], ...] = (
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2", Split((LLAMA3,), ignore_merges=True, bos=True)),
    ("dbrx smaug-bpe chatglm-bpe glm4", Split((LLAMA3,))),
    ("stablelm2 hunyuan megrez", Split((QWEN2,))),
    ("qwen2 deepseek-r1-qwen", Split((QWEN2,), nfc=True)),
    ("qwen35", Split((QWEN35,), nfc=True)),
    ("gpt-4o llama4", Split((GPT4O,))),
    ("tekken", Split((TEKKEN,), ignore_merges=True, bos=True)),
    ("deepseek-v3 hunyuan-dense", Split((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3))),
    ("deepseek-coder", Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b", Split(digits=True, gpt2=True)),
    ("gpt-2 phi-2 mpt olmo jais jina-es jina-de jina-v2-code trillion roberta-bpe modern-bert", GPT2),
    ("bloom poro-chat gpt3-finnish", Split((BLOOM,))),
    ("viking", Split((BLOOM, r"\p{N}"))),
    ("falcon", Split((r"[\p{P}\$\+<=>\^~\|`]+", "[0-9][0-9][0-9]"), gpt2=True)),
)
SPLITS: dict[str, Split] = {name: split for names, split in _NAMES for name in names.split(" ")}
"""Rules by the name under `tokenizer.ggml.pre`."""


def split_of(name: str | None) -> Split:
    """The rule of a name; files from before rules were named cut as GPT-2 does. Raises `ConfigError` for a name not known."""
    if name in (None, "default"):
        return GPT2
    if name not in SPLITS:
        raise ConfigError(
            f"the GGUF file's vocabulary cuts text by the rule {name!r}; known are {', '.join(sorted(SPLITS))}."
            " Name a folder with the model's tokenizer.json with --tokenizer"
        )
    return SPLITS[name]
