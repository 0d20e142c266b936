"""Mutants of the reference: one operator, index, constant, call or statement of its Python sources changed at a time.

The reference is what everything else is held against, so nothing but its own tests can see a mistake in it:
`reference_judge` runs them on each mutant.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, TypeAlias

from .mutants import Mutant

PACKAGE = "kvproof.reference"

Change: TypeAlias = tuple[int, str, str]
"""(offset, text before, text after)."""

_OPERATORS: Mapping[str, str] = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "**": "*", "@": "*",
    "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&",
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and",
}  # fmt: skip
_BINARY = re.compile(r"\*\*|//|<<|>>|[-+*/%@&|^]")
_COMPARING = re.compile(r"\bis not\b|\bnot in\b|\bis\b|\bin\b|[=!<>]=|[<>]")
_JOINING = re.compile(r"\b(?:and|or)\b")

_NAMES: Mapping[str, str] = {
    "maximum": "minimum", "max": "min", "min": "max", "argmax": "argmin", "any": "all", "all": "any", "sum": "max",
    "mean": "sum", "cumsum": "cumprod", "sort": "array", "exp": "exp2", "sqrt": "square", "cos": "sin", "sin": "cos",
    "zeros": "ones", "nan": "inf", "inf": "nan", "startswith": "endswith", "endswith": "startswith",
    "float32": "float64", "float64": "float32", "int32": "int64", "int64": "int32",
}  # fmt: skip
"""Methods, functions and dtypes that stand in for each other."""
_BUILT_IN = ("max", "min", "any", "all", "sum")
_CHOOSING = ("where", "_where")
_TYPES = ("NDArray", "Literal")
_UNSEEN = (ast.Import, ast.ImportFrom, ast.JoinedStr)


OTHERS = ("arrays.py",)
"""No mathematics: how arrays of any device are told and refused, which tests/unit holds."""


def reference_texts() -> dict[str, str]:
    """The reference's sources by file name, without `OTHERS`."""
    files = (file for file in resources.files(PACKAGE).iterdir() if file.name.endswith(".py"))
    return {file.name: file.read_text() for file in files if file.name not in OTHERS}


def reference_mutants(texts: Mapping[str, str], files: Sequence[str] = ()) -> Iterator[Mutant]:
    """Every mutant of these sources, or of `files` among them, in order of file and place.

    Left alone: docstrings, annotations, imports, and the text of error messages.

    Raises:
        ValueError: there is no such source.
    """
    for name in files:
        if name not in texts:
            raise ValueError(f"--file is {name!r}; it must be one of {', '.join(sorted(texts))}")
    for name in files or sorted(texts):
        yield from _of_file(name, texts[name])


def changed(text: str, mutant: Mutant) -> str:
    """The source with the mutant's one place changed."""
    end = mutant.start + len(mutant.old)
    if text[mutant.start : end] != mutant.old:
        raise ValueError(f"{mutant}: the text there is {text[mutant.start : end]!r}")
    return text[: mutant.start] + mutant.new + text[end:]


def _of_file(file: str, text: str) -> Iterator[Mutant]:
    source = _Source(text)
    seen: Counter[tuple[str, str, str]] = Counter()
    for start, old, new in sorted({change for node in _code(ast.parse(text)) for change in source.changes(node)}):
        line = text.count("\n", 0, start) + 1
        begin = text.rfind("\n", 0, start) + 1
        whole = text[begin:].partition("\n")[0].strip()
        nth = seen[whole, old, new]
        seen[whole, old, new] += 1
        yield Mutant(file=file, line=line, column=start - begin + 1, start=start, old=old, new=new, text=whole, nth=nth)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those in it that can be changed."""
    if isinstance(node, _UNSEEN) or _is_type(node):
        return
    yield node
    if isinstance(node, ast.Raise):  # what it holds is a message
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and _name(node.value) in _TYPES


def _name(node: ast.expr) -> str:
    """The last part of a dotted name; "" for what has none."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class _Source:
    """A source text, and the changes of each kind of node in it."""

    def __init__(self, text: str) -> None:
        if not text.isascii():
            raise ValueError("a source is not ASCII; offsets count bytes as characters, so mutants cannot be placed")
        self.text = text
        self.lines = [0]
        for line in text.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def changes(self, node: ast.AST) -> Iterator[Change]:
        """Every change of this node itself, none of the nodes in it."""
        make = getattr(self, f"_{type(node).__name__.lower()}", None)
        return iter(()) if make is None else make(node)

    def start(self, node: Any) -> int:
        return int(self.lines[node.lineno - 1] + node.col_offset)

    def end(self, node: Any) -> int:
        return int(self.lines[node.end_lineno - 1] + node.end_col_offset)

    def part(self, node: Any) -> str:
        return self.text[self.start(node) : self.end(node)]

    def _wrap(self, node: ast.expr, before: str, after: str) -> Change:
        text = self.part(node)
        return self.start(node), text, f"{before}{text}{after}"

    def _between(self, left: ast.expr, right: ast.expr, pattern: re.Pattern[str]) -> Change:
        """The operator between two nodes, changed."""
        found = pattern.search(self.text, self.end(left), self.start(right))
        assert found is not None, "an operator stands between its operands"
        return found.start(), found.group(), _OPERATORS[found.group()]

    # ---- operators ----

    def _binop(self, node: ast.BinOp) -> Iterator[Change]:
        if not any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, node.right)):
            yield self._between(node.left, node.right, _BINARY)

    def _augassign(self, node: ast.AugAssign) -> Iterator[Change]:
        yield self._between(node.target, node.value, _BINARY)
        yield from self._without(node)

    def _compare(self, node: ast.Compare) -> Iterator[Change]:
        operands = [node.left, *node.comparators]
        for left, right in itertools.pairwise(operands):
            yield self._between(left, right, _COMPARING)

    def _boolop(self, node: ast.BoolOp) -> Iterator[Change]:
        for left, right in itertools.pairwise(node.values):
            yield self._between(left, right, _JOINING)

    def _unaryop(self, node: ast.UnaryOp) -> Iterator[Change]:
        sign = "not " if isinstance(node.op, ast.Not) else self.text[self.start(node)]
        yield self.start(node), sign, ""

    # ---- values ----

    def _constant(self, node: ast.Constant) -> Iterator[Change]:
        other = _other_value(node.value, self.part(node))
        if other:
            yield self.start(node), self.part(node), other

    def _attribute(self, node: ast.Attribute) -> Iterator[Change]:
        if node.attr in _NAMES:
            yield self.end(node) - len(node.attr), node.attr, _NAMES[node.attr]

    def _subscript(self, node: ast.Subscript) -> Iterator[Change]:
        for index in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            for edge in (index.lower, index.upper) if isinstance(index, ast.Slice) else (index,):
                yield from self._shifted(edge)

    def _shifted(self, index: ast.expr | None) -> Iterator[Change]:
        """An index one more and one less; constants have their one more already."""
        if index is None or isinstance(index, ast.Starred):
            return
        if not isinstance(index, ast.Constant):
            yield self._wrap(index, "(", ") + 1")
        elif not isinstance(index.value, int):
            return
        yield self._wrap(index, "(", ") - 1")

    # ---- calls ----

    def _call(self, node: ast.Call) -> Iterator[Change]:
        name = _name(node.func)
        if isinstance(node.func, ast.Name) and name in _BUILT_IN:
            yield self.start(node.func), name, _NAMES[name]
        if name in _CHOOSING:
            first, last = node.args[1:]
            new = self.part(last) + self.text[self.end(first) : self.start(last)] + self.part(first)
            yield self.start(first), self.text[self.start(first) : self.end(last)], new
        if name[:1].islower() and name not in ("dataclass", "field", "cls"):
            yield from self._without_keywords(node)

    def _without_keywords(self, node: ast.Call) -> Iterator[Change]:
        """Each keyword argument dropped; a flag's other value is a mutant of its own."""
        for number, keyword in enumerate(node.keywords):
            flag = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool)
            if keyword.arg is None or flag:
                continue
            start, end = self.start(keyword), self.end(keyword)
            if node.args or number:  # with the comma before it, else with the one behind it
                start = self.end(node.keywords[number - 1]) if number else self.end(node.args[-1])
            elif len(node.keywords) > 1:
                end = self.start(node.keywords[1])
            yield start, self.text[start:end], ""

    # ---- statements ----

    def _assign(self, node: ast.Assign) -> Iterator[Change]:
        if not isinstance(node.targets[0], ast.Name | ast.Tuple):
            yield from self._without(node)

    def _expr(self, node: ast.Expr) -> Iterator[Change]:
        if not isinstance(node.value, ast.Constant):
            yield from self._without(node)

    def _raise(self, node: ast.Raise) -> Iterator[Change]:
        yield from self._without(node)
        assert isinstance(node.exc, ast.Call), "the reference raises errors with messages"
        name = _name(node.exc.func)
        other = {"ValueError": "TypeError", "TypeError": "ValueError"}[name]
        yield self.start(node.exc.func), name, other

    def _without(self, node: ast.stmt) -> Iterator[Change]:
        yield self.start(node), self.part(node), "pass"

    # ---- branches ----

    def _if(self, node: ast.If) -> Iterator[Change]:
        yield from self._otherwise(node.test)
        for statement in node.body:
            if isinstance(statement, ast.Return):
                yield from self._without(statement)

    def _ifexp(self, node: ast.IfExp) -> Iterator[Change]:
        yield from self._otherwise(node.test)

    def _comprehension(self, node: ast.comprehension) -> Iterator[Change]:
        for test in node.ifs:
            yield from self._otherwise(test)

    def _otherwise(self, test: ast.expr) -> Iterator[Change]:
        """The condition turned round, where no operator of its own does that."""
        opposite = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
        single = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], opposite)
        if not single and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            yield self._wrap(test, "not (", ")")


def _other_value(value: object, text: str) -> str:
    """The other flag, one more for an integer, twice as much for a fraction; 1 for 0. "" for anything else."""
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return hex(value + 1) if text.startswith("0x") else str(value + 1)
    if isinstance(value, float):
        return repr(2 * value or 1.0)
    return ""
