"""Nothing in the source opens a pickle that came from elsewhere, or sends one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax import tree_of

import stretto

SOURCE = Path(stretto.__file__).parents[1]
PICKLING = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
OBJECTS = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "send_pyobj",
    "recv_pyobj",
}
"""Functions of torch and pyzmq whose messages are pickles."""
EXCEPTIONS = {
    "stretto/trainer/state/slice_files.py": {"pickle.UnpicklingError"},
    "stretto_python/given/pickled.py": {"cloudpickle.dumps", "pickle.loads"},
    "stretto_megatron/torch_dist.py": {"pickle.Unpickler", "pickle.UnpicklingError", "torch.load"},
    "stretto_megatron/torch_files.py": {
        "pickle.Unpickler", "pickle.UnpicklingError", "torch.load", "weights_only = False",
    },
}  # fmt: skip
"""Names of such modules that may be used: errors of torch's checkpoint reader, which reads files of the user; for
objects that the user passed to a call in Python, which come from his own process and are opened by their SHA-256; and
for Megatron's files, whose unpicklers load tensors alone (tests/addons/megatron/test_megatron.py)."""


def uses(tree: ast.AST) -> Iterator[str]:
    """Names of modules that pickle, functions that do, and `torch.load`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLING:
            yield f"from {node.module}"
        if isinstance(node, ast.Name) and node.id in OBJECTS:
            yield node.id
        if isinstance(node, ast.Attribute):
            head = node.value.id if isinstance(node.value, ast.Name) else ""
            is_file = (head, node.attr) in (("torch", "load"), ("dcp", "save"))
            if node.attr in OBJECTS or head in PICKLING or is_file:
                yield ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            is_safe = isinstance(node.value, ast.Constant) and node.value.value is (node.arg == "weights_only")
            if not is_safe:
                yield f"{node.arg} = {ast.unparse(node.value)}"


@pytest.mark.heavy
def test_no_module_opens_or_sends_pickles() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name.startswith("stretto/examples/"):
            continue
        found = set(uses(tree_of(path))) - EXCEPTIONS.get(name, set())
        assert not found, f"{name}: {', '.join(sorted(found))}"


def test_the_check_finds_what_it_looks_for() -> None:
    code = "import pickle\npickle.loads(x)\ntorch.load(f)\ndist.all_gather_object(a, b)\nnp.load(f, allow_pickle=True)"
    assert set(uses(ast.parse(code))) == {"pickle.loads", "torch.load", "dist.all_gather_object", "allow_pickle = True"}
