"""All cases, in the order of the table."""

from tests.conformance.cases import start  # isort: skip
from tests.conformance.cases import training, losses, sampling, checkpoints, management  # isort: skip

__all__ = ["checkpoints", "losses", "management", "sampling", "start", "training"]
