"""What Ray Train's controller unpickles to run a training; it does not import torch.

Ray's own backend for torch would make the controller import torch, which takes two seconds before a worker is started.
"""

from ray.train.backend import BackendConfig


class SingleWorker(BackendConfig):
    """A single worker, which needs no process group."""

    backend = "none"
