"""Files and directories, on this machine and in object storage.

Importing the package registers every implementation of ``StorageDir``.
"""

from infra.storage import local_directory, object_directory

__all__ = ["local_directory", "object_directory"]
