"""Writes the Python stubs of serving/api/grpc/pagoda.proto with grpcio-tools; `--check`: are those in the tree current?"""

from __future__ import annotations

import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "pagoda/serving/api/grpc"
PROTO = f"{FOLDER}/pagoda.proto"
STUBS = ("pagoda_pb2.py", "pagoda_pb2.pyi", "pagoda_pb2_grpc.py")


def made() -> dict[str, str]:
    """The stubs by file name, as the installed grpcio-tools makes them."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "in"), Path(folder, "out")
        (source / PROTO).parent.mkdir(parents=True)
        out.mkdir()
        (source / PROTO).write_bytes((ROOT / PROTO.removeprefix("pagoda/")).read_bytes())
        well_known = resources.files("grpc_tools") / "_proto"
        arguments = [f"-I{source}", f"-I{well_known}", *(f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")), PROTO]
        if protoc.main(["protoc", *arguments]):
            raise SystemExit(f"protoc cannot read {PROTO}")
        return {name: (out / FOLDER / name).read_text() for name in STUBS}


def main() -> int:
    folder = ROOT / FOLDER.removeprefix("pagoda/")
    stubs = made()
    if "--check" in sys.argv[1:]:
        stale = [name for name, text in stubs.items() if not (folder / name).exists() or (folder / name).read_text() != text]
        if stale:
            print(f"stale: {', '.join(stale)}; run python ci/grpc_stubs.py")
        return 1 if stale else 0
    for name, text in stubs.items():
        (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
