"""Whole plans: who gets which GPU, and how much memory; and what is said where something does not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from transformers import Qwen3VLConfig

from tests.support.plans.nvml import MACHINES, MODELS, machine_of, model_of
from tests.unit.cli.planning.plan_rows import planned, row
from tinsmith.formatting import size_text
from tinsmith.sizing import full_bytes
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.planning.constraints import Constraints
from tinsmith_cli.planning.families import of_config
from tinsmith_cli.planning.fit import SAMPLER_PROCESS_BYTES, TRAINER_PROCESS_BYTES
from tinsmith_cli.planning.memory import adapter_bytes, base_bytes, slots_bytes
from tinsmith_cli.planning.plan import DoesNotFit, Plan
from tinsmith_cli.planning.planner import plan
from tinsmith_cli.planning.report import as_json, as_text, command, summary

PLANS = """
machine     | model         | trainer        | samplers      | adapters           | longest | KV tokens | publish
1x-rtx-4090 | Qwen3-0.6B    | 0              | 0             | 5 (18) of rank 64  | 34,335  | 35,047    | 201 MB, shm
1x-h100     | Qwen3-8B      | 0              | 0             | 3 (20) of rank 64  | 22,396  | 64,840    | 738 MB, shm
2x-h100     | Qwen3-8B      | 0              | 1             | 10 (40) of rank 64 | 40,960  | 188,619   | 738 MB, shm
8x-h100     | Llama-3.1-8B  | 0-3            | 4 / 5 / 6 / 7 | 10 (42) of rank 64 | 91,193  | 213,629   | 705 MB, shm
8x-h100     | Qwen3-32B     | 0-3, sharded   | 4 + 5 / 6 + 7 | 3 (13) of rank 64  | 35,811  | 146,845   | 2,188 MB, shm
8x-h100     | Llama-3.1-70B | 0-3, sharded   | 4-7           | 1 (8) of rank 64   | 9,462   | 222,599   | 3,348 MB, shm
8x-h200     | Llama-3.1-70B | 0-3, sharded   | 4 + 5 / 6 + 7 | 3 (8) of rank 64   | 38,823  | 177,712   | 3,348 MB, shm
mixed       | Qwen3-4B      | 1 + 0          | 2             | 7 (13) of rank 64  | 40,960  | 36,225    | 568 MB, shm
mixed       | Qwen3-8B      | 2 + 0, sharded | 1             | 2 (10) of rank 64  | 12,049  | 189,896   | 738 MB, shm
mig         | Qwen3-8B      | MIG 0          | MIG 1         | 3 (20) of rank 64  | 27,816  | 58,837    | 738 MB, shm
in-use      | Qwen3-0.6B    | 1              | 0             | 46 (64) of rank 64 | 40,960  | 60,787    | 201 MB, shm
in-use      | Qwen3-8B      | 1              | 1             | 3 (40) of rank 64  | 22,396  | 64,840    | 738 MB, shm
none        | Qwen3-0.6B    | CPU            | CPU           | 4 (4) of rank 256  | 40,960  | 64,557    | 803 MB, shm
"""
"""Adapters: on the device, and in brackets with those in host memory."""
_LINES = [[cell.strip() for cell in line.split("|")] for line in PLANS.strip().splitlines()[1:]]


@pytest.mark.parametrize(("machine", "model", "cells"), [(one, two, rest) for one, two, *rest in _LINES])
def test_plan(machine: str, model: str, cells: list[str]) -> None:
    assert row(machine, model) == cells


def all_plans() -> list[Plan]:
    found = []
    for machine in MACHINES:
        for model in MODELS[:-2]:  # the last two fit nowhere
            try:
                found.append(planned(machine, model))
            except DoesNotFit:
                continue
    return found


def test_no_plan_takes_more_memory_of_a_gpu_than_is_free() -> None:
    plans = [one for one in all_plans() if one.device_type == "cuda"]
    assert len(plans) >= 40
    for one in plans:
        taken: dict[str, int] = {}
        for gpu in one.trainer.gpus:
            taken[gpu.id] = one.trainer.base_bytes + one.trainer.training.memory_bytes + TRAINER_PROCESS_BYTES
        for sampler in one.samplers:
            for gpu in sampler.gpus:
                kv = sampler.kv_tokens * sampler.kv_bytes_per_token
                mine = sampler.base_bytes + sampler.slots_bytes + kv + sampler.prefix_bytes
                taken[gpu.id] = taken.get(gpu.id, 0) + mine + SAMPLER_PROCESS_BYTES[one.engine]
        for gpu in one.machine.gpus:
            assert taken.get(gpu.id, 0) <= gpu.free_bytes, (one.name, gpu)


def test_no_gpu_belongs_to_two_services_unless_it_is_the_only_one_of_both() -> None:
    for one in all_plans():
        used = [gpu.id for gpu in one.trainer.gpus]
        used += [gpu.id for sampler in one.samplers for gpu in sampler.gpus]
        assert len(used) == len(set(used)) or (one.is_shared and len(used) == 2)
        assert one.loading_bytes <= one.machine.host_bytes


REFUSALS = [
    ("1x-rtx-4090", "Qwen3-8B", {}, "--quantize nf4 --engine torch"),
    ("1x-rtx-4090", "Qwen3-8B", {"quantisations": ()}, "2 GPUs with 25.3 GB free, as NVIDIA GeForce RTX 4090"),
    ("1x-h100", "Qwen3-8B", {"max_lora_rank": 512}, "--max-lora-rank 320"),
    ("1x-h100", "Llama-3.1-70B", {}, "4 GPUs with 84.9 GB free, as NVIDIA H100 80GB HBM3"),
    ("in-use", "Qwen3-32B", {}, "end the processes that hold 65.6 GB of these GPUs"),
    ("8x-h200", "DeepSeek-V3", {}, "32 GPUs with 150.1 GB free, as NVIDIA H200, on several machines"),
    ("8x-h100", "Kimi-K2", {}, "no change helps, nor do more GPUs of this kind"),
    ("mig", "Qwen3-30B-A3B", {"quantisations": ()}, "2 whole GPUs of 80 GB instead of MIG instances"),
    ("2x-h100", "Qwen3-8B", {"memory_bytes": 10**12}, "leave out TRAINER_MEMORY_BYTES"),
    ("2x-h100", "Qwen3-8B", {"max_kv_tokens": 10**7}, "leave out SAMPLER_MAX_KV_TOKENS"),
    ("8x-h100", "Llama-3.1-70B", {"shard_base": False}, "leave out TRAINER_SHARD_BASE=false"),
    ("8x-h100", "Llama-3.1-70B", {"engine": "torch"}, "--engine vllm"),
    ("8x-h100", "Llama-3.1-70B", {"samplers": 4}, "--samplers 3"),
    ("none", "Qwen3-8B", {}, "--dtype bfloat16"),
    ("none", "Qwen3-4B", {"samplers": 3}, "--samplers 2"),
    ("none", "Llama-3.1-70B", {}, "more host memory, or GPUs"),
    ("1x-h100", "gpt-oss-20b", {}, "--quantize int8 --engine torch"),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "model", "constraints", "change"), REFUSALS)
def test_what_does_not_fit_is_refused_with_the_smallest_change(
    machine: str, model: str, constraints: dict[str, Any], change: str
) -> None:
    with pytest.raises(DoesNotFit) as caught:
        planned(machine, model, **constraints)
    assert change in caught.value.change
    assert "GB" in caught.value.reason or "TB" in caught.value.reason or "TRAINER_MEMORY" in caught.value.reason


def test_flags_override_the_plan() -> None:
    gpus = machine_of("8x-h100").gpus
    found = planned("8x-h100", "Qwen3-8B", trainer_gpus=gpus[6:], sampler_gpus=gpus[:2])
    assert [gpu.id for gpu in found.trainer.gpus] == ["6", "7"]
    assert [[gpu.id for gpu in one.gpus] for one in found.samplers] == [["0"], ["1"]]
    found = planned("8x-h100", "Qwen3-8B", sampler_gpus=gpus[:2])
    assert (found.trainer.ranks, len(found.samplers)) == (6, 2)
    found = planned("8x-h100", "Qwen3-8B", train_share=0.25)
    assert (found.trainer.ranks, len(found.samplers)) == (2, 6)
    found = planned("8x-h100", "Qwen3-8B", ranks=4, samplers=2)
    assert (found.trainer.ranks, len(found.samplers)) == (4, 2)
    found = planned("8x-h100", "Qwen3-32B", trainer_tensor_parallel=2, sampler_tensor_parallel=4)
    assert (found.trainer.tensor_parallel, [len(one.gpus) for one in found.samplers]) == (2, [4])


def test_the_share_of_one_gpu_is_that_of_its_memory() -> None:
    less, more = (planned("1x-h100", "Qwen3-8B", train_share=share) for share in (0.3, 0.6))
    parts = [one.trainer.training.memory_bytes for one in (less, more)]
    assert parts[1] == pytest.approx(2 * parts[0], rel=1e-6)
    assert less.samplers[0].kv_tokens > more.samplers[0].kv_tokens


def test_settings_of_the_environment_are_kept() -> None:
    found = planned(
        "1x-h100", "Qwen3-8B", memory_bytes=5 * 10**9, max_kv_tokens=10_000, prefix_cache_bytes=10**9,
        max_device_versions=2, adapter_memory_bytes=3 * 10**9, max_lora_rank=8,
    )  # fmt: skip
    assert found.trainer_env(0)["TRAINER_MEMORY_BYTES"] == "5000000000"
    assert {**found.sampler_env(0), "CUDA_VISIBLE_DEVICES": "0"} == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0", "SAMPLER_MAX_KV_TOKENS": "10000",
        "SAMPLER_PREFIX_CACHE_BYTES": "1000000000", "SAMPLER_ADAPTER_MEMORY_BYTES": "3000000000",
        "SAMPLER_MAX_LORA_RANK": "8", "SAMPLER_MAX_DEVICE_VERSIONS": "2",
    }  # fmt: skip


def test_constraints_that_contradict_each_other_are_refused() -> None:
    gpus = machine_of("2x-h100").gpus
    with pytest.raises(UsageError, match="GPU 0, 1 is in both"):
        planned("2x-h100", "Qwen3-0.6B", trainer_gpus=gpus, sampler_gpus=gpus)
    with pytest.raises(UsageError, match="SAMPLER_TENSOR_PARALLEL: 3 is not possible"):
        planned("8x-h100", "Qwen3-8B", sampler_tensor_parallel=3)
    with pytest.raises(UsageError, match="--trainer-ranks 9"):
        planned("8x-h100", "Qwen3-8B", ranks=9)


def test_the_torch_engine_gets_weights_over_the_gpu_and_adapters_on_it() -> None:
    assert planned("1x-h100", "Qwen3-0.6B", engine="torch").channel == "cuda_ipc"
    two = planned("2x-h100", "Qwen3-0.6B", engine="torch")
    assert two.channel == "nccl"
    assert two.samplers[0].slots_bytes == two.adapter_memory_bytes == 2 * 1024**3
    assert planned("mig", "Qwen3-0.6B", engine="torch").trainer_env(0)["TRAINER_CHANNEL"] == "shm"


def test_full_training_needs_memory_for_all_parameters() -> None:
    shape = model_of("Qwen3-0.6B")
    found = planned("2x-h100", "Qwen3-0.6B", full_training=True, engine="torch")
    assert found.trainer.training.memory_bytes >= full_bytes(4 * shape.parameters)
    with pytest.raises(DoesNotFit, match=r"gradients and moments of all parameters take 131\.1 GB"):
        planned("2x-h100", "Qwen3-8B", full_training=True, engine="torch")


def test_vllms_slots_and_publishes_have_the_published_sizes() -> None:
    shape = model_of("Qwen3-8B")
    assert slots_bytes(shape, "bfloat16", rank=64, count=4) == pytest.approx(1.4e9, rel=0.01)
    assert adapter_bytes(shape, 32) == 4 * 32 * sum(one.inputs + one.outputs for one in shape.targets)


def test_recurrent_models_are_sampled_by_vllm_only_where_it_is_named() -> None:
    hybrid = replace(model_of("Qwen3-8B"), recurrent=True, state_heads=16)
    usual = plan("hybrid", hybrid, machine_of("8x-h100"), Constraints())
    named = plan("hybrid", hybrid, machine_of("8x-h100"), Constraints(engine="vllm", names_engine=True))
    assert (usual.engine, named.engine) == ("torch", "vllm")
    assert "SAMPLER_MAX_DEVICE_VERSIONS" not in usual.sampler_env(0)
    assert (named.sampler_env(0)["SAMPLER_MAX_DEVICE_VERSIONS"], named.samplers[0].slots_bytes) == (
        "4",
        slots_bytes(hybrid, "bfloat16", rank=named.rank, count=4),
    )


def test_vllm_divides_whole_heads_of_gated_deltanet() -> None:
    hybrid = replace(model_of("Qwen3-8B"), heads=32, kv_heads=8, state_heads=4)
    assert [size for size in (1, 2, 4, 8) if hybrid.divides(size)] == [1, 2, 4]


def test_quantised_weights_are_sampled_by_the_torch_engine_and_not_divided() -> None:
    found = planned("8x-h100", "Llama-3.1-70B", quantised="nf4")
    assert (found.engine, found.trainer.shard_base, {len(one.gpus) for one in found.samplers}) == ("torch", False, {1})
    assert found.trainer.base_bytes == pytest.approx(70.6e9 * (0.5 + 2 / 64), rel=0.1)


def test_a_machine_with_one_role_gives_it_all_gpus() -> None:
    trains = planned("8x-h100", "Qwen3-32B", samples=False)
    assert (trains.trainer.ranks, trains.samplers, trains.channel) == (8, [], "gloo")
    assert trains.loading_bytes < planned("8x-h100", "Qwen3-32B", samples=False, ranks=2).loading_bytes  # sharded
    samples = planned("8x-h100", "Qwen3-32B", trains=False)
    assert [len(one.gpus) for one in samples.samplers] == [2] * 4
    assert (samples.trainer.ranks, samples.trainer_env(0), samples.weights_bytes > 0) == (0, {}, True)
    assert planned("1x-h100", "Qwen3-8B", trains=False).samplers[0].kv_tokens > 2 * (
        planned("1x-h100", "Qwen3-8B").samplers[0].kv_tokens
    )
    assert planned("8x-h100", "Qwen3-8B", trains=False, engine="torch").channel == "nccl"
    assert [gpu.id for gpu in planned("8x-h100", "Qwen3-8B", samples=False, ranks=2).trainer.gpus] == ["0", "1"]


def test_host_memory_bounds_the_samplers_beside_what_a_divided_trainer_reads() -> None:
    shape, machine = model_of("Qwen3-32B"), machine_of("8x-h100")
    whole = base_bytes(shape, "bfloat16")
    two = plan("Qwen3-32B", shape, replace(machine, host_bytes=int(2.4 * whole)), Constraints())
    assert (two.trainer.shard_base, len(two.samplers)) == (True, 2)
    assert two.loading_bytes <= 2.4 * whole
    one = plan("Qwen3-32B", shape, replace(machine, host_bytes=int(1.6 * whole)), Constraints())
    assert (one.trainer.shard_base, len(one.samplers)) == (True, 1)
    with pytest.raises(DoesNotFit, match="trainer and 1 samplers load the base weights into host memory first"):
        plan("Qwen3-32B", shape, replace(machine, host_bytes=int(0.3 * whole)), Constraints())


def test_ranks_that_divide_the_model_need_host_memory_for_the_part_of_one_of_them() -> None:
    shape = model_of("Llama-3.1-70B")
    parts = (shape.layer_parameters + 8192 * 28672) / 8 + shape.outside_parameters
    few = replace(machine_of("8x-h100"), host_bytes=int(2.1 * parts))
    sharded = Constraints(samples=False, shard_base=True)
    for constraints in (sharded, replace(sharded, shard_base=None, trainer_tensor_parallel=8)):
        found = plan("Llama-3.1-70B", shape, few, constraints)
        assert found.loading_bytes == pytest.approx(2 * parts)
        with pytest.raises(DoesNotFit, match="load the base weights into host memory first"):
            plan("Llama-3.1-70B", shape, replace(few, host_bytes=int(1.9 * parts)), constraints)
    with pytest.raises(DoesNotFit, match="load the base weights into host memory first"):
        plan("Llama-3.1-70B", replace(shape, note="its files are quantised"), few, sharded)


def test_a_trainer_on_several_machines_divides_the_base_model_among_all_ranks() -> None:
    one = planned("8x-h100", "Llama-3.1-70B", samples=False, shard_base=True)
    two = planned("8x-h100", "Llama-3.1-70B", samples=False, shard_base=True, nodes=2)
    assert two.trainer.ranks == one.trainer.ranks == 8
    assert two.trainer.base_bytes < 0.7 * one.trainer.base_bytes
    assert planned("1x-h100", "Qwen3-8B", samples=False, nodes=2, shard_base=True).trainer.shard_base
    pair = planned("1x-h100", "Qwen3-8B", samples=False, nodes=2, trainer_tensor_parallel=2)
    assert pair.trainer.tensor_parallel == 2


def test_a_role_counts_on_a_cpu() -> None:
    both, trains, samples = (
        planned("none", "Qwen3-0.6B", **one) for one in ({}, {"samples": False}, {"trains": False})
    )
    assert both.weights_bytes == trains.weights_bytes + samples.weights_bytes
    assert (trains.samplers, samples.trainer.ranks, samples.rank) == ([], 0, both.rank)


def test_a_plan_tells_what_the_vision_tower_and_an_adapter_on_it_take() -> None:
    shape = of_config(Qwen3VLConfig().to_dict(), name="Qwen3-VL")
    found = plan("Qwen3-VL", shape, machine_of("1x-h100"), Constraints())
    told = as_json(found)
    assert told["tower_bytes"] == 2 * shape.tower_parameters
    assert told["tower_adapter_bytes"] == 4 * found.rank * sum(one.rank_elements for one in shape.tower)
    assert told["tower_adapter_bytes"] > 100_000_000
    (line,) = [line for line in as_text(found).splitlines() if " towers " in line]
    for num_bytes in (told["tower_bytes"], told["tower_adapter_bytes"]):
        assert size_text(num_bytes) in line
    blind = planned("1x-h100", "Qwen3-8B")
    assert " towers " not in as_text(blind)
    assert as_json(blind)["tower_bytes"] == as_json(blind)["tower_adapter_bytes"] == 0


def test_a_tower_that_cannot_be_counted_is_named_whether_the_model_fits_or_not() -> None:
    shape = of_config({**Qwen3VLConfig().to_dict(), "model_type": "seer"}, name="Seer")
    named = "note: parts beside the language model (vision_config) cannot be counted (transformers does not know models"
    assert named in as_text(plan("Seer", shape, machine_of("1x-h100"), Constraints()))
    with pytest.raises(DoesNotFit, match=re.escape(named)):
        plan("Seer", shape, machine_of("1x-rtx-4090"), Constraints())


@pytest.mark.parametrize("constraints", [{"samples": False, "nodes": 2}, {"trains": False}])
def test_a_plan_of_one_role_is_told_as_text_as_json_and_as_a_command(constraints: dict[str, Any]) -> None:
    found = planned("8x-h100", "Qwen3-8B", **constraints)
    role = "sampler" if "trains" in constraints else "trainer"
    other = "trainer" if role == "sampler" else "sampler"
    line = command(found)[-1]
    assert f"--role {role} --join TOKEN" in line
    assert f"--{role}-gpus" in line
    assert f"--{other}-gpus" not in line
    assert ("--trainer-nodes 2" in line) == (role == "trainer")
    text = as_text(found)
    assert f"\n{role}" in text.replace("8 samplers", "sampler")
    assert f"\n{other}" not in text
    assert ("8 ranks on each of 2 machines" in text) == (role == "trainer")
    assert other not in summary(found)
    told = as_json(found)
    assert (told["trainer"] is None, told["samplers"] == []) == (role == "sampler", role == "trainer")


def test_several_trainers_divide_the_gpus_for_training_evenly() -> None:
    one = planned("8x-h100", "Qwen3-8B")
    two = planned("8x-h100", "Qwen3-8B", trainers=2)
    assert [[gpu.id for gpu in two.trainer_gpus(number)] for number in range(2)] == [["0", "1"], ["2", "3"]]
    assert [two.trainer_env(number)["CUDA_VISIBLE_DEVICES"] for number in range(2)] == ["0,1", "2,3"]
    assert (two.num_trainers, two.trainer.ranks, len(two.samplers)) == (2, 2, 4)
    assert two.trainer.training.memory_bytes == one.trainer.training.memory_bytes
    assert two.loading_bytes - one.loading_bytes == one.loading_bytes // 5  # four samplers and a trainer
    assert two.weights_bytes == one.weights_bytes  # the whole on each of eight GPUs
    three = planned("8x-h100", "Qwen3-8B", trainers=3)
    assert (three.trainer.ranks, len(three.trainer.gpus), len(three.samplers)) == (1, 3, 5)
    own = planned("8x-h100", "Qwen3-8B", trainers=2, ranks=3)
    assert (own.trainer.ranks, len(own.trainer.gpus), len(own.samplers)) == (3, 6, 2)


def test_each_of_several_trainers_divides_the_base_model_among_its_own_ranks() -> None:
    one = planned("8x-h200", "Llama-3.1-70B", ranks=2)
    two = planned("8x-h200", "Llama-3.1-70B", trainers=2, ranks=2)
    assert two.trainer.shard_base
    assert two.trainer.base_bytes == one.trainer.base_bytes
    with pytest.raises(DoesNotFit, match=r"705\.5 GB in 4 trainers and sampler together") as caught:
        planned("8x-h100", "Llama-3.1-70B", trainers=4)
    assert "--trainers 3" in caught.value.change


def test_all_trainers_get_what_the_gpu_with_least_memory_allows() -> None:
    gpus = machine_of("mixed").gpus
    small, *_, large = sorted(gpus, key=lambda gpu: gpu.free_bytes)
    (middle,) = (gpu for gpu in gpus if gpu not in (small, large))
    both = planned("mixed", "Qwen3-0.6B", trainers=2, trainer_gpus=[large, small], sampler_gpus=[middle])
    least = planned("mixed", "Qwen3-0.6B", trainer_gpus=[small], sampler_gpus=[middle])
    assert both.trainer.training.memory_bytes == least.trainer.training.memory_bytes
    assert both.trainer_env(0)["TRAINER_MEMORY_BYTES"] == both.trainer_env(1)["TRAINER_MEMORY_BYTES"]


@pytest.mark.parametrize(
    ("machine", "constraints", "change"),
    [
        ("1x-h100", {"trainers": 2}, "--trainers 1"),
        ("2x-h100", {"trainers": 2}, "--trainers 1"),
        ("8x-h100", {"trainers": 4, "ranks": 2}, "--trainers 3"),
        ("mig", {"trainers": 8}, "--trainers"),
    ],
)
def test_trainers_do_not_share_a_gpu(machine: str, constraints: dict[str, Any], change: str) -> None:
    with pytest.raises(DoesNotFit, match=r"trainers need \d+ GPUs of their own, and a sampler one more") as caught:
        planned(machine, "Qwen3-0.6B", **constraints)
    assert f"the smallest change that makes it fit: {change}" in caught.value.change


def test_the_text_of_a_plan_tells_the_gpus_of_each_trainer_and_its_command_gives_them() -> None:
    found = planned("8x-h100", "Qwen3-8B", trainers=2)
    (line,) = [line for line in as_text(found).splitlines() if line.startswith("2 trainers")]
    assert "GPU 0,1 / 2,3" in line
    assert "2 ranks each" in line
    (line,) = [line for line in as_text(found).splitlines() if line.startswith("4 samplers")]
    assert line.endswith("engine vllm, each with")
    assert "8.19 billion parameters" in as_text(found)
    small = replace(model_of("Qwen3-0.6B"), layers=model_of("Qwen3-0.6B").layers[:1], vocab=1000)
    assert " million parameters" in as_text(plan("small", small, machine_of("none"), Constraints()))
    assert "2 ranks of each of 2 trainers on GPU 0,1 / 2,3" in summary(found)
    assert "--trainer-gpus 0,1,2,3 --sampler-gpus 4,5,6,7 --trainer-ranks 2 --trainers 2" in command(found)[-1]
