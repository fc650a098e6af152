"""Everything around the variable-length kernels, with a kernel in plain torch in their place."""

import pytest
import torch
from torch import Tensor

from tests.support.reference_varlen import ReferenceVarlen
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.heads import Heads
from tinsmith.modeling.kernels.flash_attn import FlashAttn
from tinsmith.modeling.kernels.varlen import Segments, TorchVarlen, flash_shapes, left_of

CPU = torch.device("cpu")
LENGTHS = [7, 1, 12, 12, 3]
NUM_TOKENS = sum(LENGTHS)


def inputs(num_heads: int, num_kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(NUM_TOKENS, n, 8) for n in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def output_and_gradients(layout: Packed, heads: Heads, tensors: list[Tensor]) -> list[Tensor]:
    q, k, v = tensors[:3]
    out = layout.attend(0, q, k, v, heads)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), tensors)]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 12, 100])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2)])
def test_one_varlen_call_equals_the_groups_of_equal_length_gradients_included(
    num_heads: int, num_kv_heads: int, window: int | None, sinks: bool
) -> None:
    tensors = inputs(num_heads, num_kv_heads)
    sinks_N = torch.linspace(-1, 2, num_heads).requires_grad_() if sinks else None
    heads = Heads(scale=0.5, window=window, sinks_N=sinks_N)
    if sinks_N is not None:
        tensors.append(sinks_N)
    expected = output_and_gradients(Packed(LENGTHS), heads, tensors)
    kernel = ReferenceVarlen()
    actual = output_and_gradients(Packed(LENGTHS).with_kernel(kernel, CPU), heads, tensors)
    assert kernel.num_calls == 1
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_shapes_that_no_kernel_takes_go_the_plain_way() -> None:
    heads = Heads(scale=0.5, softcap=5.0)
    kernel = ReferenceVarlen()
    actual = output_and_gradients(Packed(LENGTHS).with_kernel(kernel, CPU), heads, inputs(4, 2))
    expected = output_and_gradients(Packed(LENGTHS), heads, inputs(4, 2))
    assert kernel.num_calls == 0
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_segments_are_made_once_for_all_layers() -> None:
    layout = Packed(LENGTHS).with_kernel(ReferenceVarlen(), CPU)
    assert layout.flash is not None
    assert layout.flash.segments.starts.tolist() == [0, 7, 8, 20, 32, 35]
    assert layout.flash.segments.starts.dtype == torch.int32
    assert layout.flash.segments.longest == 12
    assert Packed(LENGTHS).with_kernel(None, CPU).flash is None


@pytest.mark.parametrize(("window", "left"), [(None, -1), (1, 0), (4, 3), (11, 10), (12, -1), (100, -1)])
def test_a_window_counts_the_token_itself_and_flash_attention_does_not(window: int | None, left: int) -> None:
    assert left_of(Heads(scale=1.0, window=window), Segments.of(LENGTHS, CPU)) == left


def test_cuda_kernels_leave_tensors_in_host_memory_alone() -> None:
    q, k, v = (x.detach().bfloat16() for x in inputs(4, 2))
    assert not flash_shapes(q, k, v)
    assert not TorchVarlen().takes(q, k, v, Heads(scale=1.0))


def test_torch_has_the_operators_that_are_called_with_the_arguments_that_are_given() -> None:
    """On meta tensors: names, order and number of the arguments, and the shape of the log-sum-exp."""
    segments = Segments.of(LENGTHS, CPU)
    q, k, v = (torch.empty(x.shape, dtype=torch.bfloat16, device="meta") for x in inputs(6, 2))
    for window in (None, 4):
        heads = Heads(scale=0.5, window=window)
        out, lse = TorchVarlen().forward(q, k, v, segments, heads)
        assert out.shape == q.shape
        assert lse.shape == (6, NUM_TOKENS)
        grads = TorchVarlen().backward(out, q, k, v, out, lse, segments, heads)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


class _Interface:
    """The two functions of flash-attn 2.7 and later, which keep what they are given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, object]] = []

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        self.calls.append({"causal": causal, "left": window_size_left, "right": window_size_right, "softcap": softcap})
        return torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0]), None, None

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    ):  # fmt: skip
        self.calls.append({"causal": causal, "left": window_size_left, "right": window_size_right, "softcap": softcap})
        for n, grad in enumerate((dq, dk, dv)):
            grad.fill_(n)


def test_flash_attn_gets_window_and_softcap_both_ways() -> None:
    interface = _Interface()
    kernel = FlashAttn(interface)
    segments = Segments.of(LENGTHS, CPU)
    q, k, v = (x.detach() for x in inputs(6, 2))
    for heads in (Heads(scale=0.5, softcap=50.0), Heads(scale=0.5, window=4)):
        out, lse = kernel.forward(q, k, v, segments, heads)
        grads = kernel.backward(out, q, k, v, out, lse, segments, heads)
        assert [float(grad.mean()) for grad in grads] == [0, 1, 2]
    capped = {"causal": True, "left": -1, "right": 0, "softcap": 50.0}
    windowed = {"causal": False, "left": 3, "right": 0, "softcap": 0.0}
    assert interface.calls == [capped, capped, windowed, windowed]


def test_a_flash_attn_with_other_functions_is_not_used() -> None:
    class Old:
        def _flash_attn_varlen_forward(self, q, k, v, softmax_scale, causal, window_size):
            raise AssertionError

    with pytest.raises(ImportError, match="_flash_attn_varlen_forward has no alibi_slopes, softcap, window_size_left"):
        FlashAttn(Old())
