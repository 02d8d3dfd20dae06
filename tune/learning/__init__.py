"""Search for the settings that learn fastest: trials of learning, their space and their law."""
