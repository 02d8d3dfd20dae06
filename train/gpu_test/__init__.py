"""The steps of ``python -m infra.doctor --gpu``, each run in a process of its own."""
