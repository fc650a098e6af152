"""References in a batch: the gateway replaces what a client only names by its content, before the trainer gets it."""

from __future__ import annotations

from gateway.gateway import Gateway
from gateway.http.body import off_loop
from gateway.training import provenance
from tinsmith.rpc.errors import InvalidRequest
from tinsmith.v1 import trainer_pb2


async def complete(gateway: Gateway, message: trainer_pb2.ForwardBackwardRequest, *, num_bytes: int) -> bool:
    """Adds the stored loss to a "custom" batch, and the recorded logprobs to a "stable_reinforce" batch.

    False for any other loss: nothing is added. Raises InvalidRequest or Unsupported, naming the field.
    """
    session_id = message.model_id.rpartition(":train:")[0]
    if message.HasField("custom_loss"):
        raise InvalidRequest("custom_loss: is not part of the public API; name a loss by loss_id", field="custom_loss")
    if message.loss_fn == "custom":
        await gateway.training.custom_losses.attached(message, session_id=session_id)
        return True
    if message.loss_fn == "stable_reinforce":
        records = await gateway.sampling.records.find(provenance.sequence_ids(message), session_id=session_id)
        await off_loop(lambda: provenance.resolve(message, records), num_bytes=num_bytes, config=gateway.config)
        return True
    return False
