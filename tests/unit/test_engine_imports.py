"""The engine runs where no server package is installed: importing its in-process side brings none of them."""

from __future__ import annotations

import subprocess
import sys

SERVER_ONLY = ("starlette", "uvicorn", "msgspec", "zmq", "prometheus_client", "typer", "rich", "transformers", "gguf")


def test_the_in_process_engine_needs_no_server_package() -> None:
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {SERVER_ONLY!r}:
            raise ImportError(f"{{name}} is not installed here")
sys.meta_path.insert(0, Refuse())
import pagoda.serving.engine.build, pagoda.serving.engine.engine_plan, pagoda.serving.engine.executors.rank
from pagoda.serving.engine.inprocess_client import InProcessClient
print("imported")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", done.stderr


def test_a_servers_own_process_needs_no_torch() -> None:
    code = """
import sys
import pagoda.serving.engine.zmq_client, pagoda.serving.engine.starter, pagoda.serving.engine.config
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


def test_a_start_imports_nothing_that_waits_for_a_request() -> None:
    code = """
import sys
import pagoda.serving.engine.build, pagoda.serving.engine.process, pagoda.serving.frontend.structured.starter, pagoda.backends.cpu.device
late = ("pagoda.ops.cases", "pagoda.serving.frontend.tokenizer", "tokenizers", "jinja2", "transformers")
print([name for name in late if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_a_server_begins_its_engine_before_it_reads_its_options() -> None:
    code = """
import sys
import pagoda.serving.cli.main, pagoda.serving.cli.serve
print([name for name in ("numpy", "yaml", "msgspec", "argparse", "pagoda.serving.engine.config") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
