"""Full-parameter training against plain transformers and autograd."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.support.batches import random_datum, request
from tests.support.models import CONTEXT, VOCAB_SIZE, make_model
from tinsmith.errors import FailedPrecondition, InvalidRequest
from tinsmith.modeling import logprobs
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FULL, TrainedWeights
from tinsmith.rpc.tensors import from_numpy
from trainer_service.engine.batch import Batch, Output
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.optimizers import AdamParams
from trainer_service.requests import batch_of

LENGTHS = (9, 4, 4, 17)
ADAM = AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.0)
"""eps is large, so that the rounding of a gradient near zero does not become a step of another sign."""
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.1,
}


def llama(folder: Path) -> Path:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True))
    model.save_pretrained(folder)
    return folder


def gemma(folder: Path) -> Path:
    """Its embeddings are scaled and tied, and its logits capped."""
    torch.manual_seed(0)
    Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=3.0)).save_pretrained(folder)
    return folder


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen3": make_model,
    "qwen3 tied": lambda folder: make_model(folder, tie_word_embeddings=True),
    "llama": llama,
    "gemma 2": gemma,
}


def load(folder: Path) -> BaseModel:
    return BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32, trainable=True)


@pytest.fixture
def engine(model_folder: Path) -> TrainingEngine:
    return TrainingEngine(load(model_folder), max_tokens_per_microbatch=20)


def batch(engine: TrainingEngine, *, seed: int = 0) -> Batch:
    data = [random_datum(n, seed + i, vocab_size=VOCAB_SIZE) for i, n in enumerate(LENGTHS)]
    return batch_of(request(data), engine.limits)


def run(engine: TrainingEngine, one: Batch, model_id: str = "m") -> Output:
    (output,) = engine.forward_backward([(model_id, one)])
    assert isinstance(output, Output), output
    return output


def plain_loss(model: PreTrainedModel, one: Batch) -> torch.Tensor:
    """Cross-entropy as the API defines it, one sequence at a time."""
    total = torch.zeros(())
    for datum in one.datums:
        table = model(torch.tensor(datum.tokens_N)[None].long()).logits[0].log_softmax(-1)
        picked = table.gather(1, torch.tensor(datum.targets)[:, None].long())[:, 0]
        total = total - (picked * torch.tensor(datum.inputs["weights"])).sum()
    return total


def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def named_gradients(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    gradient = engine.models["m"].need_gradient()
    return dict(zip((name for name, _ in gradient.specs()), gradient.tensors(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_equals_plain_autograd(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs.MAX_CHUNK_ELEMENTS, "cpu", 16 * VOCAB_SIZE)  # several chunks of the output layer
    folder = FAMILIES[family](tmp_path / "model")
    engine = TrainingEngine(load(folder), max_tokens_per_microbatch=20)
    engine.create_model("m", FULL, "adamw")
    one = batch(engine)
    output = run(engine, one)

    model = plain(folder)
    loss = plain_loss(model, one)
    loss.backward()
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-4)
    ours = named_gradients(engine)
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, mine in ours.items():
        expected = theirs[name]
        assert expected is not None
        assert (mine - expected).norm() <= 1e-5 * expected.norm(), name


def test_steps_equal_those_of_torchs_adamw(engine: TrainingEngine, model_folder: Path) -> None:
    engine.create_model("m", FULL, "adamw")
    model = plain(model_folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    for seed in (0, 10, 20):
        one = batch(engine, seed=seed)
        run(engine, one)
        norm = engine.optim_step("m", ADAM)["grad_norm:mean"]
        optimizer.zero_grad()
        plain_loss(model, one).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        expected = torch.cat([gradient.flatten() for gradient in gradients]).double().norm().item()
        assert norm == pytest.approx(expected, rel=1e-5)
        optimizer.step()
    for (name, parameter), ours in zip(model.named_parameters(), engine.base.parameters.values(), strict=True):
        torch.testing.assert_close(ours, parameter, rtol=0, atol=5e-6, msg=name)


def test_a_model_in_bfloat16_follows_its_float32_master_copy(model_folder: Path) -> None:
    base = BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.bfloat16, trainable=True)
    engine = TrainingEngine(base, max_tokens_per_microbatch=20)
    engine.create_model("m", FULL, "adamw")
    before = engine.capture("m", with_optimizer=False).adapter.flat
    for seed in (0, 10):
        run(engine, batch(engine, seed=seed))
        engine.optim_step("m", AdamParams(1e-5, 0.9, 0.95, 1e-8, 0.0, 0.0))
    master = engine.capture("m", with_optimizer=False).adapter
    assert 0 < (master.flat - before).abs().max() < 1e-4, "steps too small for bfloat16 are kept"
    for parameter, view in zip(base.parameters.values(), master.tensors(), strict=True):
        assert torch.equal(parameter, view.bfloat16())


def test_a_failed_batch_adds_nothing_and_forward_only_neither(engine: TrainingEngine) -> None:
    engine.create_model("m", FULL, "adamw")
    data = [random_datum(5, 1, vocab_size=VOCAB_SIZE)]
    output = run(engine, batch_of(request(data, forward_only=True), engine.limits))
    assert np.isfinite(output.metrics["loss:sum"])
    data[0].loss_fn_inputs["weights"].CopyFrom(from_numpy(np.full(5, 1e38, np.float32)))
    (error,) = engine.forward_backward([("m", batch_of(request(data), engine.limits))])
    assert isinstance(error, InvalidRequest)
    assert not any(gradient.any() for gradient in named_gradients(engine).values())


def test_there_is_one_model_at_a_time_and_the_next_one_starts_from_the_base(
    engine: TrainingEngine, model_folder: Path
) -> None:
    engine.create_model("first", FULL, "adamw")
    one = batch(engine)
    fresh = run(engine, one, "first").metrics["loss:sum"]
    engine.optim_step("first", ADAM)
    with pytest.raises(FailedPrecondition, match="model 'first' is live, and a server that trains all parameters"):
        engine.create_model("second", FULL, "adamw")
    trained = run(engine, one, "first").metrics["loss:sum"]
    assert trained != fresh
    engine.delete_model("first")
    engine.create_model("second", FULL, "adamw")
    assert run(engine, one, "second").metrics["loss:sum"] == fresh


def test_state_comes_back_with_its_optimizer(engine: TrainingEngine) -> None:
    engine.create_model("m", FULL, "adamw")
    run(engine, batch(engine))
    engine.optim_step("m", ADAM)
    state = engine.capture("m", with_optimizer=True)
    ends = []
    for _ in range(2):
        run(engine, batch(engine, seed=5))
        engine.optim_step("m", ADAM)
        ends.append(engine.capture("m", with_optimizer=False).adapter.flat)
        engine.restore("m", state, with_optimizer=True)
    assert torch.equal(*ends)


def test_groups_that_this_engine_does_not_train_are_refused_by_name(engine: TrainingEngine, base: BaseModel) -> None:
    adapters = TrainingEngine(base, max_tokens_per_microbatch=20)
    with pytest.raises(InvalidRequest, match=r"lora_config\.rank: 0 means full-parameter .* without --full-training"):
        adapters.create_model("m", FULL, "adamw")
    with pytest.raises(InvalidRequest, match=r"lora_config\.rank: 4 asks for an adapter.* send rank 0"):
        engine.create_model("m", AdapterConfig(rank=4), "adamw")
    with pytest.raises(InvalidRequest, match="optimizer: 'dimuon' is for the A and B of adapters"):
        engine.create_model("m", FULL, "dimuon")
    engine.create_model("m", FULL, "adamw")
    adapters.create_model("a", AdapterConfig(rank=4), "adamw")
    message = r"the checkpoint has rank 4 on .*, this model has all parameters \(rank 0\)"
    with pytest.raises(InvalidRequest, match=message):
        engine.restore("m", adapters.capture("a", with_optimizer=False), with_optimizer=False)
    with pytest.raises(InvalidRequest, match=r"the checkpoint has all parameters \(rank 0\), this model has rank 4"):
        adapters.restore("a", engine.capture("m", with_optimizer=False), with_optimizer=False)


def test_parameters_of_another_type_than_the_rest_are_refused_by_name(model_folder: Path) -> None:
    base = load(model_folder)
    base.parameters["model.norm.weight"].data = torch.ones(64, dtype=torch.float64)
    with pytest.raises(Exception, match=r"parameter 'model.norm.weight' is torch.float64, not torch.float32"):
        TrainedWeights.take(base)
