"""The only launcher of local clusters: demo, tests, benchmarks and chaos runs use nothing else."""
