"""The table of docs/conformance.md: nothing in it depends on the day or the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.conformance.kit import ABSENT, FAILED, OK, Outcome

Results = Mapping[str, Sequence[Outcome]]
"""Outcomes by SDK version."""

_SIGNS = {OK: "yes", ABSENT: "-", FAILED: "**no**"}
_HEADING = """\
# Conformance

Which versions of the Tinker SDK work against Tinsmith, feature by feature. `make conformance` writes this page: it runs
the cases of `tests/conformance/cases` with each SDK in a virtual environment of its own, against one stack on one
port. The cases check numbers, not only that no exception comes: losses against their formulas, the sampler against the
trainer, a resumed model against the one that was saved.

`yes`: works. `-`: this SDK does not have it, or the server leaves it switched off. **no**: fails; the reason is below.

    python -m tests.conformance --base-url URL --sdk VERSION    # any server, any SDK
"""


def failures(results: Results) -> list[tuple[str, Outcome]]:
    return [(sdk, outcome) for sdk, outcomes in results.items() for outcome in outcomes if outcome.status == FAILED]


def page(results: Results) -> str:
    """Markdown, a row for each feature and a column for each SDK."""
    by_sdk = {sdk: {outcome.feature: outcome for outcome in outcomes} for sdk, outcomes in results.items()}
    features = list(dict.fromkeys(feature for found in by_sdk.values() for feature in found))
    lines = [_HEADING, f"| feature | {' | '.join(by_sdk)} |", f"|---|{'---|' * len(by_sdk)}"]
    for feature in features:
        signs = [_SIGNS[found[feature].status] if feature in found else "**no**" for found in by_sdk.values()]
        lines.append(f"| {feature} | {' | '.join(signs)} |")
    if failed := failures(results):
        lines += ["", "## What fails", ""]
        lines += [f"- {sdk}, {outcome.feature}: `{outcome.reason}`" for sdk, outcome in failed]
    return "\n".join(lines) + "\n"
