"""A trainer's answers about an adapter that was trained on other base weights."""

import pytest

from tinsmith.errors import InvalidRequest
from trainer_service.operations.models import LiveModels

SUM, OTHER = "a" * 32, "b" * 32


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        (f"{SUM}-nf4", SUM, "they are the same weights, then quantised to nf4 and now not quantised"),
        (SUM, f"{SUM}-int8", "they are the same weights, then not quantised and now quantised to int8"),
        (f"{SUM}-int8", f"{SUM}-nf4", "they are the same weights, then quantised to int8 and now quantised to nf4"),
        (f"{SUM}-nf4", f"{OTHER}-nf4", "another set of weights has the same name"),
    ],
)
def test_other_weights_and_another_form_of_the_same_are_refused_by_the_reason(
    theirs: str, ours: str, reason: str
) -> None:
    LiveModels(["tiny"], ours).check_base_weights(ours, field="base_weights")
    expected = f"^base_weights: '{theirs}' .* this trainer's tiny has '{ours}': {reason}"
    with pytest.raises(InvalidRequest, match=expected):
        LiveModels(["tiny"], ours).check_base_weights(theirs, field="base_weights")
