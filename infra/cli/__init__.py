"""The command line that all commands share: flags, errors, interrupts, and output on the terminal."""
