"""Each loss against its formula, gradient derived by hand."""

import torch

from trainer_service.losses import LOSS_FNS

P = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
Q = torch.tensor([-1.0, -1.0, -1.5, -3.2])
A = torch.tensor([1.0, -2.0, 0.5, 3.0])
RATIO = torch.exp(P.detach() - Q)  # 1, 0.37, 2.72, 1.22


def gradient(name: str, inputs: dict[str, torch.Tensor], **config: float) -> torch.Tensor:
    loss = LOSS_FNS[name]
    return torch.autograd.grad(loss.fn(P, inputs, {**loss.config, **config}).sum(), P)[0]


def test_cross_entropy_gradient_is_minus_the_weights() -> None:
    weights = torch.tensor([0.0, 1.0, -2.0, 100.0])
    assert torch.equal(gradient("cross_entropy", {"weights": weights}), -weights)


def test_importance_sampling_on_policy_is_reinforce() -> None:
    inputs = {"logprobs": P.detach(), "advantages": A}
    torch.testing.assert_close(gradient("importance_sampling", inputs), -A)


def test_importance_sampling_off_policy_weights_by_the_ratio() -> None:
    torch.testing.assert_close(gradient("importance_sampling", {"logprobs": Q, "advantages": A}), -RATIO * A)


def test_ppo_bounds_the_ratio_itself() -> None:
    # r = 0.37 with A < 0 is clipped, r = 2.72 with A > 0 is clipped, r = 1.22 with A > 0 is clipped at 1.2.
    expected = torch.tensor([-1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(gradient("ppo", {"logprobs": Q, "advantages": A}), expected)
    wide = gradient("ppo", {"logprobs": Q, "advantages": A}, clip_low_threshold=0.0, clip_high_threshold=10.0)
    torch.testing.assert_close(wide, -RATIO * A)


def test_cispo_keeps_a_gradient_for_clipped_tokens() -> None:
    clipped = gradient("cispo", {"logprobs": Q, "advantages": A}, clip_low_threshold=0.8, clip_high_threshold=1.2)
    torch.testing.assert_close(clipped, -RATIO.clamp(0.8, 1.2) * A)
    torch.testing.assert_close(gradient("cispo", {"logprobs": Q, "advantages": A}), -RATIO * A)


def test_dro_pulls_towards_the_sampling_policy() -> None:
    expected = -(A - 0.1 * (P.detach() - Q))
    torch.testing.assert_close(gradient("dro", {"logprobs": Q, "advantages": A}, beta=0.1), expected)
