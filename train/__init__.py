"""Token shards in, one measured run out."""
