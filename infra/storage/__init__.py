"""Files and folders, on this machine and in object storage."""
