"""Sends the bytes of a version from a trainer to its samplers. docs/weight-channel.md describes the whole.

`transport.py` is the interface, `group.py` (gloo, nccl) and `ring.py` (shm, cuda_ipc) implement it, and `buckets.py`
uses it.
"""
