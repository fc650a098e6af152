"""Nothing that comes over a network is unpickled or evaluated: what would do so is called nowhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("tinsmith", "tinsmith_cli", "trainer_service", "sampler_service", "gateway", "docker")

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
CALLS = {
    "torch.load",
    "torch.save",
    "numpy.load",
    "np.load",
    "eval",
    "exec",
    "compile",
    "yaml.load",
    "torch.hub.load",
    "dist.broadcast_object_list",
    "dist.all_gather_object",
    "dist.gather_object",
    "dist.scatter_object_list",
    "dist.send_object_list",
    "dist.recv_object_list",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.all_gather_object",
    "torch.distributed.gather_object",
    "torch.distributed.rpc.init_rpc",
    "multiprocessing.connection.Listener",
    "multiprocessing.connection.Client",
}
ARRAYS = {"numpy.load", "np.load"}
"""May be called with allow_pickle=False, said at the call."""
TEXTS = ("VLLM_ALLOW_INSECURE_SERIALIZATION", "allow_pickle=True", "trust_remote_code=True")

ALLOWED = {
    # On the machine of whoever owns the file, in the command line, by torch's restricted reader.
    ("tinsmith_cli/convert_pickle.py", "torch.load"),
    # A pipe to a process that this one has started.
    ("sampler_service/vllm/reference.py", "import multiprocessing"),
    # Waits for the process that has started this one to end.
    ("sampler_service/vllm/processes.py", "import multiprocessing"),
}
"""Each with its reason."""


def uses(tree: ast.AST, text: str) -> Iterator[str]:
    """Forbidden modules, calls and words of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                root = name.split(".")[0]
                if root in MODULES:
                    yield root
                if root == "multiprocessing" and not name.startswith("multiprocessing.shared_memory"):
                    yield "import multiprocessing"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            pickles = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}.get("allow_pickle")
            if called in CALLS and not (called in ARRAYS and pickles == "False"):
                yield called
    for word in TEXTS:
        if word in text:
            yield word


def found() -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            found |= {(path.relative_to(ROOT).as_posix(), use) for use in uses(ast.parse(text), text)}
    return found


def test_no_package_unpickles_or_evaluates() -> None:
    assert found() == ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.managers",
        "torch.load(path, weights_only=True)",
        "np.load(file)",
        "np.load(file, allow_pickle=flag)",
        "dist.broadcast_object_list(things)",
        "x = eval(text)",
        "env['VLLM_ALLOW_INSECURE_SERIALIZATION'] = '1'",
        "np.save(file, allow_pickle=True)",
    ],
)
def test_each_way_to_do_so_is_noticed(line: str) -> None:
    assert list(uses(ast.parse(line), line))
