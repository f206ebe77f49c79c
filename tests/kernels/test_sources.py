"""What every kernel's source keeps to, so that it means the same under each Triton it runs on."""

from __future__ import annotations

import ast
from pathlib import Path

import graphsafe_kernels

FOLDER = Path(graphsafe_kernels.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))


def dtypes_at_the_left(text):
    """Lines that compare a dtype of Triton, at the left, with a name: Triton 3.2's dtype finds no constexpr equal."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], (ast.Eq, ast.NotEq))
        and isinstance(node.left, ast.Attribute)
        and isinstance(node.left.value, ast.Name)
        and node.left.value.id == "tl"
    ]


def test_a_dtype_is_compared_from_the_right():
    found = {str(file.relative_to(FOLDER)): dtypes_at_the_left(file.read_text(encoding="utf-8")) for file in FILES}
    assert len(found) == len(FILES) > 0
    assert not {name: lines for name, lines in found.items() if lines}


def test_the_rule_finds_what_it_forbids():
    assert dtypes_at_the_left("x = 1 if DT == tl.bfloat16 else 2") == []
    assert dtypes_at_the_left("x = 1\ny = 1 if tl.bfloat16 == DT else 2") == [2]
