"""Books in, token shards out."""
