"""Small mistakes in Python source: one change of the syntax tree at a time, written back as text.

`mutations(source, rng)` yields every change that a table of operators knows, in random order. Each replaces the text of
one expression or statement on one line, and the rest of the source stays as it is. A change is left out if its text
means another tree than the one intended.
"""

from __future__ import annotations

import ast
import copy
import itertools
import random
from collections.abc import Callable, Iterator

import msgspec

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


class Mutation(msgspec.Struct, frozen=True):
    """`old`, which begins at character `start` of the source, becomes `new`."""

    kind: str
    line: int
    start: int
    old: str
    new: str

    def apply(self, source: str) -> str:
        """The source with the mistake.

        Raises: ValueError if the text is not there.
        """
        end = self.start + len(self.old)
        if source[self.start : end] != self.old:
            raise ValueError(f"line {self.line} has no {self.old!r} at character {self.start}")
        return source[: self.start] + self.new + source[end:]


# -- the operators: each gives other nodes for one, and leaves that one as it is --


def _comparison(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)


def _arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
        yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)


def _is_text(node: ast.BinOp) -> bool:
    """Is an operand a literal text? Sums and formats of texts would raise, and not be wrong."""
    sides = (node.left, node.right)
    return any(isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and not _is_number(s)) for s in sides)


def _is_number(node: ast.Constant) -> bool:
    return isinstance(node.value, int | float) and not isinstance(node.value, bool)


def _logic(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand


def _condition(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)


def _number(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1000:
        yield ast.Constant(node.value + 1)
        if node.value > 0:
            yield ast.Constant(node.value - 1)


def _truth(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)


def _arguments(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        first, second, *rest = node.args
        if ast.dump(first) != ast.dump(second):
            yield ast.Call(node.func, [second, first, *rest], node.keywords)


def _result(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield ast.Return(ast.Constant(None))


def _jump(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Continue):
        yield ast.Break()
    if isinstance(node, ast.Break):
        yield ast.Continue()


def _omission(node: ast.AST) -> Iterator[ast.AST]:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_call or isinstance(node, ast.AugAssign):
        yield ast.Pass()


OPERATORS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "comparison": _comparison,
    "arithmetic": _arithmetic,
    "logic": _logic,
    "condition": _condition,
    "number": _number,
    "truth": _truth,
    "arguments": _arguments,
    "result": _result,
    "jump": _jump,
    "omission": _omission,
}


def mutations(source: str, rng: random.Random) -> Iterator[Mutation]:
    """All changes of a source that the operators know, in random order.

    Raises: SyntaxError if it is no Python.
    """
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    found = [
        (node, kind, other)
        for node in sorted(_own_nodes(tree), key=lambda n: (n.lineno, n.col_offset))
        if node.lineno == node.end_lineno and node.end_col_offset is not None
        for kind, operator in OPERATORS.items()
        for other in operator(node)
    ]
    rng.shuffle(found)
    for node, kind, other in found:
        line = lines[node.lineno - 1]
        first, last = (len(line.encode()[:column].decode()) for column in (node.col_offset, node.end_col_offset or 0))
        text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(other)))
        wanted = ast.dump(copy.deepcopy(tree, {id(node): other}))
        for new in (text, f"({text})"):
            mutation = Mutation(kind, node.lineno, starts[node.lineno - 1] + first, line[first:last], new)
            if _dump(mutation.apply(source)) == wanted:
                yield mutation
                break


def _own_nodes(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Expressions and statements within functions, without docstrings, annotations, decorators and formatted texts."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, is_inside = waiting.pop()
        if isinstance(node, ast.JoinedStr):
            continue
        if is_inside and isinstance(node, ast.expr | ast.stmt):
            yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            body = node.body if isinstance(node.body, list) else [node.body]
            waiting += [(child, True) for child in body]
        elif isinstance(node, ast.AnnAssign):
            waiting += [(node.value, is_inside)] if node.value is not None else []
        else:
            waiting += [(child, is_inside) for child in ast.iter_child_nodes(node)]


def _dump(source: str) -> str | None:
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return None
