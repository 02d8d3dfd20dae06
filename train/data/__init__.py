"""Token shards or a stream of books as batches on the device, at an exact position."""
