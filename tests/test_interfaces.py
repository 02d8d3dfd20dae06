"""Only documented interfaces of Ray, MLflow, torch and torchao are used; what else is needed is listed here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARIES = ("ray", "mlflow", "torch", "torchao")
PRIVATE = re.compile(rf"(?:{'|'.join(LIBRARIES)})(?:\.\w+)*?\._(?!_)\w+(?:\.\w+)*")

ALLOWED = {
    # Private: the one file that may.
    ("infra/ray/local_ray.py", "ray._private.ray_constants"),
    ("infra/ray/local_ray.py", "ray._private.services"),
    ("infra/ray/local_ray.py", "ray._private.node"),
    ("infra/ray/local_ray.py", "ray._raylet"),
    # torch's documentation and recipes use these names.
    ("train/loop/execution.py", "torch._inductor.config"),
    ("train/profile/record.py", "torch._inductor.config"),
    ("train/profile/memory_timeline.py", "torch.cuda.memory._dump_snapshot"),
    ("train/profile/memory_timeline.py", "torch.cuda.memory._record_memory_history"),
    ("train/models/recompute.py", "torch.ops.aten._scaled_dot_product_cudnn_attention.default"),
    ("train/models/recompute.py", "torch.ops.aten._scaled_dot_product_efficient_attention.default"),
    ("train/models/recompute.py", "torch.ops.aten._scaled_dot_product_flash_attention.default"),
    ("train/models/recompute.py", "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default"),
}


def sources() -> dict[str, ast.Module]:
    """Every module of the packages, by its path."""
    paths = [path for package in ("pipeline", "train", "tune", "infra") for path in (ROOT / package).rglob("*.py")]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def dotted(node: ast.AST, imported: dict[str, str]) -> str | None:
    """The full name that a chain of attributes stands for, such as ``torch.cuda.memory``."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, imported)
        return before and f"{before}.{node.attr}"
    return None


def private_names(tree: ast.Module) -> Iterator[str]:
    """The private names of the libraries that a module imports, uses or has in a string."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                whole = name.name if name.asname else name.name.partition(".")[0]
                imported[name.asname or whole] = whole
                yield from PRIVATE.findall(name.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                imported[name.asname or name.name] = f"{node.module}.{name.name}"
                yield from PRIVATE.findall(f"{node.module}.{name.name}")
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield from PRIVATE.findall(dotted(node, imported) or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield from PRIVATE.findall(node.value)


def test_only_listed_private_names_are_used() -> None:
    used = {(path, name) for path, tree in sources().items() for name in private_names(tree)}
    listed = {
        (path, name): [known for at, known in ALLOWED if at == path and f"{name}.".startswith(f"{known}.")]
        for path, name in used
    }
    assert [use for use, known in listed.items() if not known] == []
    assert {(path, name) for (path, _), known in listed.items() for name in known} == ALLOWED, "each is still needed"


def test_no_private_attribute_is_used_that_is_not_ours() -> None:
    """Of objects too, whose class nothing here names: ``profile._memory_profile()``."""
    trees = sources()
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    ours = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    ours |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    listed = {part for _, name in ALLOWED for part in name.split(".")}
    listed |= {"_exit", "_replace"}  # of os, and of named tuples
    private = {
        (path, node.attr)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr)
    }
    # torchao exports it, and its README shows it.
    assert {use for use in private if use[1] not in ours | listed} == {("train/models/optimizer.py", "_AdamW")}
