"""What the three packages share: command shape, storage, tracking, devices. Imports none of them."""
