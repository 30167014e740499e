"""Benchmarks: ``python -m benchmarks.speed`` (make bench), and scripts that measure one thing each."""
