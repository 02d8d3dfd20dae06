"""Read token shards or a stream of books, and load their batches on the device from an exact position."""
