"""How the bytes of a version travel from a trainer to its samplers; docs/weight-channel.md tells it as a whole.

`transport.py` is the interface, `group.py` (gloo, nccl) and `ring.py` (shm, cuda_ipc) have it, `buckets.py` drives it.
"""
