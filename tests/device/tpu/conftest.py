"""The suite of one device: collected where its runtime is installed (torch-xla, an environment of its own), nowhere else."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch_xla") else ["test_*"]
