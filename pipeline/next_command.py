"""The next command after a data set is complete: a first training run on this machine's device."""

import shlex

from infra.device.first_run import first_run
from infra.device.hardware import DeviceInfo
from pipeline.shards import Manifest


def next_command(data: str, manifest: Manifest, device_info: DeviceInfo) -> str:
    """Format the command that trains on the data set in ``data``, or the advice for one that is too small."""
    train_tokens = manifest.splits["train"]["tokens"]
    command = first_run(device_info, shlex.quote(data), train_tokens, manifest.longest_shard("val"))
    if command is None:
        return f"tokenize more books, because {train_tokens:,} training tokens are too few for a run"
    return str(command)
