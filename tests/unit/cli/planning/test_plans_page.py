"""docs/plans.md says what the planner says."""

from tests.unit.cli.planning.plans_page import PAGE, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.unit.cli.planning.plans_page"
