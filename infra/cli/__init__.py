"""What every command has: flags, errors, interrupts, and what it prints on the terminal."""
