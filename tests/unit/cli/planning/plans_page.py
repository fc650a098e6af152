"""Writes docs/plans.md: what `tinsmith plan` says of ten models on nine machines.

python -m tests.unit.cli.planning.plans_page
"""

from __future__ import annotations

from pathlib import Path

from tests.support.plans.nvml import MACHINES, MODELS, machine_of, model_of
from tests.unit.cli.planning.plan_rows import HEAD, row
from tinsmith.formatting import size_text

PAGE = Path(__file__).parents[4] / "docs" / "plans.md"
_HEAD = """# Plans

This page is generated: `python -m tests.unit.cli.planning.plans_page` writes it, and
`tests/unit/cli/planning/test_plans_page.py` fails when it is not current. It shows what `tinsmith plan` says of ten
models on nine machines, with vLLM. The machines are recorded answers of NVML (`tests/support/plans/machines`), written
from published sizes; no plan has run on a GPU. The models are their published configurations. `tinsmith plan MODEL
--machine 8xH100` plans for a machine that is not here ([how](quickstart-gpu.md#one-machine)).

- **trainer**, **samplers**: numbers of GPUs. `4 + 5 / 6 + 7` are two samplers that divide the model between two GPUs
  each. *sharded* means that the trainer's ranks divide the memory of the base model. One GPU in both columns is shared.
- **adapters**: in training at once on the device (in brackets: with those in host memory), and their largest rank.
- **longest sequence**: in training, in tokens. **KV tokens**: of each sampler.
- **publish**: bytes to each sampler for an adapter of the largest rank, and the transport.
- A row that does not fit names the smallest change that would make it fit.
"""


def page() -> str:
    lines = [_HEAD]
    for machine in MACHINES:
        seen = machine_of(machine)
        gpus = ", ".join(f"{gpu.name} ({size_text(gpu.free_bytes)} free)" for gpu in seen.gpus[:3])
        if len({(gpu.name, gpu.free_bytes) for gpu in seen.gpus}) == 1:
            gpus = f"{len(seen.gpus)} x {seen.gpus[0].name} ({size_text(seen.gpus[0].free_bytes)} free)"
        lines += [
            f"## {machine}",
            "",
            f"{gpus or 'No GPU'}; {seen.cores} cores, {size_text(seen.host_bytes)} of host memory free.",
            "",
            f"| model | parameters | {' | '.join(HEAD)} |",
            "|---" * (len(HEAD) + 2) + "|",
        ]
        for model in MODELS:
            cells = row(machine, model)
            cells += [""] * (len(HEAD) - len(cells))
            lines.append(f"| {model} | {model_of(model).parameters / 1e9:.1f} B | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
