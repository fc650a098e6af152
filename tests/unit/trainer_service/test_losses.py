"""Each loss against its formula, gradient derived by hand."""

import pytest
import torch

from trainer_service.objectives.losses import LOSS_FNS, Targets

P = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
Q = torch.tensor([-1.0, -1.0, -1.5, -3.2])
A = torch.tensor([1.0, -2.0, 0.5, 3.0])
RATIO = torch.exp(P.detach() - Q)  # 1, 0.37, 2.72, 1.22


def evaluated(name: str, inputs: dict[str, torch.Tensor], config: dict[str, float], sizes: list[int]) -> torch.Tensor:
    loss = LOSS_FNS[name]
    settings = {**loss.config, **config}
    arrays = {key: torch.full_like(P, settings.get(key, 1.0)) for key in loss.optional} | inputs
    return loss.of_targets(Targets(P, arrays, settings, sizes))


def gradient(
    name: str, inputs: dict[str, torch.Tensor], sizes: tuple[int, ...] = (4,), **config: float
) -> torch.Tensor:
    return torch.autograd.grad(evaluated(name, inputs, config, list(sizes)).sum(), P)[0]


def test_settings_have_the_published_defaults() -> None:
    clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert {name: loss.config for name, loss in LOSS_FNS.items()} == {
        "cross_entropy": {},
        "importance_sampling": {},
        "ppo": clip,
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dro": {"beta": 0.05},
        "gspo": clip,
        "stable_reinforce": {"kl_coeff": 0.1, "ratio_cap": 2.0},
    }


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


THRESHOLDS = {"clip_low_threshold": torch.tensor([0.8, 0.1, 0.8, 0.8]), "clip_high_threshold": torch.full((4,), 3.0)}


@pytest.mark.parametrize("name", ["ppo", "cispo"])
def test_thresholds_of_a_target_replace_the_setting_there(name: str) -> None:
    got = gradient(name, {"logprobs": Q, "advantages": A, **THRESHOLDS})
    wide = gradient(name, {"logprobs": Q, "advantages": A}, clip_low_threshold=0.1, clip_high_threshold=3.0)
    torch.testing.assert_close(got, wide)
    # Equal thresholds for all targets give the setting's numbers, bit for bit.
    same = {key: torch.full((4,), value) for key, value in LOSS_FNS[name].config.items()}
    given = gradient(name, {"logprobs": Q, "advantages": A, **same})
    assert torch.equal(given, gradient(name, {"logprobs": Q, "advantages": A}))


def gspo_by_hand(p: torch.Tensor, q: torch.Tensor, a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One datum, word for word from tinker-api.md 6.7."""
    m = (mask != 0).float()
    s = torch.exp((m * (p - q)).sum() / m.sum())
    rho = s.detach() * p.exp() / p.exp().detach()
    return -torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a).sum()


def test_gspo_takes_the_ratio_of_each_datum_from_its_masked_targets() -> None:
    inputs = {"logprobs": Q, "advantages": A, "sequence_ratio_mask": torch.tensor([1.0, 0.0, 0.0, 2.0])}
    for sizes in ((4,), (1, 3), (3, 1)):
        p = P.detach().clone().requires_grad_(True)
        parts = zip(*(t.split(sizes) for t in (p, Q, A, inputs["sequence_ratio_mask"])), strict=True)
        expected = sum((gspo_by_hand(*part) for part in parts), torch.zeros(()))
        total = evaluated("gspo", inputs, {}, list(sizes)).sum()
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(gradient("gspo", inputs, sizes), torch.autograd.grad(expected, p)[0])


def test_gspo_clips_a_whole_datum_and_honours_thresholds_of_a_target() -> None:
    inputs = {"logprobs": P.detach() - 1, "advantages": A.abs(), "sequence_ratio_mask": torch.ones(4)}  # s = e
    assert not gradient("gspo", inputs).any()
    wide = {"clip_high_threshold": torch.tensor([1.2, 3.0, 1.2, 3.0])}
    expected = torch.where(wide["clip_high_threshold"] > 2, -torch.e * A.abs(), 0.0)
    torch.testing.assert_close(gradient("gspo", {**inputs, **wide}), expected)


def test_stable_reinforce_stops_at_the_cap_and_pulls_towards_the_sampler() -> None:
    inputs = {"logprobs": Q, "advantages": A, "sampled_mask": torch.tensor([1.0, 1.0, 1.0, 0.0])}
    expected = -torch.where(RATIO < 2, RATIO, 0.0) * A + 0.3 * (P.detach() - Q)
    expected[3] = 0  # not sampled
    torch.testing.assert_close(gradient("stable_reinforce", inputs, kl_coeff=0.3), expected)


def test_stable_reinforce_on_policy_is_reinforce() -> None:
    inputs = {"logprobs": P.detach(), "advantages": A, "sampled_mask": torch.ones(4)}
    torch.testing.assert_close(gradient("stable_reinforce", inputs), -A)


def test_stable_reinforce_has_a_bounded_gradient_where_the_ratio_has_none() -> None:
    far = {"logprobs": torch.full((4,), -200.0), "advantages": A, "sampled_mask": torch.ones(4)}
    assert gradient("importance_sampling", far).isinf().all()
    torch.testing.assert_close(gradient("stable_reinforce", far, kl_coeff=0.1), 0.1 * (P.detach() + 200))


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_clipped_gain_is_constant_where_the_ratio_overflows(name: str) -> None:
    inputs = {"logprobs": torch.full((4,), -200.0), "advantages": A.abs(), "sequence_ratio_mask": torch.ones(4)}
    torch.testing.assert_close(evaluated(name, inputs, {}, [4]), -1.2 * A.abs())
    assert not gradient(name, inputs).any()
    inputs["advantages"] = -A.abs()  # a loss that has no bound stays one
    assert gradient(name, inputs).isinf().all()
    inputs["advantages"] = 0 * A
    assert not evaluated(name, inputs, {}, [4]).any()
    assert not gradient(name, inputs).any()


POLICY = {"logprobs": Q, "advantages": A}
MASK = torch.tensor([0.0, 1.0, 0.5, -2.0])


@pytest.mark.parametrize(
    ("name", "config", "unweighted"),
    [
        ("importance_sampling", {}, -RATIO * A),
        ("ppo", {"clip_low_threshold": 0.0, "clip_high_threshold": 10.0}, -RATIO * A),
        ("cispo", {}, -RATIO * A),
        ("dro", {"beta": 0.1}, -(A - 0.1 * (P.detach() - Q))),
        ("stable_reinforce", {"kl_coeff": 0.3, "ratio_cap": 10.0}, 0.3 * (P.detach() - Q) - RATIO * A),
    ],
)
def test_weights_multiply_the_loss_of_each_target(
    name: str, config: dict[str, float], unweighted: torch.Tensor
) -> None:
    more = {"sampled_mask": torch.ones(4)} if name == "stable_reinforce" else {}
    torch.testing.assert_close(gradient(name, {**POLICY, **more}, **config), unweighted)
    torch.testing.assert_close(gradient(name, {**POLICY, **more, "weights": MASK}, **config), MASK * unweighted)


def test_the_ratio_of_gspo_is_over_the_targets_that_have_a_weight() -> None:
    inputs = {**POLICY, "sequence_ratio_mask": torch.ones(4)}
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 10.0}
    ratio = torch.exp((P.detach() - Q)[1:].mean())  # MASK[0] is 0; the size of the others is no factor
    torch.testing.assert_close(gradient("gspo", {**inputs, "weights": MASK}, **wide), -MASK * ratio * A)


def test_a_datum_of_gspo_without_any_weight_counts_nothing() -> None:
    inputs = {**POLICY, "sequence_ratio_mask": torch.ones(4), "weights": torch.zeros(4)}
    assert not evaluated("gspo", inputs, {}, [4]).any()
    assert not gradient("gspo", inputs).any()


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"])
def test_a_target_of_weight_0_counts_nothing_though_its_ratio_is_infinite(name: str) -> None:
    far = {"logprobs": torch.tensor([-1e5, -1.0, -1.5, -3.2]), "advantages": -A.abs()}
    far |= {"sampled_mask": torch.ones(4), "sequence_ratio_mask": torch.ones(4)}
    near = far | {"logprobs": Q}
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0])
    got = gradient(name, far | {"weights": mask})
    torch.testing.assert_close(got, gradient(name, near | {"weights": mask}))
    assert got[0] == 0
    assert evaluated(name, far | {"weights": mask}, {}, [4])[0] == 0
