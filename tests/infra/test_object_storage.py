"""A file in object storage reads like a local one, and a process that used some ends."""

import io
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.object_storage import _RetryingFile, open_file
from infra.place import Place


@pytest.mark.parametrize("end", ["", "raise SystemExit(2)", "raise RuntimeError('a bug')"])
def test_a_process_that_used_a_bucket_ends(end: str, bucket: str, tmp_path: Path) -> None:
    """With the credentials of a pod, Arrow waits at the end of the process for filesystems that are still there."""
    (tmp_path / "token").write_text("token")
    program = (
        "from infra.place import Place\n"
        f"place = Place.of('s3://places/one/{bucket}')\n"
        "place.write('file', b'content')\n"
        "try:\n"
        "    place.read('missing')\n"
        "except FileNotFoundError as missing:\n"
        f"    {end or 'pass'}\n"
        "print(place.read('file'))"
    )
    identity = {
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/trainer",
        "AWS_REGION": "us-east-1",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | identity, capture_output=True, text=True, timeout=20
    )
    expected = {"": (0, "b'content'\n"), "raise SystemExit(2)": (2, ""), "raise RuntimeError('a bug')": (1, "")}
    assert (done.returncode, done.stdout) == expected[end], done.stderr


@given(st.data())
@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # each example has a file of its own
def test_a_remote_file_reads_like_a_local_one(bucket: str, data: st.DataObject) -> None:
    """Whatever its reader looks for: archives are read from their end."""
    content = bytes(range(256)) * 3
    Place.of(f"s3://places/like/{bucket}").write("file", content)
    local = io.BytesIO(content)
    with open_file(f"s3://places/like/file{bucket}") as buffered:
        whole: Any = buffered
        remote = whole.raw if data.draw(st.booleans()) else whole
        for _ in range(data.draw(st.integers(1, 8))):
            whence = data.draw(st.sampled_from([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END]))
            least = {io.SEEK_SET: 0, io.SEEK_CUR: -local.tell(), io.SEEK_END: -len(content)}[whence]
            offset = data.draw(st.integers(least, least + len(content)))
            assert remote.seek(offset, whence) == local.seek(offset, whence)
            size = data.draw(st.integers(0, 300))
            assert remote.read(size) == local.read(size)
            assert remote.tell() == local.tell()


def test_a_remote_file_is_read_from_any_place_like_a_local_one() -> None:
    data = random.Random(0).randbytes(1000)
    ours, local = _RetryingFile("s3://bucket/file", pa.BufferReader(data)), io.BytesIO(data)
    chance = random.Random(1)
    for _ in range(300):
        whence = chance.choice([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END])
        offset = {io.SEEK_SET: 0, io.SEEK_CUR: -local.tell(), io.SEEK_END: -1000}[whence] + chance.randrange(1100)
        assert ours.seek(offset, whence) == local.seek(offset, whence) == ours.tell()
        size = chance.randrange(200)
        assert ours.read(size) == local.read(size)
        assert ours.tell() == local.tell()
    assert (ours.seek(300), ours.readall()) == (300, data[300:])


def test_a_whole_book_is_one_request() -> None:
    """It was one for every 8 KiB."""
    data, asked = random.Random(0).randbytes(1_000_000), list[int]()

    class Storage(pa.BufferReader):
        def read_at(self, size: int, offset: int) -> bytes:
            asked.append(size)
            return super().read_at(size, offset)

    with io.BufferedReader(_RetryingFile("s3://bucket/file", Storage(data))) as file:
        assert file.read() == data
    assert asked == [1_000_000]
