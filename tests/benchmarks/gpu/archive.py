"""What the GPU campaign brings to a machine, and takes home from it. This file needs nothing but Python."""

import gzip
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path

from card import Row

REPOSITORY = Path(__file__).parents[3]
ROWS, VERDICT, REPORT = "rows.jsonl", "verdict.txt", "gpu-report.json"
"""The results. They are copied on their own, before the archive is written."""
ARCHIVE = "campaign.tar.gz"
PART_BYTES = 15 * 2**20
"""Size of the archive's parts: at most 8 files of 16 MiB are copied back at a time."""
BROUGHT_BYTES = 64 * 2**20
"""All that may be brought along, this repository included."""
LARGE = ("inductor", "runs")
"""Folders of which the newest files are kept, as far as they fit; all else is small."""
NOT_KEPT = (
    "bring", "tokens", "site", "peers", "rehearsal", "trace.json.gz", "memory.pickle", "checkpoints", "mlruns",
    "mlartifacts",
)  # fmt: skip
LIGHT = (
    "annotated-types", "docstring-parser", "gigatoken", "obstore", "pydantic", "pydantic-core", "tyro",
    "typing-extensions", "typing-inspection", "xxhash",
)  # fmt: skip
"""What the loop, a trial, a profile and the peers need besides torch and what images with torch commonly have."""


def read_rows(folder: Path) -> list[Row]:
    """The rows in ``folder``, oldest first; one that a machine's end has cut in two is none."""
    path = folder / ROWS
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def copy_results(folder: Path, out: Path) -> None:
    """Copy the results from ``folder`` to ``out``, each completely or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (VERDICT, ROWS, REPORT):
        if (folder / name).exists():
            temporary = out / f"{name}.tmp"
            shutil.copy(folder / name, temporary)
            temporary.replace(out / name)


def pack(folder: Path, out: Path, room: int, part_bytes: int = PART_BYTES) -> None:
    """Write ``folder`` to parts of one archive in ``out``, of at most ``room`` bytes together."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(out)]
    files = [path for path in files if not set(NOT_KEPT) & {*path.relative_to(folder).parts}]
    small = [path for path in files if path.relative_to(folder).parts[0] not in LARGE]
    large = sorted(set(files) - set(small), key=lambda path: (path.relative_to(folder).parts[0] == "inductor",
                                                              -path.stat().st_mtime))  # fmt: skip
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
    ):
        for path in small:
            tar.add(path, str(path.relative_to(folder)))
        for path in large:
            compressed.flush()  # so that the size is known
            if packed.tell() + path.stat().st_size + 2 * tarfile.RECORDSIZE > room:
                break
            tar.add(path, str(path.relative_to(folder)))
    content = packed.getvalue()
    pieces = [content[start : start + part_bytes] for start in range(0, len(content), part_bytes)]
    out.mkdir(parents=True, exist_ok=True)
    for number, piece in enumerate(pieces):
        temporary = out / f"{ARCHIVE}.{number:02d}.tmp"
        temporary.write_bytes(piece)
        temporary.replace(temporary.with_suffix(""))
    for stale in out.glob(f"{ARCHIVE}.*"):
        if stale.suffix == ".tmp" or int(stale.suffix[1:]) >= len(pieces):
            stale.unlink()


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Unpack ``tar`` by the data filter, which came with Python 3.11.4; before it, our own archives as they are."""
    tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
    tar.extractall(folder)  # noqa: S202 - by the filter above


def restore(bring: Path, folder: Path) -> None:
    """Unpack what was brought into ``folder``, and the archive of earlier calls unless its rows are there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("site.tar.xz", "tokens.tar.gz", "peers.tar.gz"):
        target = folder / name.partition(".")[0]
        if (bring / name).exists() and not target.exists():
            with tarfile.open(bring / name) as tar:
                _extract(tar, target)
    if (folder / ROWS).exists():
        return
    parts = sorted(bring.glob(f"{ARCHIVE}.??"))
    try:
        with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as tar:
            _extract(tar, folder)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as damage:
        if parts:
            print(f"The archive is damaged ({damage}): the rows are kept, the cache starts empty.")
    for name in (ROWS, REPORT):
        if (bring / name).exists():
            shutil.copy(bring / name, folder)


def prepare(bring: Path, folder: Path, site: Path | None, python: str, peers: dict[str, Path]) -> None:
    """Make ``bring``: packages for ``python`` or those of ``site``, token shards, and the sources of ``peers``."""
    bring.mkdir(parents=True, exist_ok=True)
    shards = folder / "tokens"
    if not (shards / "manifest.json").exists():
        subprocess.run([sys.executable, "-m", "pipeline.tokenize", "--out", str(shards)], check=True)
    _tar(bring / "tokens.tar.gz", {name: shards / name for name in ("manifest.json", "train", "val")})
    _tar(bring / "peers.tar.gz", peers)
    if site and site.resolve() != (bring / "site.tar.xz").resolve():
        shutil.copy(site, bring / "site.tar.xz")
    elif not site:
        _light(bring / "site.tar.xz", python)
    left = room(bring)
    print(f"{bring}: {left / 2**20:.1f} of {BROUGHT_BYTES / 2**20:.0f} MiB are left for the archive of earlier calls")
    if left < 2**20:
        sys.exit("That is too large to bring along.")
    with tempfile.TemporaryDirectory() as scratch:
        parts, state = Path(scratch, "parts"), Path(scratch, "state")
        parts.mkdir()
        for part in (*bring.glob(f"{ARCHIVE}.??"), *bring.glob(ROWS)):
            shutil.copy(part, parts)
        restore(parts, state)
        if (state / ROWS).exists():
            pack(state, bring, left)


def room(bring: Path) -> int:
    """Bytes that are left for the archive beside this repository and all else in ``bring``."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    files = [REPOSITORY / name for name in tracked.stdout.split("\0") if name]
    files += [path for path in bring.iterdir() if not path.name.startswith(ARCHIVE)]
    return BROUGHT_BYTES - sum(path.stat().st_size for path in files if path.is_file())


def _light(path: Path, python: str) -> None:
    """Pack the packages of :data:`LIGHT` for that version of Python on Linux."""
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (28, 27, 24, 17)]
    with tempfile.TemporaryDirectory() as site:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", site,
             "--only-binary=:all:", f"--python-version={python}", "--platform=manylinux2014_x86_64", *platforms,
             "--constraint", str(REPOSITORY / "constraints.txt"), *LIGHT],
            check=True,
        )  # fmt: skip
        _tar(path, {each.name: each for each in Path(site).iterdir()})


def _tar(path: Path, files: dict[str, Path]) -> None:
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w:gz") as tar:
        for name, source in files.items():
            tar.add(source, name)
