"""Error texts are whole sentences, and no name is one of the words that the style retires (see CONTRIBUTING)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipeline", "infra", "train", "tune")

RETIRED = frozenset(
    "place told asked found looked_at lacks said kept begun given spent theirs most rest before".split()  # noqa: SIM905
)
"""Participles, pronouns and adverbs that were names of several things; a name says what the thing is."""
ALLOWED_NAMES: dict[tuple[str, str], str] = {}
"""Bindings that stay, by file and name, each with its reason."""
SENTENCES = re.compile(r"(?i:\w*advice)|example|hint|valid|mistake|_fault\(.*\)|suggest_nearest\(.*\)")
"""Expressions that are the end of a sentence, so that an error may end with them."""
RETIRED_PHRASES = re.compile(
    r"(?i)\bleave (it|them|one) out|\bmake room|\bput it back|\bchoose one of|\bgive (an?|one|it|another) "
)
"""Phrases that an error does not use, because its advice names the action: Remove, Reduce, Increase, Use."""
REASONS = {("tune/suite/checks.py", "check_suits_device"), ("tune/suite/replay.py", "_plan")}
"""Functions whose errors are reasons in a table, which have neither a capital letter nor a period."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def templates(node: ast.expr) -> Iterator[str]:
    """The texts that an expression can be, each with ``{expression}`` for a value; none where it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else f"{{{ast.unparse(p.value)}}}" for p in node.values)  # type: ignore[attr-defined]
        yield "".join(map(str, parts))
    elif isinstance(node, ast.IfExp):
        yield from templates(node.body)
        yield from templates(node.orelse)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for left in templates(node.left):
            yield from (left + right for right in templates(node.right))


def error_texts(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each ``UserError``; of a variable, every text that its function assigns to it."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or (path, function.name) in REASONS:
            continue
        assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                assigned.setdefault(node.targets[0].id, []).append(node.value)
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError":
                text = node.args[0]
                for value in assigned.get(text.id, []) if isinstance(text, ast.Name) else [text]:
                    yield from ((node.lineno, template) for template in templates(value))


def fault(text: str) -> str | None:
    if not re.match(r"[A-Z{]|--|[a-z]+://", text):
        return "does not begin with a capital letter, a flag, or a value"
    ending = re.search(r"\{([^{}]*)\}$", text)
    if not text.endswith(".") and not (ending and SENTENCES.fullmatch(ending[1])):
        return "does not end with a period"
    if phrase := RETIRED_PHRASES.search(text):
        return f"has the phrase {phrase[0]!r}"
    return None


def test_an_error_is_made_of_whole_sentences() -> None:
    faults = {
        f"{path}:{line}: {reason}: {text}"
        for path, tree in sources()
        for line, text in error_texts(path, tree)
        if (reason := fault(text))
    }
    assert not faults, "\n".join(sorted(faults))


def bindings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a module binds: variables, parameters, functions, classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def test_no_name_is_a_retired_word() -> None:
    bound = {(path, name): line for path, tree in sources() for line, name in bindings(tree) if name in RETIRED}
    retired = {f"{path}:{line}: {name}" for (path, name), line in bound.items() if (path, name) not in ALLOWED_NAMES}
    assert not retired, "\n".join(sorted(retired))
    assert ALLOWED_NAMES.keys() <= bound.keys(), "an exception that is not needed any more"
