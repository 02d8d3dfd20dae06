"""The command ``python -m infra.doctor``, which checks whether a machine is ready and measures its maximum rates."""
