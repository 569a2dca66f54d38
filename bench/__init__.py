"""Benchmarks. Run from a checkout: `python -m bench.demo`, `python -m bench.overhead`. Rules: bench/README.md."""
