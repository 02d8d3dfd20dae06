"""What the three packages share: the command line, storage, tracking, devices. Imports none of them."""
