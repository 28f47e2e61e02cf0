"""The example accelerator of docs/vendor: built, installed with pip, stricter than hardware, held to the contract in three modes."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "docs/vendor/example"
SAMPLES = Path(__file__).resolve().parents[1] / "samples"
PAPERCHIP = Path(__file__).parent / "paperchip"
TORCH_ASKS_FOR = {"torch._register_device_module", "module._is_in_bad_fork"}
"""How torch's guide has a device of PrivateUse1 made known, and what torch then asks of its module."""

MODES = ("fake", "fake-graph", "fake-static")
PUBLIC = {"pagoda.hal", "pagoda.ops", "pagoda.backends.torch_accelerator"}


def test_it_needs_public_names_alone() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("pagoda"):
                continue
            assert any(f"{node.module}.".startswith(f"{room}.") for room in PUBLIC), f"{path.name} reaches into {node.module}"


@pytest.mark.parametrize("source", [SOURCE, PAPERCHIP], ids=["example", "paperchip"])
def test_plugins_patch_nothing_and_take_no_private_name(source: Path) -> None:
    """Names of its own, and those of torch's that a device of PrivateUse1 must give or call, are fine."""
    for path in source.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom | ast.Import)]
        theirs = {name.asname or name.name.partition(".")[0] for node in imports for name in node.names}
        assert not [name.name for node in imports for name in node.names if name.name.startswith("_") and name.name != "__future__"], path
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("setattr", "exec", "eval", "__import__"), f"{path}: {ast.unparse(node)}"
            if not isinstance(node, ast.Attribute) or ast.unparse(node) in TORCH_ASKS_FOR:
                continue
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            imported = isinstance(root, ast.Name) and root.id in theirs
            assert isinstance(node.ctx, ast.Load) or not imported, f"{path} patches {ast.unparse(node)}"
            own = isinstance(root, ast.Name) and root.id in ("self", "cls", "other")
            private = node.attr.startswith("_") and not node.attr.endswith("__")
            assert own or not private, f"{path} reaches into {ast.unparse(node)}"


EACH_IN_A_FORK = """
import json, os, sys, tempfile, traceback
import torch
from pagoda.hal.discovery import find

def run(program):
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file.fileno(), stream.fileno())
    try:
        exec(program, {"torch": torch, "device": find("fake-graph").open(0)})
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)

ended = []
for program in json.load(sys.stdin):
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork() or run(program)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        file.seek(0)
        ended.append((code, file.read()))
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def ended(environment: dict[str, str]) -> dict[str, tuple[int, str]]:
    """The exit code and output of each program; torch is imported once for all."""
    command, programs = [sys.executable, "-c", EACH_IN_A_FORK], json.dumps(list(PROGRAMS.values()))
    result = subprocess.run(command, env=environment, input=programs, stdout=subprocess.PIPE, text=True, check=True, timeout=250)
    return dict(zip(PROGRAMS, map(tuple, json.loads(result.stdout)), strict=True))


def shown(code: int, output: str) -> str:
    assert code == 0, output
    return output


TOUCH = "import ctypes\nx = torch.ones(4, device=device.torch_device)\ndevice.synchronize()\nctypes.string_at(x.data_ptr(), 4)"


def test_the_host_cannot_touch_its_memory(ended: dict[str, tuple[int, str]]) -> None:
    assert ended["touch"][0] == -signal.SIGSEGV


REFUSED = """
from pagoda.hal.errors import DeviceError

def refused(words, call):
    try:
        call()
        device.synchronize()
    except (RuntimeError, DeviceError) as error:
        assert words in str(error), error
    else:
        raise SystemExit(f"not refused: {words}")

here, there, host = torch.ones(4, 4, device="fake:0"), torch.ones(4, 4, device="fake:1"), torch.ones(4, 4)
refused("all tensors to be on the same device", lambda: here + host)
refused("host", lambda: torch.nn.functional.linear(host, here))
refused("host", lambda: torch.cumsum(here, 0, out=host))
refused("one device", lambda: here @ there)
refused("host", lambda: torch.where(here > 0, here, host))
graph = torch.fake.Graph()
def captured(call):
    with torch.fake.graph(graph):
        call()
refused("inside a capture", lambda: captured(lambda: here.sum().item()))
refused("inside a capture", lambda: captured(lambda: here.cpu()))
refused("inside a capture", lambda: captured(lambda: here.copy_(host)))
refused("inside a capture", lambda: captured(lambda: here.nonzero()))
refused("inside a capture", lambda: captured(lambda: here[here > 0]))
refused("bytes free", lambda: torch.empty(1 << 31, device="fake:0"))
refused("out of bounds", lambda: here.index_fill_(0, torch.tensor([9], device="fake:0"), 0.0))
assert (here + 1).sum().item() == 32, "it is usable after all that"
"""


def test_mixed_devices_and_hidden_trips_to_the_host_are_refused(ended: dict[str, tuple[int, str]]) -> None:
    shown(*ended["refused"])


STREAMS = """
big, first, second = torch.ones(400, 400, device="fake:0"), device.stream(), device.stream()
out, copy = torch.empty_like(big), torch.zeros_like(big)
device.synchronize()
for turns in (40, 200, 1000):  # a host that stood still before it looked looks again, with more to do
    with first:
        for _ in range(turns):
            torch.mm(big, big, out=out)
        event = first.record()
    if goes_on := not event.done():
        break
print(goes_on)
second.wait(event)
with second:
    copy.copy_(out)
    after = second.record()
after.wait()
assert event.done() and copy.min().item() == 400
"""


def test_work_goes_on_while_the_host_does(ended: dict[str, tuple[int, str]]) -> None:
    assert shown(*ended["streams"]).endswith("True\n")


GRAPHS = """
x, graph, calls = torch.zeros(4, device="fake:0"), torch.fake.Graph(), []
with torch.fake.graph(graph):
    calls.append(1)
    y = (x * 2).relu().cumsum(0)
for turn in range(3):
    x.fill_(turn)
    graph.replay()
    assert y.cpu().tolist() == [2 * turn * n for n in (1, 2, 3, 4)], y.cpu()
assert calls == [1] and graph.nbytes > 0
"""


def test_a_replay_runs_the_operators_and_not_the_code(ended: dict[str, tuple[int, str]]) -> None:
    shown(*ended["graphs"])


FREED = """
def step(x, weight):
    return (x @ weight).clamp_(max=5.0)

def outcome(change):
    held = {"x": torch.ones(4, 4, device="fake:0"), "weight": torch.full((4, 4), 2.0, device="fake:0")}
    graph = torch.fake.Graph()
    with torch.fake.graph(graph):
        out = step(**held)
    graph.replay()
    assert out.cpu().max().item() == 5.0
    change(held)
    try:
        graph.replay()
    except RuntimeError as error:
        return str(error)
    return out.cpu().flatten().tolist()[0]

assert outcome(lambda held: held["x"].fill_(0.5)) == 4.0, "an input that is written is read"
assert "freed since its capture: 64 bytes" in outcome(lambda held: held.update(x=torch.zeros(4, 4, device="fake:0"))), "replaced"
assert "freed since its capture" in outcome(lambda held: held.pop("weight")), "a weight"
assert "moved since its capture" in outcome(lambda held: held["x"].untyped_storage().resize_(1 << 16)), "grown"
"""


def test_a_replay_faults_on_memory_that_was_freed_since_its_capture(ended: dict[str, tuple[int, str]]) -> None:
    shown(*ended["freed"])


PROGRAMS = {"touch": TOUCH, "refused": REFUSED, "streams": STREAMS, "graphs": GRAPHS, "freed": FREED}


CAPTURES = """
import asyncio, sys, tempfile
from pathlib import Path
sys.path.insert(0, SAMPLES)
from pagoda.serving.engine.build import engine_starter
from pagoda.serving.engine.inprocess_client import InProcessClient
from tiny import tiny_config
from toy import toy_request

KINDS = ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 4, "top_p": 0.8}, {"logit_bias": {5: 2.0}})

async def heard(graphs, ranks):
    config = tiny_config(Path(tempfile.mkdtemp()), device="fake-graph", graphs=graphs, tensor_parallel_size=ranks, use_tqdm_on_load=False)
    client = await InProcessClient.start(engine_starter(config))
    waves = []
    for wave in ("before", "after", "woken"):
        async def ask(number):
            deltas = client.generate(toy_request(f"{wave}-{number}", [9 + number] * (3 + 5 * number), 7, **KINDS[number % len(KINDS)]))
            return [token async for delta in deltas for part in delta.sequences for token in part.token_ids]
        waves.append(await asyncio.gather(*map(ask, range(5))))
        captured = []
        while (stats := await client.stats()).steps_to_capture:
            captured.append(stats.steps_captured)
            await asyncio.sleep(0.02)
        captured.append(stats.steps_captured)
        if wave == "after":
            await client.call("sleep", level=2)
            await client.call("wake")
    await client.close()
    return waves, captured

async def main():
    (plain, *_), none = await heard("none", RANKS)
    assert none == [0]
    for graphs in ("full", "piecewise"):
        waves, captured = await heard(graphs, RANKS)
        assert waves == [plain] * 3, (graphs, waves, plain)
        assert captured[-1] > CAPTURED, captured

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.heavy
@pytest.mark.parametrize(("ranks", "captured"), [(1, 10), (2, -1)])
def test_captures_in_idle_moments_change_no_answer(environment: dict[str, str], tmp_path: Path, ranks: int, captured: int) -> None:
    """Its graphs refuse trips to the host and fault on memory that has gone, so a capture of the wrong moment would show."""
    program = tmp_path / "captures.py"
    constants = f"SAMPLES, RANKS, CAPTURED = {str(SAMPLES)!r}, {ranks}, {captured}\n"
    program.write_text(constants + CAPTURES)
    result = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]


ONE_AFTER_THE_OTHER = """
import json, sys
from pagoda.serving.cli.main import main
sys.exit(max(main(["conformance", *json.loads(words)]) for words in sys.argv[1:]))
"""


def conforms(environment: dict[str, str], mode: str, folder: Path, *parts: dict[str, tuple[str, ...]]) -> None:
    """Each part in a report of its own: levels, and checks of them where not all. One process, which takes a while to start."""
    told, reports = [], [folder / f"{number}.json" for number in range(len(parts))]
    for part, report in zip(parts, reports, strict=True):
        chosen = [word for flag, values in part.items() for value in values for word in (f"--{flag}", value)]
        told.append(json.dumps(["--device", mode, *chosen, "--json", str(report)]))
    command = [sys.executable, "-c", ONE_AFTER_THE_OTHER, *told]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    for report in reports:
        outcomes = {one["name"]: one["outcome"] for one in json.loads(report.read_text())["results"]}
        assert set(outcomes.values()) <= {"passed", "unclaimed"} and "passed" in outcomes.values()


FEW = {
    "1": ("norm=", "gemm=", "embedding=", "activation=", "write_kv=", "segment_attention=", "route=", "moe_mlp=", "penalize=", "logprobs="),
    "3": ("a world of 2",),
    "4": ("grouped queries, rotation, gated feed-forward: as on the reference device [float32]", "in chunks as at once"),
    "5": ("a prefix hit changes nothing", "an abandoned request"),
}
"""Level → checks that take a second or less each."""


@pytest.mark.parametrize("mode", MODES)
def test_device_steps_and_some_of_the_rest_conform(environment: dict[str, str], tmp_path: Path, mode: str) -> None:
    few = {"level": tuple(FEW), "check": tuple(check for checks in FEW.values() for check in checks)}
    conforms(environment, mode, tmp_path, {"level": ("0", "2")}, few)


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["1", "3", "4", "5"])
def test_kernels_ranks_models_and_engine_conform(environment: dict[str, str], tmp_path: Path, mode: str, level: str) -> None:
    conforms(environment, mode, tmp_path, {"level": (level,)})
