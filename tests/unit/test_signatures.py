"""Shapes in signatures: every public function that handles arrays has them, and tests/shapes.py checks calls."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from processes import forked
from syntax import tree_of

from stretto.models.lm_head import head_logits
from stretto.orchestrator.batch import Cost

pytest.importorskip("beartype")

from shapes import ROOMS, arguments_of, checked, is_shape, words_of

SOURCE = Path(__file__).parents[2] / "src"
ARRAYS = {"Tensor", "ndarray"}
NAMED = {"dict", "Mapping", "tuple"}
"""Containers of str and arrays may be untyped: weights by name, or metrics, have as many shapes as names."""


def test_an_array_of_other_dims_or_dtype_than_the_signature_says_is_refused():
    head_logits(torch.ones(3, 4), torch.ones(5, 4))
    for wrong in (torch.ones(3), torch.ones(3, 4, dtype=torch.int64)):
        with pytest.raises(TypeError, match=r"parameter 'hidden'"):
            head_logits(wrong, torch.ones(5, 4))
    Cost().of(np.ones(2, int))
    with pytest.raises(TypeError, match=r"parameter 'lengths'"):
        Cost().of(np.ones((2, 2), int))


def test_what_a_coroutine_function_takes_and_returns_is_checked():
    from jaxtyping import Float

    async def repeat(x, times):
        await asyncio.sleep(0)
        return torch.cat([x] * times)

    repeat.__annotations__ = {"x": Float[torch.Tensor, " n"], "return": Float[torch.Tensor, " n"]}
    checks = checked(repeat)
    assert len(asyncio.run(checks(torch.ones(3), 1))) == 3
    with pytest.raises(TypeError, match=r"parameter 'x'"):
        asyncio.run(checks(torch.ones(3, 1), 1))
    with pytest.raises(TypeError, match=r"return value"):
        asyncio.run(checks(torch.ones(3), 2))


def test_what_has_passed_is_not_checked_again_and_all_else_is():
    from jaxtyping import Float

    def cut(x, row, *, count=1):
        return x[:count], row

    vector = Float[torch.Tensor, " m"]
    cut.__annotations__ = {"x": Float[torch.Tensor, " n"], "row": vector, "return": tuple[vector, vector]}
    checks, x = checked(cut), torch.ones(3)
    for _ in range(2):
        assert len(checks(x, torch.ones(1))) == 2
        assert len(checks(x=x, row=torch.ones(2), count=2)) == 2
        for row in (torch.ones(1, 1), torch.ones(1, dtype=torch.int64), None):
            with pytest.raises(TypeError, match=r"parameter 'row'"):
                checks(x, row)
        with pytest.raises(TypeError, match=r"return value"):
            checks(x, torch.ones(2))
        with pytest.raises(TypeError, match=r"return value"):
            checks(x, torch.ones(1), count=2)


def test_of_a_list_one_array_is_checked_at_every_call():
    from jaxtyping import Float

    def count(rows):
        return len(rows)

    count.__annotations__ = {"rows": list[Float[torch.Tensor, " n"]]}
    checks = checked(count)
    with pytest.raises(TypeError, match="checking the parameters"):
        for _ in range(200):
            checks([torch.ones(2), torch.ones(2, 2)])


def test_the_value_of_a_literal_is_checked_at_every_call():
    def name(mode):
        return mode

    name.__annotations__ = {"mode": Literal["truncate", "mask"]}
    checks = checked(name)
    assert checks("mask") == "mask"
    with pytest.raises(TypeError, match="parameter 'mode'"):
        checks("cut")


@pytest.mark.heavy
@pytest.mark.parametrize("room", ROOMS)
def test_public_functions_say_the_shapes_of_the_arrays_that_they_take_and_return(room):
    bare = [
        f"{path.relative_to(SOURCE)}:{function.lineno} {function.name}: {ast.unparse(annotation)}"
        for path in sorted(SOURCE.joinpath(*room.split(".")).rglob("*.py"))
        for tree in [tree_of(path)]
        for words in [words_of(tree)]
        for function in _public_functions(tree)
        for annotation in (*(each.annotation for each in arguments_of(function)), function.returns)
        if annotation is not None and _has_bare_array(annotation, words)
    ]
    assert not bare, "write the shape with a word of jaxtyping:\n" + "\n".join(bare)


def _public_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        name = getattr(node, "name", "")
        is_private = name.startswith("_") and not name.endswith("__")
        if is_function and not is_private:
            yield node
        elif not is_function and not is_private:
            yield from _public_functions(node)


def _has_bare_array(node: ast.AST, words: set[str]) -> bool:
    if is_shape(node, words) or _is_named(node):
        return False
    name = getattr(node, "id", getattr(node, "attr", None))
    return name in ARRAYS or any(_has_bare_array(part, words) for part in ast.iter_child_nodes(node))


def _is_named(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)):
        return False
    names, key = getattr(node.value, "id", None), node.slice.elts[0]
    return names in NAMED and isinstance(key, ast.Name) and key.id == "str"


@pytest.mark.heavy
def test_no_process_of_a_run_imports_what_checks_shapes():
    modules = "stretto.orchestrator.main, stretto.trainer.rl, stretto.inference.server"
    program = f"import sys, {modules}; print(sorted({{'jaxtyping', 'beartype', 'shapes'}} & set(sys.modules)))"
    popen = forked.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert popen.communicate(timeout=300)[0] == "[]\n"
