"""Trains, saves and samples over gRPC: no gateway, no SDK, only the trainer and the sampler.

    tinsmith up      # it tells both addresses when it is ready: "... trainer: HOST:PORT; sampler: HOST:PORT; ..."
    python examples/grpc_client.py --trainer HOST:PORT --sampler HOST:PORT

If the services want a key (`tinsmith up --api-key KEY`), it comes from TINSMITH_API_KEY, or from --api-key.

The model learns one sentence by heart and then completes its beginning. The order of the calls matters: operations of a
model have numbers, and the trainer runs them in this order. It acknowledges each one as soon as the operation is in its
journal, long before the operation is done. docs/grpc.md says more, also about other languages.
"""

import argparse
import os
import sys
import uuid

import grpc
import numpy as np
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from tokenizers import Tokenizer

from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc, types_pb2

PROMPT = "The harbour at dawn"
SENTENCE = PROMPT + " is quiet, and every boat is still at its rope."
MAX_MESSAGE_BYTES = 256 * 2**20  # gRPC's own limit for answers is 4 MiB
ACCEPTED = ("x-tinsmith-accepted", "1")

REPLIES = {
    "CreateModel": trainer_pb2.CreateModelResponse,
    "ForwardBackward": trainer_pb2.ForwardBackwardResponse,
    "OptimStep": trainer_pb2.OptimStepResponse,
    "SaveCheckpoint": trainer_pb2.SaveCheckpointResponse,
}


def connect(address, api_key):
    channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
    return grpc.intercept_channel(channel, AddKey(api_key)) if api_key else channel


class AddKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends the key with each call, in the header that is also used over HTTP."""

    def __init__(self, api_key):
        self.metadata = ("x-api-key", api_key)

    def intercept_unary_unary(self, call, details, request):
        return call(details._replace(metadata=[*(details.metadata or ()), self.metadata]), request)

    intercept_unary_stream = intercept_unary_unary


class Operation:
    """An operation that the trainer has accepted. It will run once, even if this client ends."""

    def __init__(self, channel, name, request):
        # Python's gRPC shows a unary call's initial metadata only together with its reply. On the wire a unary call is
        # a stream of one message, and a stream's initial metadata can be read as soon as it is there.
        start = channel.unary_stream(
            f"/tinsmith.v1.TrainerService/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=REPLIES[name].FromString,
        )
        self.call = start(request, timeout=600)
        if ACCEPTED not in self.call.initial_metadata():
            self.result()  # raises what was wrong with the request

    def result(self):
        return next(self.call)


def datum_of(tokens):
    """Predict each token from those before it."""

    def dense(values, dtype, numpy_dtype):
        return types_pb2.Tensor(dense=np.asarray(values, numpy_dtype).tobytes(), dtype=dtype)

    return types_pb2.Datum(
        model_input=[chunk_of(tokens[:-1])],
        loss_fn_inputs={
            "target_tokens": dense(tokens[1:], types_pb2.DTYPE_INT64, "<i8"),
            "weights": dense(np.ones(len(tokens) - 1), types_pb2.DTYPE_FLOAT32, "<f4"),
        },
    )


def chunk_of(tokens):
    return types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=np.asarray(tokens, "<i4").tobytes()))


def train(channel, model_id, tokens, steps):
    """Returns the loss per token of each step, and the number of the next operation."""
    losses = []
    for step in range(steps):
        # Both are sent before either is awaited. Numbers start at 1; creating the model was number 0.
        forward_backward = Operation(
            channel,
            "ForwardBackward",
            trainer_pb2.ForwardBackwardRequest(
                model_id=model_id, seq_id=2 * step + 1, data=[datum_of(tokens)], loss_fn="cross_entropy"
            ),
        )
        adam = trainer_pb2.AdamParams(learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-12)
        optim_step = Operation(
            channel,
            "OptimStep",
            trainer_pb2.OptimStepRequest(model_id=model_id, seq_id=2 * step + 2, adam_params=adam),
        )
        losses.append(forward_backward.result().metrics["loss:sum"] / (len(tokens) - 1))
        optim_step.result()
        print(f"  step {step + 1}: loss per token {losses[-1]:.3f}")
    return losses, 2 * steps + 1


def sample(sampler, version_id, tokens, max_tokens):
    """Yields the new tokens of one greedy sequence as they come."""
    request = sampler_pb2.SampleRequest(
        version_id=version_id,
        prompt=[chunk_of(tokens)],
        num_samples=1,
        sampling_params=sampler_pb2.SamplingParams(max_tokens=max_tokens, temperature=0),
    )
    for event in sampler.StreamSample(sampler_pb2.StreamSampleRequest(request=request), timeout=600):
        if event.HasField("delta"):
            yield from np.frombuffer(event.delta.tokens, "<i4").tolist()


def main():
    parser = argparse.ArgumentParser(description="Trains, saves and samples over gRPC.")
    parser.add_argument("--trainer", default="127.0.0.1:8001", metavar="HOST:PORT")
    parser.add_argument("--sampler", default="127.0.0.1:8002", metavar="HOST:PORT")
    parser.add_argument("--api-key", default=os.environ.get("TINSMITH_API_KEY", ""), metavar="KEY")
    parser.add_argument("--base-model", help="default: the one that the trainer serves")
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()

    with (
        connect(arguments.trainer, arguments.api_key) as trainer_channel,
        connect(arguments.sampler, arguments.api_key) as sampler_channel,
    ):
        trainer = trainer_pb2_grpc.TrainerServiceStub(trainer_channel)
        sampler = sampler_pb2_grpc.SamplerServiceStub(sampler_channel)
        info = trainer.GetTrainerInfo(trainer_pb2.GetTrainerInfoRequest(), timeout=10)
        base_model = arguments.base_model or info.base_models[0]
        print(f"{info.base_models[0]}: {info.architecture} on {info.device}; losses {', '.join(info.loss_fns)}")
        found = sampler.GetTokenizer(sampler_pb2.GetTokenizerRequest(), timeout=10)
        tokenizer = Tokenizer.from_str(found.tokenizer_json)
        prompt, sentence = (tokenizer.encode(text, add_special_tokens=False).ids for text in (PROMPT, SENTENCE))

        model_id = f"grpc-{uuid.uuid4().hex}:train:0"
        config = types_pb2.LoraConfig(rank=32, seed=0, train_attn=True, train_mlp=True, train_unembed=True)
        create = trainer_pb2.CreateModelRequest(model_id=model_id, base_model=base_model, lora_config=config)
        Operation(trainer_channel, "CreateModel", create).result()
        try:
            print(f"training {model_id}")
            losses, seq_id = train(trainer_channel, model_id, sentence, arguments.steps)
            # An ephemeral save is sent to the samplers and goes when its model goes; kind SAMPLER would stay.
            kind = types_pb2.CHECKPOINT_KIND_EPHEMERAL
            save = trainer_pb2.SaveCheckpointRequest(model_id=model_id, seq_id=seq_id, kind=kind)
            Operation(trainer_channel, "SaveCheckpoint", save)
            # Its answer can be asked for by number, too: after a lost connection, or from another process.
            wait = trainer_pb2.WaitResultRequest(model_id=model_id, seq_id=seq_id)
            saved = trainer.WaitResult(wait, timeout=600).save_checkpoint
            print(f"version {saved.checkpoint.version_id} is in {saved.num_samplers} sampler(s)")
            print(f"> {PROMPT}|", end="")
            for token in sample(sampler, saved.checkpoint.version_id, prompt, len(sentence) - len(prompt)):
                print(tokenizer.decode([token]), end="", flush=True)
            print()
        finally:
            # Nobody else ends a model that was made over gRPC.
            trainer.DeleteModel(trainer_pb2.DeleteModelRequest(model_id=model_id), timeout=60)
        print(f"deleted {model_id}; loss per token went from {losses[0]:.3f} to {losses[-1]:.3f}")


def explain(error):
    """One line: the gRPC code, Tinsmith's reason, and the message."""
    status = rpc_status.from_call(error)
    reasons = []
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            reasons.append(info.reason)
    return f"{error.code().name} {' '.join(reasons)}: {error.details()}"


if __name__ == "__main__":
    try:
        main()
    except grpc.RpcError as error:
        sys.exit(explain(error))
