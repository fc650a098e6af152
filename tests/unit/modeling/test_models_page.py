"""docs/models.md says what the models say of themselves."""

import pytest

from tests.unit.modeling.models_page import NAMES, PAGE, UNTRIED, page, seeing
from tests.unit.modeling.test_families import FAMILIES, MORE

COOKBOOK_NAMES = 46
"""Number of names in tinker_cookbook.model_info 0.6.1."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.unit.modeling.models_page"


def test_the_families_that_see_pictures_are_current() -> None:
    assert "\n".join(seeing()) in PAGE.read_text(), "run: python -m tests.unit.modeling.models_page"


def test_every_name_of_the_hosted_service_is_there_once() -> None:
    names = [name for of_family in NAMES.values() for name in of_family] + [*UNTRIED]
    assert len(set(names)) == len(names) == COOKBOOK_NAMES
    assert set(NAMES) <= {*FAMILIES, *MORE}
