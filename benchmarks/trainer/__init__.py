"""The figures of bench_trainer.py."""
