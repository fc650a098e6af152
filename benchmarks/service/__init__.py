"""The figures of bench_service.py."""
