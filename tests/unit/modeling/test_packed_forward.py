"""The packed, chunked, many-adapter forward against plain transformers + PEFT."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.adapters import random_adapter
from tests.support.models import VOCAB_SIZE, make_model
from tests.support.oracle import Oracle
from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.modeling import logprobs, preparation
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.kv_cache import Cached, KVCache, Prefill
from tinsmith.modeling.logprobs import logits, logprob_chunks, target_logprobs
from tinsmith.modeling.pretrained import UnsupportedModel

CPU = torch.device("cpu")


def random_tokens(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(seed))


def packed_logprobs(base: BaseModel, tokens: torch.Tensor, targets: torch.Tensor, lengths: list[int], runs: list[Run]):
    hidden = base.hidden_states(tokens, positions_of(lengths, CPU), Packed(lengths), runs)
    return target_logprobs(base.head, hidden, torch.arange(len(tokens)), targets, runs)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("rows_in_a_chunk", [None, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_two_adapters_of_different_rank_and_targets_equal_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, rows_in_a_chunk: int | None
) -> None:
    folder = make_model(tmp_path / "model", tie_word_embeddings=tied)
    base = BaseModel.load(folder, device=CPU, dtype=torch.float32)
    if rows_in_a_chunk:
        monkeypatch.setattr(logprobs.Head, "max_rows", rows_in_a_chunk)
    first = random_adapter(base.targets, seed=1, rank=8)
    second = random_adapter(base.targets, seed=2, rank=3, train_mlp=False, train_unembed=not tied)
    lengths = [7, 5, 5, 9]
    tokens, targets, weights = random_tokens(26), random_tokens(26, 1), torch.randn(26)
    weights[3:6] = 0
    runs = [Run(first, slice(0, 12)), Run(second, slice(12, 26))]
    ours = packed_logprobs(base, tokens, targets, lengths, runs)
    grads = torch.autograd.grad((ours * weights).sum(), first.tensors() + second.tensors())

    start = 0
    expected, expected_grads = [], []
    for n, (adapter, mine) in enumerate([(first, lengths[:2]), (second, lengths[2:])]):
        oracle = Oracle(folder, adapter, tmp_path / f"adapter{n}")
        pieces = []
        for length in mine:
            pieces.append(slice(start, start + length))
            start += length
        expected += [oracle.logprobs(tokens[p].tolist(), targets[p]).detach() for p in pieces]
        expected_grads += oracle.gradients(
            lambda oracle=oracle, pieces=pieces: sum(
                (oracle.logprobs(tokens[p].tolist(), targets[p]) * weights[p]).sum() for p in pieces
            )
        )
    torch.testing.assert_close(ours.detach(), torch.cat(expected), rtol=1e-5, atol=1e-5)
    for ours_grad, theirs in zip(grads, expected_grads, strict=True):
        assert (ours_grad - theirs).norm() <= 1e-5 * theirs.norm()


def test_rows_without_an_adapter_are_the_base_model(base: BaseModel) -> None:
    adapter = random_adapter(base.targets, seed=1, rank=4)
    lengths = [6, 4]
    tokens, targets = random_tokens(10), random_tokens(10, 1)
    mixed = packed_logprobs(base, tokens, targets, lengths, [Run(adapter, slice(0, 6))])
    alone = packed_logprobs(base, tokens[6:], targets[6:], lengths[1:], [])
    torch.testing.assert_close(mixed[6:], alone, rtol=1e-5, atol=1e-6)


def test_several_targets_of_one_row_equal_the_full_table(base: BaseModel) -> None:
    tokens = random_tokens(5)
    hidden = base.hidden_states(tokens, positions_of([5], CPU), Packed([5]), [])
    rows = torch.arange(5).repeat_interleave(3)
    targets = random_tokens(15, 3)
    table = logits(base.head, hidden, []).log_softmax(-1)
    torch.testing.assert_close(target_logprobs(base.head, hidden, rows, targets, []), table[rows, targets])


def test_logprob_chunks_cover_every_row_once(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs.Head, "max_rows", 3)
    adapter = random_adapter(base.targets, seed=1, rank=4)
    hidden = base.hidden_states(random_tokens(10), positions_of([10], CPU), Packed([10]), [])
    runs = [Run(adapter, slice(4, 9))]
    whole = logits(base.head, hidden, runs).log_softmax(-1)
    chunks = list(logprob_chunks(base.head, hidden, runs))
    assert [i for rows, _ in chunks for i in range(10)[rows]] == list(range(10))
    torch.testing.assert_close(torch.cat([table for _, table in chunks]), whole)


@pytest.mark.parametrize("targets_of_a_row", [1, 2])
@pytest.mark.parametrize("kept_rows", [0, 8, 100])
def test_chunks_that_are_kept_and_chunks_that_are_computed_again_have_the_same_gradient(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch, kept_rows: int, targets_of_a_row: int
) -> None:
    monkeypatch.setattr(logprobs.Head, "max_rows", 3)
    monkeypatch.setitem(logprobs.MAX_KEPT_ELEMENTS, "cpu", kept_rows * VOCAB_SIZE)
    adapter = random_adapter(base.targets, seed=1, rank=4)
    weights = adapter.weights["lm_head"]
    hidden = torch.randn(14, 64, requires_grad=True)
    rows = torch.arange(1, 14).repeat_interleave(targets_of_a_row)
    targets, factors = random_tokens(len(rows), 3), torch.randn(len(rows))
    factors[rows < 3] = factors[rows == 7] = 0  # of whole chunks, and within one
    runs = [Run(adapter, slice(4, 9))]
    inputs = [hidden, weights.a_R_I, weights.b_O_R]
    ours = target_logprobs(base.head, hidden, rows, targets, runs)
    loss = (ours * factors).sum()
    found = torch.autograd.grad(loss, inputs, retain_graph=True)

    share = torch.zeros(14, VOCAB_SIZE)
    share[4:9] = adapter.scaling * hidden[4:9] @ weights.a_R_I.T @ weights.b_O_R.T
    table = (hidden @ base.head.weight_V_H.T + share).log_softmax(-1)
    theirs = table[rows, targets]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for mine, other in zip(found, torch.autograd.grad((theirs * factors).sum(), inputs), strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()
    for first, again in zip(found, torch.autograd.grad(loss, inputs), strict=True):  # what was kept is used up
        assert (first - again).norm() <= 1e-6 * first.norm()


def test_the_full_logits_never_exist_at_once(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs.Head, "max_rows", 4)
    largest = 0
    project = logprobs._project

    def watched(*args):
        nonlocal largest
        out = project(*args)
        largest = max(largest, out.shape[0])
        return out

    monkeypatch.setattr(logprobs, "_project", watched)
    adapter = random_adapter(base.targets, seed=1, rank=4)
    tokens = random_tokens(50)
    ours = packed_logprobs(base, tokens, tokens, [50], [Run(adapter, slice(0, 50))])
    torch.autograd.grad(ours.sum(), adapter.tensors())
    assert largest == 4


@pytest.mark.parametrize("window", [None, 4])
def test_cached_steps_equal_the_packed_forward(tmp_path: Path, window: int | None) -> None:
    settings = {"use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"] * 2}
    folder = make_model(tmp_path, **(settings if window else {}))
    base = BaseModel.load(folder, device=CPU, dtype=torch.float32)
    adapter = random_adapter(base.targets, seed=1, rank=4)
    a, b = random_tokens(8), random_tokens(5, 1)
    lengths = [8, 5]
    whole = base.hidden_states(
        torch.cat([a, b]), positions_of(lengths, CPU), Packed(lengths), [Run(adapter, slice(0, 8))]
    )
    cache = KVCache()
    cache.reserve(2, 16)
    none = torch.empty(0, dtype=torch.int64)
    base.hidden_states(
        torch.cat([a[:7], b[:2]]),
        torch.tensor([*range(7), 0, 1]),
        Cached(cache, none, [Prefill(0, 0, 7), Prefill(1, 0, 2)]),
        [Run(adapter, slice(0, 7))],
    )
    cache.reserve(4, 32)  # what is stored survives growth
    step = base.hidden_states(
        torch.cat([a[7:], b[2:]]),
        torch.tensor([7, 2, 3, 4]),
        Cached(cache, torch.tensor([7]), [Prefill(1, 2, 3)]),
        [Run(adapter, torch.tensor([0]))],
    )
    torch.testing.assert_close(step[0], whole[7], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(step[1:], whole[10:], rtol=1e-5, atol=2e-5)


def test_a_new_adapter_changes_nothing_and_its_seed_fixes_it(base: BaseModel) -> None:
    tokens = random_tokens(6)
    config = AdapterConfig(rank=4, seed=7)
    adapter = Adapter.create(config, base.targets, CPU)
    again = Adapter.create(config, base.targets, CPU)
    other = Adapter.create(AdapterConfig(rank=4, seed=8), base.targets, CPU)
    assert torch.equal(adapter.flat, again.flat)
    assert not torch.equal(adapter.flat, other.flat)
    plain = packed_logprobs(base, tokens, tokens, [6], [])
    assert torch.equal(packed_logprobs(base, tokens, tokens, [6], [Run(adapter, slice(0, 6))]), plain)


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ({"train_attn": False, "train_unembed": False}, {"mlp"}),
        ({"train_mlp": False, "train_unembed": False}, {"attn"}),
        ({"train_attn": False, "train_mlp": False}, {"unembed"}),
        ({}, {"attn", "mlp", "unembed"}),
    ],
)
def test_train_flags_choose_the_layers(base: BaseModel, flags: dict[str, bool], groups: set[str]) -> None:
    adapter = Adapter.create(AdapterConfig(rank=2, **flags), base.targets, CPU)
    assert {target.group for target in adapter.targets} == groups


def test_a_group_that_the_base_model_lacks_is_refused(base: BaseModel) -> None:
    attention_only = [target for target in base.targets if target.group == "attn"]
    with pytest.raises(Unsupported, match="train_mlp"):
        Adapter.create(AdapterConfig(rank=2, train_unembed=False), attention_only, CPU)


def test_peft_files_load_back_bit_for_bit_and_refuse_another_layout(base: BaseModel, tmp_path: Path) -> None:
    adapter = random_adapter(base.targets, seed=1, rank=4)
    adapter.save_peft(tmp_path, base_model="x")
    assert torch.equal(Adapter.load_peft(tmp_path, adapter.config, base.targets).flat, adapter.flat)
    with pytest.raises(InvalidRequest, match="lm_head"):
        Adapter.load_peft(tmp_path, AdapterConfig(rank=4, train_unembed=False), base.targets)
    with pytest.raises(InvalidRequest, match=r"shape \[4, 64\], not \[8, 64\]"):
        Adapter.load_peft(tmp_path, AdapterConfig(rank=8), base.targets)


def test_a_model_whose_packed_forward_differs_runs_one_sequence_at_a_time(
    base: BaseModel, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sequences that see each other, as they would through a recurrent layer.
    attend = Packed.attend
    monkeypatch.setattr(Packed, "attend", lambda self, *args: attend(Packed([sum(self.lengths)]), *args))
    alone = BaseModel.load(model_folder, device=CPU, dtype=torch.float32)
    assert "sequences probably see each other" in alone.one_by_one
    monkeypatch.undo()
    tokens, lengths = random_tokens(9), [4, 5]
    adapter = random_adapter(base.targets, seed=1, rank=4)
    runs = [Run(adapter, slice(4, 9))]
    ours, theirs = (packed_logprobs(one, tokens, tokens, lengths, runs) for one in (alone, base))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_model_whose_adapted_layers_compute_something_else_is_refused(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = preparation.head_of
    monkeypatch.setattr(preparation, "head_of", lambda model: replace(head(model), scale=2.0))
    with pytest.raises(UnsupportedModel, match="with layers that can take adapters, its logprobs differ by"):
        BaseModel.load(model_folder, device=CPU, dtype=torch.float32)


def test_a_bfloat16_base_trains_float32_adapters(model_folder: Path) -> None:
    base = BaseModel.load(model_folder, device=CPU, dtype=torch.bfloat16)
    adapter = random_adapter(base.targets, seed=1, rank=4)
    tokens = random_tokens(6)
    grads = torch.autograd.grad(
        packed_logprobs(base, tokens, tokens, [6], [Run(adapter, slice(0, 6))]).sum(), adapter.tensors()
    )
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert all(grad.isfinite().all() and grad.any() for grad in grads)
