"""A search for the settings that learn fastest: the lowest held-out loss after a time, or the soonest to a loss."""
