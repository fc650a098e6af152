from __future__ import annotations

import pytest

from gateway import ids


@pytest.mark.parametrize(
    ("request_id", "operation", "sample"),
    [
        ("s:train:0:1", ("s:train:0", 1), None),
        (f"s:train:0:{2**31 - 1}", ("s:train:0", 2**31 - 1), None),
        (f"s:train:0:{2**31}", None, None),
        ("s:train:0", None, None),
        ("s:train:0:unload", None, None),
        ("s:train:0:-1", None, None),
        ("s:sample:0:1", None, (("s:sample:0", 0), 1)),
        (f"s:sample:0:{3 * 10**9 + 4}", None, (("s:sample:0", 3), 3 * 10**9 + 4)),
        (f"s:sample:0:{2**63 - 1}", None, (("s:sample:0", ids.LAST_CLONE_ID), 2**63 - 1)),
        (f"s:sample:0:{2**63}", None, None),
        ("s:sample:0", None, None),
        ("s:sample:0:1:0\n", None, None),
        ("s:loss:0", None, None),
        ("", None, None),
    ],
)
def test_a_request_id_is_an_operations_or_a_samples_or_neither(
    request_id: str, operation: tuple[str, int] | None, sample: tuple[ids.Target, int] | None
) -> None:
    assert ids.operation_of(request_id) == operation
    assert ids.sample_of(request_id) == sample


def test_all_ids_of_a_session_name_it() -> None:
    made = (ids.model_id_of("s", 1), ids.sampling_session_id_of("s", 2), ids.custom_loss_id_of("s", 3), "s")
    assert {ids.session_of(each) for each in made} == {"s"}
    assert [ids.is_model(each) for each in made] == [True, False, False, False]
    assert [ids.is_sampling_session(each) for each in made] == [False, True, False, False]
    assert [ids.is_custom_loss(each) for each in made] == [False, False, True, False]
