"""Check whether this machine is ready, and measure how fast it is at best: python -m infra.doctor."""
