import pytest

from tinsmith.errors import InvalidRequest
from tinsmith.rpc.paths import TinkerPath, check_name, creation_of, is_newer, version_number, version_of


def test_a_path_is_its_three_parts() -> None:
    path = TinkerPath.parse("tinker://abc:train:0/sampler_weights/step-10", field="model_path")
    assert (path.run_id, path.kind, path.name) == ("abc:train:0", "sampler_weights", "step-10")
    assert path.location == "abc:train:0/sampler_weights/step-10"
    assert str(path) == "tinker://abc:train:0/sampler_weights/step-10"


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_each_public_kind_is_known(kind: str) -> None:
    assert TinkerPath.parse(f"tinker://abc:train:0/{kind}/x", field="path").kind == kind


@pytest.mark.parametrize(
    "path",
    [
        "abc:train:0/weights/x",
        "tinker://abc:train:0/weights",
        "tinker://abc:train:0/weights/x/y",
        "tinker://abc:train:0/weights/..",
        "tinker://../weights/x",
        "tinker://..:train:0/weights/x",
        "tinker://abc/ephemeral/1",
        "tinker://abc:train:0/weights/a b",
        "tinker://abc:train:0/weights/",
        "tinker:///weights/x",
    ],
)
def test_an_unsafe_or_unknown_path_is_refused_by_name(path: str) -> None:
    with pytest.raises(InvalidRequest, match="model_path"):
        TinkerPath.parse(path, field="model_path")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a%2e", "x" * 129, "a\n", "ä"])
def test_an_unsafe_name_is_refused_with_its_value(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_name(name, field="path")
    assert repr(name) in str(caught.value)


def test_versions_of_a_run_are_ordered_by_their_number() -> None:
    numbers = [version_number(name, run_id="a:train:0", field="v") for name in ("", "a:train:0@9", "a:train:0@10")]
    assert numbers == [-1, 9, 10]
    assert version_number("a:train:0@11.0c3f", run_id="a:train:0", field="v") == 11


def test_versions_of_two_creations_of_one_run_id_are_not_newer_than_each_other() -> None:
    old, new, newer = "a@9", version_of("a", 3, "0c3f"), version_of("a", 4, "0c3f")
    assert new == "a@3.0c3f"
    assert version_of("a", 9, "") == old
    assert is_newer(newer, new, run_id="a")
    assert not is_newer(new, newer, run_id="a")
    assert not is_newer(old, new, run_id="a")
    assert not is_newer("a@9.beef", new, run_id="a")
    assert is_newer(new, "", run_id="a")
    assert (creation_of(new), creation_of(old), creation_of("a@" + "0123456789abcdef" * 2)) == ("0c3f", "", "")


def test_versions_of_two_saves_of_one_creation_are_ordered_by_their_number() -> None:
    for creation_id in ("0c3f", ""):
        early, late = version_of("a", 3, creation_id, "aa"), version_of("a", 4, creation_id, "bb")
        assert early == f"a@3.{creation_id}.aa"
        assert creation_of(early) == creation_id
        assert is_newer(late, early, run_id="a")
        assert is_newer(late, version_of("a", 3, creation_id), run_id="a")
        assert not is_newer(early, version_of("a", 3, creation_id, "cc"), run_id="a")


@pytest.mark.parametrize(
    "name",
    [
        "a:train:1@3",
        "a:train:0",
        "a:train:0@",
        "a:train:0@-1",
        "a:train:0@1.",
        "a:train:0@1.x",
        "a:train:0@1..",
        "a:train:0@1.a.",
        "a:train:0@1.a.b.c",
        "a:train:0@" + "9" * 5000,
    ],
)
def test_an_id_that_is_no_version_of_the_run_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match="version_id: 'a:train"):
        version_number(name, run_id="a:train:0", field="version_id")
