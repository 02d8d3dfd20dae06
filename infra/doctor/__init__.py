"""Is this machine ready, and how fast is it at best: python -m infra.doctor."""
