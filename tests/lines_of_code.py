"""Counts the lines of code of Python files, for the budgets of `test_architecture.py`."""

import ast
import io
import tokenize
from pathlib import Path

# tokens that do not make a line a line of code
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def lines_of_code(source: str) -> int:
    """The number of lines of a Python source without docstrings, comments and blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def lines_of_code_by_folder(package: Path) -> dict[str, int]:
    """Lines of code of each folder directly in a package, with its subfolders; "(root)": the files beside them."""
    totals: dict[str, int] = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        folder = parts[0] if len(parts) > 1 else "(root)"
        totals[folder] = totals.get(folder, 0) + lines_of_code(path.read_text(encoding="utf-8"))
    return totals
