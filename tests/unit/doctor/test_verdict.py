"""A whole examination of a good model, and what the verdict makes of one number that is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.models import VOCAB_SIZE
from tinsmith_cli.doctor.coverage import TokenizerFindings
from tinsmith_cli.doctor.examine import examine
from tinsmith_cli.doctor.limits import Findings, gap, limits
from tinsmith_cli.doctor.oracle import Truth
from tinsmith_cli.doctor.report import as_json, as_text
from tinsmith_cli.doctor.subject import ALL, BASE, Logprobs, Subject, read_config
from tinsmith_cli.doctor.verdict import Verdict, judge


@pytest.fixture(scope="module")
def subject(model_folder: Path) -> Subject:
    return Subject(
        path=str(model_folder),
        config=read_config(str(model_folder)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        rank=4,
        num_tokens=128,
        num_threads=1,
        quick=True,
    )


@pytest.fixture(scope="module")
def good(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return examine(subject, tmp_path_factory.mktemp("scratch"), report=lambda line: None)


def failed(verdict: Verdict) -> set[tuple[str, str]]:
    return {(check.section, check.name) for check in verdict.checks if check.status == "FAILED"}


def moved(logprobs: Mapping[str, Logprobs], name: str, by: float) -> dict[str, Logprobs]:
    """One logprob of these is wrong."""
    first, *rest = [one.copy() for one in logprobs[name]]
    rest[-1][-1] += by
    return {**logprobs, name: [first, *rest]}


def test_a_good_model_is_trainable_and_sampleable_and_everything_was_compared(good: Findings) -> None:
    verdict = judge(good)
    assert verdict.is_ok
    assert verdict.trainable == ["attn", "mlp", "unembed"]
    assert verdict.sampleable == ["torch"]
    compared = {(check.section, check.name) for check in verdict.checks if check.numbers}
    variants = {BASE, ALL, "adapter on attn", "adapter on mlp", "adapter on unembed"}
    assert {name for section, name in compared if section == "logprobs"} == variants | {"alone and in company"}
    assert {name for section, name in compared if section == "gradients"} == variants - {BASE}
    assert ("save and reload", "logprobs of stock PEFT with the same files") in compared
    for what in ("prompts", "greedy tokens", "drawn tokens"):
        for name in (BASE, ALL):
            assert ("sampler torch", f"{what}, {name}") in compared
    for check in verdict.checks:
        if check.numbers:  # far below the limit, and not by being empty
            assert check.numbers.get("max", check.numbers.get("relative", 1)) < check.numbers["limit"] / 4


@pytest.mark.slow
def test_a_quantised_model_is_compared_with_itself_and_its_gap_to_the_unquantised_one_is_shown(
    subject: Subject, good: Findings, tmp_path: Path
) -> None:
    findings = examine(replace(subject, quantize="nf4"), tmp_path, report=lambda line: None)
    verdict = judge(findings)
    assert verdict.is_ok
    assert not failed(verdict)
    assert findings.oracle.num_parameters == good.oracle.num_parameters
    assert findings.oracle.unquantised is not None
    for ours, theirs in zip(findings.oracle.unquantised, good.oracle.truth.logprobs[BASE], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    largest, mean = as_json(findings, verdict)["gap_to_unquantised"]
    assert 0.01 < mean < largest
    assert f"gap of nf4 to the unquantised model         {largest:.2g} nats at most, {mean:.2g} in" in as_text(
        findings, verdict
    )
    assert as_json(good, judge(good))["gap_to_unquantised"] is None


def test_an_adapter_that_is_lost_is_above_every_limit_of_the_mean(good: Findings) -> None:
    truth = good.oracle.truth.logprobs
    for name in good.trainer.adapters:
        assert gap(truth[BASE], truth[name])[1] > 0.1


def test_measured_numbers_are_plausible(good: Findings) -> None:
    capacity, speed = good.trainer.capacity, good.trainer.speed
    assert capacity is not None
    assert speed is not None
    assert speed.tokens_per_s > 0
    assert speed.num_tokens <= capacity.token_budget
    assert capacity.longest_sequence == 256
    assert capacity.training_bytes[8] == 4 * capacity.adapter_bytes[8]
    assert capacity.adapter_bytes[32] == 4 * capacity.adapter_bytes[8]
    elements = sum(target.in_features + target.out_features for target in good.trainer.adapters[ALL].targets)
    assert capacity.adapter_bytes[8] == 8 * elements * 4
    assert set(good.samplers[0].tokens_per_s) == {1, 8}


def test_a_group_whose_logprobs_are_wrong_is_not_trainable_and_the_others_are(good: Findings) -> None:
    wrong = moved(good.trainer.logprobs, "adapter on mlp", 0.01)
    verdict = judge(replace(good, trainer=replace(good.trainer, logprobs=wrong)))
    assert failed(verdict) == {("logprobs", "adapter on mlp")}
    assert verdict.trainable == ["attn", "unembed"]
    assert not verdict.is_ok
    (check,) = (check for check in verdict.checks if check.status == "FAILED")
    assert "train_mlp" in check.advice


@pytest.mark.parametrize("name", [BASE, ALL])
def test_a_base_model_that_is_wrong_or_company_that_shows_makes_nothing_trainable(good: Findings, name: str) -> None:
    wrong = moved(good.trainer.logprobs, name, 0.01)
    assert judge(replace(good, trainer=replace(good.trainer, logprobs=wrong))).trainable == []


def test_a_wrong_gradient_makes_its_group_not_trainable(good: Findings) -> None:
    gradients = {**good.trainer.gradients, "adapter on attn": good.trainer.gradients["adapter on attn"] * 1.01}
    verdict = judge(replace(good, trainer=replace(good.trainer, gradients=gradients)))
    assert failed(verdict) == {("gradients", "adapter on attn")}
    assert verdict.trainable == ["mlp", "unembed"]


def test_nan_is_a_failure_and_valid_json(good: Findings) -> None:
    findings = replace(good, trainer=replace(good.trainer, logprobs=moved(good.trainer.logprobs, BASE, float("nan"))))
    verdict = judge(findings)
    assert ("logprobs", BASE) in failed(verdict)
    json.loads(json.dumps(as_json(findings, verdict), allow_nan=False))


def test_a_sampler_that_disagrees_is_not_sampleable_and_the_model_stays_trainable(good: Findings) -> None:
    (sampler,) = good.samplers
    wrong = replace(sampler, logprobs=moved(sampler.logprobs, BASE, 0.01))
    verdict = judge(replace(good, samplers=[wrong]))
    assert failed(verdict) == {("sampler torch", f"prompts, {BASE}")}
    assert verdict.sampleable == []
    assert verdict.trainable == ["attn", "mlp", "unembed"]
    # Drawn tokens are compared with the trainer, too.
    drawn = [(one, [np.array(scored[0]) + 0.01]) for one, scored in good.trainer.drawn]
    verdict = judge(replace(good, trainer=replace(good.trainer, drawn=drawn)))
    assert failed(verdict) == {
        ("sampler torch", f"{how} tokens, {name}") for how in ("greedy", "drawn") for name in (BASE, ALL)
    }


def test_files_that_lack_parameters_or_lose_bits_are_found(good: Findings) -> None:
    verdict = judge(replace(good, oracle=replace(good.oracle, missing=["lm_head.weight"])))
    assert {section for section, _ in failed(verdict)} == {"weights"}
    assert (verdict.trainable, verdict.sampleable) == ([], [])
    verdict = judge(replace(good, trainer=replace(good.trainer, is_same_after_load=False)))
    assert {section for section, _ in failed(verdict)} == {"save and reload"}
    assert not verdict.is_ok


def test_a_tokenizer_of_another_model_is_found(good: Findings) -> None:
    text = replace(good.text, has_tokenizer=True, num_tokens=VOCAB_SIZE + 1)
    assert failed(judge(replace(good, text=text))) == {("text", "tokenizer")}
    text = replace(text, num_tokens=VOCAB_SIZE)
    assert judge(replace(good, text=text)).is_ok


def test_a_tokenizer_that_is_broken_is_not_called_absent(good: Findings) -> None:
    text = TokenizerFindings(
        False, False, 0, "tokenizer.json is there, but it is broken: expected value", is_broken=True
    )
    verdict = judge(replace(good, text=text))
    assert failed(verdict) == {("text", "tokenizer")}
    (check,) = (check for check in verdict.checks if check.status == "FAILED")
    assert check.detail == text.failure
    assert "beside the weights" not in check.advice


def test_in_narrow_types_the_limit_is_the_plain_models_own_rounding(
    good: Findings, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = good.oracle.truth
    narrow = replace(good, subject=replace(subject, dtype=torch.bfloat16))
    wide = Truth(moved(truth.logprobs, BASE, 0.04), truth.gradients)
    limit = limits(replace(narrow, oracle=replace(good.oracle, wide=wide)), BASE)
    assert limit.largest == pytest.approx(0.12, rel=1e-3)
    assert "rounding" in limit.source
    monkeypatch.setattr(Subject, "has_experts", True)  # rounding may choose other experts for single tokens
    sparse = limits(replace(narrow, oracle=replace(good.oracle, wide=wide)), BASE)
    assert (sparse.largest, sparse.mean) == (0.5, limit.mean)
    unknown = limits(replace(narrow, oracle=replace(good.oracle, why_not_wide="no memory")), BASE)
    assert (unknown.largest, unknown.mean, unknown.gradient) == (0.5, 0.1, 0.2)
    assert "no memory" in unknown.source


def test_the_report_fits_100_columns_and_says_what_to_do(good: Findings) -> None:
    wrong = moved(good.trainer.logprobs, "adapter on attn", 1.0)
    findings = replace(good, trainer=replace(good.trainer, logprobs=wrong))
    text = as_text(findings, judge(findings))
    assert max(map(len, text.splitlines())) <= 100
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if "adapter on attn" in line and line.endswith("FAILED"))
    assert "switch off train_attn" in lines[at + 1]
    assert "trainable:  partly, with train_attn=false: adapters on mlp, unembed" in lines
    assert "vllm" in text
    assert lines[-1].startswith("NOT OK: 1 failed")
