"""Options generated from dataclasses: spellings, types, files, and the errors of wrong ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pagoda.hal.errors import ConfigError
from pagoda.serving.cli.flags import Parser, build, options_of
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.config import EngineConfig, Flag


@dataclass(frozen=True)
class Toy:
    """One field of every type that a configuration may have."""

    text: Annotated[str, Flag("A text.", section="First")] = "x"
    count: Annotated[int, Flag("A count.", ("-c", "--number"))] = 3
    limit: Annotated[int | None, Flag("A limit.")] = None
    share: Annotated[float, Flag("A share.")] = 0.5
    mode: Annotated[Literal["slow", "fast"], Flag("A mode.", section="Second")] = "slow"
    warm: Annotated[bool, Flag("A switch that is on.")] = True
    cold: Annotated[bool, Flag("A switch that is off.")] = False
    pairs: Annotated[dict[str, str], Flag("Pairs.", metavar="OP=NAME")] = field(default_factory=dict)
    tree: Annotated[dict[str, Any], Flag("A tree.")] = field(default_factory=dict)
    names: Annotated[tuple[str, ...], Flag("Names.")] = ()
    hidden: int = 7


def parser() -> Parser:
    made = Parser("toy", "A toy.")
    made.add_config(Toy)
    return made


def toy(line: str) -> Toy:
    return build(Toy, parser().values(line.split()))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", Toy()),
        ("--text=a --count 9", Toy(text="a", count=9)),
        ("-c 4", Toy(count=4)),
        ("--number=-2", Toy(count=-2)),
        ("--count -2", Toy(count=-2)),
        ("--count 32k", Toy(count=32_000)),
        ("--count 1.5K", Toy(count=1536)),
        ("--limit 5", Toy(limit=5)),
        ("--limit auto", Toy()),
        ("--limit -1", Toy()),
        ("--share .25", Toy(share=0.25)),
        ("--mode fast", Toy(mode="fast")),
        ("--no-warm --cold", Toy(warm=False, cold=True)),
        ("--warm --no_cold", Toy()),
        ("--pairs a=b --pairs c=d=e", Toy(pairs={"a": "b", "c": "d=e"})),
        ('--pairs {"a":"b"}', Toy(pairs={"a": "b"})),
        ('--tree {"a":{"b":[1]}}', Toy(tree={"a": {"b": [1]}})),
        ("--names a b --names c", Toy(names=("a", "b", "c"))),
        ('--text --text', "expected one argument"),
        ("--cuont 3", r"unknown flag --cuont; did you mean --count\?"),
        ("--zzzzzzzz", "unknown flag --zzzzzzzz; see pagoda toy --help"),
        ("stray", "unexpected argument 'stray'"),
        ("--count many", "--count 'many' must be a whole number"),
        ("--count 1.5", "--count '1.5' must be a whole number"),
        ("--share half", "--share 'half' must be a number"),
        ("--mode quick", "--mode 'quick' must be one of slow, fast"),
        ("--pairs a", "--pairs 'a' must be KEY=VALUE"),
        ("--tree [1]", "must be a JSON object"),
        ("--tree {", "is not valid JSON"),
        ("--hidden 3", "unknown flag --hidden"),
    ],
)  # fmt: skip
def test_a_line(line: str, expected: Toy | str) -> None:
    if isinstance(expected, Toy):
        assert toy(line) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            toy(line)


def test_spellings_of_vllm_work_with_underscores_and_dashes() -> None:
    made = Parser("serve", "")
    made.add_config(EngineConfig)
    line = "--max_model_len 4K --gpu-memory-utilization .5 --gpu_memory_utilization=.6 -tp 2 --no-enable-prefix-caching --dtype bfloat16"
    config = build(EngineConfig, made.values(line.split()))
    expected = EngineConfig(
        max_model_len=4096, device_memory_utilization=0.6, tensor_parallel_size=2, enable_prefix_caching=False, dtype="bfloat16"
    )
    assert config == expected


def test_the_dataclass_still_refuses_what_it_refuses() -> None:
    made = Parser("serve", "")
    made.add_config(EngineConfig)
    with pytest.raises(ConfigError, match="max_num_seqs=0 must be at least 1"):
        build(EngineConfig, made.values(["--max-num-seqs", "0"]))


def from_file(tmp_path: Path, text: str, line: str = "") -> Toy:
    path = tmp_path / "toy.yaml"
    path.write_text(text)
    made = parser()
    made.add_config_file()
    return build(Toy, made.values([*line.split(), "--config", str(path)]))


def test_a_file_stands_under_the_command_line(tmp_path: Path) -> None:
    text = "text: file\ncount: 4k\nlimit: null\nwarm: false\ncold: true\nnames: [a, b]\npairs: {x: y}\ntree: {k: {l: 1}}\nshare: 0.125\n"
    everything = Toy("file", 4000, None, 0.125, "slow", False, True, {"x": "y"}, {"k": {"l": 1}}, ("a", "b"))
    assert from_file(tmp_path, text) == everything
    assert from_file(tmp_path, text, "--text line --warm --names c").names == ("c",)
    assert from_file(tmp_path, "text: file\n", "--text line").text == "line"


@pytest.mark.parametrize(("text", "message"), [("a: [", "not valid YAML"), ("- a", "must map flags"), ("cuont: 1", "did you mean --count")])
def test_wrong_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_file(tmp_path, text)


def test_a_missing_file_is_named() -> None:
    made = parser()
    made.add_config_file()
    with pytest.raises(ConfigError, match=r"--config /nowhere\.yaml: No such file"):
        made.values(["--config", "/nowhere.yaml"])


def test_help_is_grouped_and_shows_defaults() -> None:
    text = parser().format_help()
    assert text.index("First") < text.index("--count, -c, --number N") < text.index("Second") < text.index("--mode")
    for part in ("[default 3]", "[one of slow, fast; default slow]", "--[no-]warm", "[on by default]", "--pairs OP=NAME", "--tree JSON"):
        assert part in text
    assert "\033" not in text


def test_every_engine_field_has_a_flag_with_help() -> None:
    names = {option.name for option in options_of(EngineConfig)}
    assert names == set(EngineConfig.__dataclass_fields__)
    assert json.dumps(sorted(names))
    for option in options_of(EngineConfig):
        assert option.flag.help.endswith(".")


def test_words_may_stand_among_options() -> None:
    made = Parser("toy", "", words=2)
    made.add_config(Toy)
    assert made.values(["a", "--count", "3", "b c"]) == {"count": 3, "words": ["a", "b c"]}
    assert made.values(["--count", "3", "--", "--text", "-x"]) == {"count": 3, "words": ["--text", "-x"]}
    with pytest.raises(ConfigError, match="unexpected argument 'c'"):
        made.values(["a", "b", "c"])


def test_the_model_is_the_first_word() -> None:
    assert with_model({"words": ["m"], "seed": 1}) == {"model": "m", "seed": 1}
    assert with_model({"words": ["m"], "model": "m"}) == with_model({"model": "m"}) == {"model": "m"}
    with pytest.raises(ConfigError, match="two models are named: 'm' and --model 'n'"):
        with_model({"words": ["m"], "model": "n"})
