from __future__ import annotations

from collections.abc import Sequence

import pytest
from schemathesis.pytest.plugin import SchemathesisFunction


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Since pytest 9.2 all operations of a schema have one node id, and of those pytest-xdist runs a single one."""
    made = [item for item in items if isinstance(item, SchemathesisFunction)]
    for item in made:
        if item.parent is not None and not item.nodeid.endswith(item.name):
            item._id = item.parent.id.child(item.name)
    assert len({item.nodeid for item in made}) == len(made)
