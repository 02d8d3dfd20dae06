"""Files on the Hugging Face Hub, with the interface of an obstore store."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from infra.errors import UserError


class Hub:
    """The Hugging Face Hub with the methods of an obstore store that reading needs."""

    def __init__(self, bucket: str) -> None:
        try:
            from huggingface_hub import HfFileSystem  # An optional dependency.
        except ImportError as failure:
            raise UserError("hf:// needs the package huggingface_hub. Run 'pip install huggingface_hub'.") from failure
        self._system, self._bucket = HfFileSystem(), bucket
        self._commits: dict[str, str | None] = {}

    def _find_commit(self, path: str) -> str | None:
        """Return the newest commit of the repository of ``path`` when this process first read from it.

        All reads use this commit, because the Hub cannot return a version of a single file. Returns None if the path
        contains a revision, or the repository has no commits.
        """
        repository = "/".join(path.split("/")[:2])
        if repository not in self._commits:
            from huggingface_hub import HfApi

            resolved = self._system.resolve_path(f"{self._bucket}/{path}")
            name, kind = (getattr(resolved, attribute, None) for attribute in ("repo_id", "repo_type"))
            self._commits[repository] = (
                HfApi().repo_info(name, repo_type=kind).sha if name and "@" not in path else None
            )
        return self._commits[repository]

    def head(self, path: str) -> dict[str, Any]:
        info = self._system.info(f"{self._bucket}/{path}", revision=self._find_commit(path))
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return self._to_metadata(path, info)

    def list(self, prefix: str) -> Iterator[list[dict[str, Any]]]:
        entries: Any = self._system.find(f"{self._bucket}/{prefix}", detail=True)
        yield [self._to_metadata(name.removeprefix(f"{self._bucket}/"), info) for name, info in entries.items()]

    @staticmethod
    def _to_metadata(path: str, info: dict[str, Any]) -> dict[str, Any]:
        return {"path": path, "size": info["size"], "last_modified": None, "e_tag": info.get("blob_id")}

    def get(self, path: str, *, options: Any) -> "HubRange":
        """Read a range of the file, at the commit of this process's first read from the repository."""
        start, end = options["range"]
        full_path = f"{self._bucket}/{path}"
        content: Any = self._system.cat_file(full_path, start=start, end=end, revision=self._find_commit(path))
        return HubRange(content)


@dataclass(frozen=True)
class HubRange:
    """The result of :meth:`Hub.get`, with the interface of obstore's ``GetResult``."""

    content: bytes

    def bytes(self) -> bytes:
        return self.content
