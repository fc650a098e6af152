"""The kernels of recurrent layers over packed sequences, against the recurrences token by token, in float64."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from tinsmith.modeling.kernels.causal_conv import causal_conv
from tinsmith.modeling.kernels.chunks import Chunks
from tinsmith.modeling.kernels.delta_rule import gated_delta_rule
from tinsmith.modeling.kernels.state_space import state_space_scan

LENGTHS = ([64, 64], [5, 70, 33, 1, 64, 130], [3])
"""Equal and whole chunks; mixed ones, of which some go through several chunks; less than a chunk."""


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def plain_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One sequence, token by token: the recurrence in delta_rule.py."""
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    state = q.new_zeros(q.shape[1], k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * k.shape[-1] ** -0.5)
    return torch.stack(outputs)


def plain_scan(x: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """One sequence, token by token: the recurrence in state_space.py."""
    b, c = (one.repeat_interleave(x.shape[1] // b.shape[1], 1) for one in (b, c))
    state = x.new_zeros(x.shape[1], b.shape[-1], x.shape[-1])
    outputs = []
    for t in range(len(x)):
        state = state * (rate * step[t]).exp()[:, None, None]
        state = state + torch.einsum("hk,hv->hkv", b[t], step[t][:, None] * x[t])
        outputs.append(torch.einsum("hkv,hk->hv", state, c[t]) + skip[:, None] * x[t])
    return torch.stack(outputs)


def assert_same(
    ours: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor], shared: Sequence[Tensor],
    lengths: list[int],
) -> None:  # fmt: skip
    """Outputs and gradients of the packed function, and of the plain one sequence by sequence. `shared` are parameters
    without a row for each token."""
    theirs = torch.cat([plain(*parts, *shared) for parts in zip(*(x.split(lengths) for x in inputs), strict=True)])
    packed = ours(*inputs, *shared)
    torch.testing.assert_close(packed, theirs, rtol=1e-10, atol=1e-10)
    factors, every = torch.randn_like(theirs), [*inputs, *shared]
    for grad, expected in zip(
        torch.autograd.grad((packed * factors).sum(), every),
        torch.autograd.grad((theirs * factors).sum(), every),
        strict=True,
    ):
        assert (grad - expected).norm() <= 1e-10 * expected.norm() + 1e-13


@pytest.mark.parametrize("lengths", LENGTHS)
def test_delta_rule_and_its_gradients_are_those_of_the_recurrence(lengths: list[int]) -> None:
    torch.manual_seed(0)
    tokens, heads = sum(lengths), 3
    decay = (-torch.rand(tokens, heads, dtype=torch.float64)).requires_grad_()
    beta = (2 * torch.rand(tokens, heads, dtype=torch.float64)).requires_grad_()
    inputs = [rand(tokens, heads, 8), rand(tokens, heads, 8), rand(tokens, heads, 10), decay, beta]
    assert_same(
        lambda q, k, v, g, beta: gated_delta_rule(q, k, v, g, beta, lengths), plain_delta_rule, inputs, [], lengths
    )


def test_delta_rule_of_equal_keys_and_of_decays_that_forget_all() -> None:
    torch.manual_seed(0)
    same = torch.ones(70, 2, 8, dtype=torch.float64) * torch.randn(8, dtype=torch.float64)
    decay = torch.zeros(70, 2, dtype=torch.float64)
    decay[::7] = -200.0  # exp of the sums of a chunk underflows
    inputs = [rand(70, 2, 8), same.requires_grad_(), rand(70, 2, 6), decay.requires_grad_()]
    beta = torch.ones(70, 2, dtype=torch.float64, requires_grad=True)
    assert_same(
        lambda q, k, v, g, beta: gated_delta_rule(q, k, v, g, beta, [70]), plain_delta_rule, [*inputs, beta], [], [70]
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_state_space_scan_and_its_gradients_are_those_of_the_recurrence(lengths: list[int], groups: int) -> None:
    torch.manual_seed(0)
    tokens, heads = sum(lengths), 4
    step = torch.rand(tokens, heads, dtype=torch.float64).requires_grad_()
    rate = (-torch.rand(heads, dtype=torch.float64)).requires_grad_()
    inputs = [rand(tokens, heads, 6), step, rand(tokens, groups, 10), rand(tokens, groups, 10)]
    assert_same(
        lambda x, step, b, c, rate, skip: state_space_scan(x, step, rate, b, c, skip, lengths),
        lambda x, step, b, c, rate, skip: plain_scan(x, step, rate, b, c, skip),
        inputs,
        [rate, rand(heads)],
        lengths,
    )


@pytest.mark.parametrize("activate", [True, False])
@pytest.mark.parametrize("lengths", [[64, 64], [5, 1, 2, 300, 3], [2]])
def test_convolution_and_its_gradients_are_those_of_conv1d(lengths: list[int], activate: bool) -> None:
    torch.manual_seed(0)

    def plain(x_L_F: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = conv1d(x_L_F.T[None], weight[:, None], bias, padding=3, groups=6)[0, :, : len(x_L_F)].T
        return silu(y) if activate else y

    assert_same(
        lambda x, weight, bias: causal_conv(x, weight, bias, lengths, activate=activate),
        plain,
        [rand(sum(lengths), 6)],
        [rand(6, 4), rand(6)],
        lengths,
    )


def test_a_neighbour_that_is_not_a_number_is_not_seen() -> None:
    torch.manual_seed(0)
    lengths = [40, 40, 7]
    bad = torch.arange(87).div(40, rounding_mode="floor") == 1
    x, values = (torch.randn(87, 2, 4).masked_fill(bad[:, None, None], torch.nan) for _ in range(2))
    weights = torch.randn(8, 4)
    outputs = [
        causal_conv(x.flatten(1), weights, None, lengths, activate=True),
        gated_delta_rule(x, x, values, -torch.rand(87, 2), torch.rand(87, 2), lengths),
        state_space_scan(values, torch.rand(87, 2), -torch.rand(2), x, x, None, lengths),
    ]
    for output in outputs:
        assert torch.equal(output.flatten(1).isnan().any(1), bad)


def test_a_step_continues_the_first_sequences_of_the_step_before() -> None:
    lengths = [5, 9, 1, 8]
    chunks = Chunks(lengths, 4)
    assert chunks.steps == [slice(0, 4), slice(4, 7), slice(7, 8)]
    assert chunks.transitions == [(slice(0, 3), slice(4, 7)), (slice(4, 5), slice(7, 8))]
    x = torch.arange(1, 24)
    cut = chunks.cut(x)
    first = [6, 15 + 1, 1, 15]  # of the sequences by length: 9, 8, 5 and 1 tokens
    assert cut[:4, 0].tolist() == [first[0], first[1], first[2], first[3]]
    assert cut[6].tolist() == [5, 0, 0, 0]
    assert torch.equal(chunks.join(cut), x)
