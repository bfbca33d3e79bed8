"""Finds mutations of Python sources in their syntax trees."""

import ast
import re
from collections.abc import Callable, Iterator

from glm5_jax.envs.swe.mutations.edits import Edit, Mutation, Operator

_COMPARISONS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
}
_OPERATOR = re.compile(rb"(?:is\s+not|not\s+in|is|in|[<>=!]=|[<>])")
_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break


def find_python_mutations(source: bytes) -> list[Mutation]:
    """Returns all mutations of a source in its order; none if it is no Python."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    finder = _Finder(source)
    mutations = [site for node in ast.walk(module) for site in finder.find(node)]
    return sorted(set(mutations), key=lambda mutation: (mutation.edits, mutation.operator))


class _Finder:
    def __init__(self, source: bytes):
        self._source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def find(self, node: ast.AST) -> Iterator[Mutation]:
        rule = self._rules.get(type(node))
        if rule is not None:
            yield from rule(self, node)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> bytes:
        start, end = self._span(node)
        return self._source[start:end]

    def _replace(self, operator: Operator, node: ast.expr | ast.stmt, text: bytes) -> Mutation:
        return Mutation(operator, (Edit(*self._span(node), text),))

    def _compare(self, node: ast.Compare) -> Iterator[Mutation]:
        operands = [node.left, *node.comparators]
        for left, right in zip(operands, operands[1:]):
            start, end = self._span(left)[1], self._span(right)[0]
            match = _OPERATOR.search(self._source, start, end)
            if match:
                name = b" ".join(match[0].split()).decode()
                edit = Edit(match.start(), match.end(), _COMPARISONS[name].encode())
                yield Mutation("comparison", (edit,))

    def _bool(self, node: ast.BoolOp) -> Iterator[Mutation]:
        # The parts between operands hold the operators, and parentheses that would be left open.
        spans = [self._span(value) for value in node.values]
        gaps = [self._source[one[1] : two[0]] for one, two in zip(spans, spans[1:])]
        if any(b"(" in gap or b")" in gap or b"#" in gap for gap in gaps):
            return
        for number, span in enumerate(spans):
            if number:
                yield Mutation("dropped_condition", (Edit(spans[number - 1][1], span[1], b""),))
            else:
                yield Mutation("dropped_condition", (Edit(span[0], spans[1][0], b""),))

    def _binary(self, node: ast.BinOp) -> Iterator[Mutation]:
        is_sum = isinstance(node.op, ast.Add | ast.Sub)
        if is_sum and isinstance(node.right, ast.Constant) and type(node.right.value) is int:
            gap = self._source[self._span(node.left)[1] : self._span(node.right)[0]]
            if b"(" not in gap and b")" not in gap:
                edit = Edit(self._span(node.left)[1], self._span(node.right)[1], b"")
                yield Mutation("off_by_one", (edit,))

    def _constant(self, node: ast.Constant) -> Iterator[Mutation]:
        if isinstance(node.value, bool):
            yield self._replace("wrong_constant", node, repr(not node.value).encode())
        elif type(node.value) is int and self._text(node).isdigit():
            yield self._replace("wrong_constant", node, str(node.value + 1).encode())

    def _call(self, node: ast.Call) -> Iterator[Mutation]:
        if len(node.args) < 2 or any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
            return
        one, two = node.args[:2]
        texts = self._text(one), self._text(two)
        if texts[0] != texts[1]:
            edits = Edit(*self._span(one), texts[1]), Edit(*self._span(two), texts[0])
            yield Mutation("swapped_arguments", edits)

    def _guard(self, node: ast.If) -> Iterator[Mutation]:
        start = self._span(node)[0]
        is_elif = self._source.startswith(b"elif", start)
        if not node.orelse and not is_elif and len(node.body) == 1:
            if isinstance(node.body[0], _LEAVES):
                yield self._replace("removed_guard", node, b"pass")

    _rules: dict[type[ast.AST], Callable] = {
        ast.Compare: _compare,
        ast.BoolOp: _bool,
        ast.BinOp: _binary,
        ast.Constant: _constant,
        ast.Call: _call,
        ast.If: _guard,
    }
