"""What infra/SECURITY.md says of tests is true, and nothing that was stored is unpickled or unpacked."""

import ast
import re
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE, DEPENDENCIES = (ROOT / "infra/SECURITY.md").read_text(encoding="utf-8").split("## Dependencies")

OURS = {"pipeline/job/executor.py", "pipeline/job/processes.py", "pipeline/job/worker.py"}
"""Unpickle what another process of the same command has sent, through Ray or a pipe."""

UNPICKLE = {"load", "loads", "Unpickler"}
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def test_every_row_names_tests_that_exist() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 12
    for row in rows:
        named = re.findall(r"`(tests/\S+?)::(test_\w+)`", row.split(" | ")[-1])
        assert named, row
        for file, test in named:
            assert re.search(rf"^(    )?def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), test


def named_like(package: str) -> str:
    """A package's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", package).lower()


def test_the_table_of_dependencies_has_the_tested_versions_and_their_dates() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    direct = {named_like(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}
    pins = re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    tested = {named_like(name): version for name, version in pins}
    rows = re.findall(r"(?m)^\| ([\w-]+) \| ([\w.]+) \| ([\d-]+) \|$", DEPENDENCIES)
    assert [(name, version) for name, version, _ in rows] == [(name, tested[name]) for name in sorted(direct)]
    assert all(date(2020, 1, 1) < date.fromisoformat(released) for *_, released in rows)


def calls(source: str) -> Iterator[tuple[str, str, ast.Call]]:
    """Each call of a module's function in a program: the module's first name, the function's name, and the call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value).partition(".")[0], node.func.attr, node


def unsafe(source: str) -> list[str]:
    """The calls in a program that would run code out of what they read, or write files where it says."""
    found: list[str] = []
    for module, name, call in calls(source):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if (
            (module in PICKLES and name in UNPICKLE)
            or (module == "torch" and name == "load" and given.get("weights_only") != "True")
            or (module in ("np", "numpy") and name == "load" and given.get("allow_pickle", "False") != "False")
            or (module == "yaml" and name in ("load", "unsafe_load"))
            or name in ("extractall", "unpack_archive")
        ):
            found.append(ast.unparse(call))
    return found


def test_nothing_that_was_stored_is_unpickled_and_no_archive_unpacked() -> None:
    packages = [path for name in ("infra", "pipeline", "train", "tune") for path in (ROOT / name).rglob("*.py")]
    assert len(packages) > 100
    found = {path.relative_to(ROOT).as_posix() for path in packages if unsafe(path.read_text(encoding="utf-8"))}
    assert found == OURS
    for other in ("torch.load(path)", "np.load(path, allow_pickle=True)", "zipped.extractall(folder)"):
        assert unsafe(other)
