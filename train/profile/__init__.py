"""Where a configuration's time and memory go: python -m train.profile."""
