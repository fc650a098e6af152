"""Checkpoints: the index, copies, imports, downloads, deletion and retention."""
