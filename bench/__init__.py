"""Benchmarks: `dflash_mlx.bench`, in a checkout `python -m bench.overhead`, say. Rules and records: README.md here."""
