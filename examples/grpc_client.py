"""Trains, saves and samples over gRPC: no gateway, no SDK, only the trainer and the sampler.

    tinsmith up      # it tells both addresses when it is ready: "... trainer: HOST:PORT; sampler: HOST:PORT; ..."
    python examples/grpc_client.py --trainer HOST:PORT --sampler HOST:PORT

If the services want a key (`tinsmith up --api-key KEY`), it comes from TINSMITH_API_KEY. The modules of `tinsmith.v1`
are in the Python package; `python -m grpc_tools.protoc` makes them from `proto/` alone.

The model learns one sentence by heart and then completes its beginning. Operations of a model have numbers, and the
trainer runs them in this order. docs/grpc.md says how a client goes on after a lost connection or a restart.
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

PROMPT, REST = "The harbour at dawn", " is quiet, and every boat is still at its rope."
API_KEY = os.environ.get("TINSMITH_API_KEY")
OPTIONS = {"metadata": [("x-api-key", API_KEY)] if API_KEY else [], "timeout": 600}


def chunk_of(tokens):
    return types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=np.asarray(tokens, "<i4").tobytes()))


def datum_of(tokens):
    """Each token is to be predicted from those before it."""
    targets = types_pb2.Tensor(dense=np.asarray(tokens[1:], "<i8").tobytes(), dtype=types_pb2.DTYPE_INT64)
    weights = types_pb2.Tensor(dense=np.ones(len(tokens) - 1, "<f4").tobytes(), dtype=types_pb2.DTYPE_FLOAT32)
    return types_pb2.Datum(
        model_input=[chunk_of(tokens[:-1])], loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )


def train(trainer, model_id, tokens, steps):
    """Returns the loss per token of each step."""
    model, data, losses = {"model_id": model_id}, [datum_of(tokens)], []
    adam = trainer_pb2.AdamParams(learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-12)
    for step in range(steps):  # creating the model was operation 0
        batch = trainer_pb2.ForwardBackwardRequest(**model, seq_id=2 * step + 1, data=data, loss_fn="cross_entropy")
        update = trainer_pb2.OptimStepRequest(**model, seq_id=2 * step + 2, adam_params=adam)
        # Both are sent before either is awaited, so the trainer has no pause between them.
        forward_backward = trainer.ForwardBackward.future(batch, **OPTIONS)
        optim_step = trainer.OptimStep.future(update, **OPTIONS)
        losses.append(forward_backward.result().metrics["loss:sum"] / (len(tokens) - 1))
        optim_step.result()
        print(f"  step {step + 1}: loss per token {losses[-1]:.3f}")
    return losses


def main(trainer, sampler, steps):
    info = trainer.GetTrainerInfo(trainer_pb2.GetTrainerInfoRequest(), **OPTIONS)
    print(f"{info.base_models[0]}: {info.architecture} on {info.device}; losses {', '.join(info.loss_fns)}")
    tokenizer = Tokenizer.from_str(sampler.GetTokenizer(sampler_pb2.GetTokenizerRequest(), **OPTIONS).tokenizer_json)
    prompt, sentence = (tokenizer.encode(text, add_special_tokens=False).ids for text in (PROMPT, PROMPT + REST))
    model = {"model_id": f"grpc-{uuid.uuid4().hex}:train:0"}
    lora = types_pb2.LoraConfig(rank=32, seed=0, train_attn=True, train_mlp=True, train_unembed=True)
    create = trainer_pb2.CreateModelRequest(**model, base_model=info.base_models[0], lora_config=lora)
    trainer.CreateModel(create, **OPTIONS)
    try:
        losses = train(trainer, model["model_id"], sentence, steps)
        # An ephemeral save goes to the samplers, and ends with its model; one of kind SAMPLER stays.
        kind = types_pb2.CHECKPOINT_KIND_EPHEMERAL
        save = trainer_pb2.SaveCheckpointRequest(**model, seq_id=2 * steps + 1, kind=kind)
        saved = trainer.SaveCheckpoint(save, **OPTIONS)
        print(f"version {saved.checkpoint.version_id} is in {saved.num_samplers} sampler(s)\n> {PROMPT}|", end="")
        params = sampler_pb2.SamplingParams(max_tokens=len(sentence) - len(prompt), temperature=0)
        inputs = {"version_id": saved.checkpoint.version_id, "prompt": [chunk_of(prompt)], "num_samples": 1}
        request = sampler_pb2.SampleRequest(**inputs, sampling_params=params)
        for event in sampler.StreamSample(sampler_pb2.StreamSampleRequest(request=request), **OPTIONS):
            tokens = np.frombuffer(event.delta.tokens, "<i4")  # the last event is the whole result, without a delta
            print(tokenizer.decode(tokens), end="", flush=True)
    finally:  # nobody else ends a model that was made over gRPC
        trainer.DeleteModel(trainer_pb2.DeleteModelRequest(**model), **OPTIONS)
    print(f"\ndeleted {model['model_id']}; loss per token went from {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains, saves and samples over gRPC.")
    parser.add_argument("--trainer", default="127.0.0.1:8001", metavar="HOST:PORT")
    parser.add_argument("--sampler", default="127.0.0.1:8002", metavar="HOST:PORT")
    arguments = parser.parse_args()
    limits = [("grpc.max_receive_message_length", 256 * 2**20)]  # gRPC's own are 4 MiB; some tokenizers are larger
    trainer, sampler = (grpc.insecure_channel(address, limits) for address in (arguments.trainer, arguments.sampler))
    try:
        main(trainer_pb2_grpc.TrainerServiceStub(trainer), sampler_pb2_grpc.SamplerServiceStub(sampler), steps=24)
    except grpc.RpcError as error:  # one line: the code of gRPC, Tinsmith's reason, and the message
        info, status = error_details_pb2.ErrorInfo(), rpc_status.from_call(error)
        known = any(detail.Unpack(info) for detail in (status.details if status else ()))
        sys.exit(f"{' '.join([error.code().name, *[info.reason] * known])}: {error.details()}")
