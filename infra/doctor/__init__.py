"""The command ``python -m infra.doctor``: check whether this machine is ready, and measure its maximum speed."""
