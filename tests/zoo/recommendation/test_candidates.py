import pytest

from weights import Checkpoint, UnknownWeights, find
from zoo import ResNet20
from zoo.recommendation import candidates
from zoo.recommendation.candidates import Candidate, named_candidates, shortlist, usual_candidates


def made(name: str, mb: float, top1: float) -> Candidate:
    record = find("ResNet20")
    facts = {field: getattr(record, field) for field in record.__dataclass_fields__}
    facts |= {"tag": name, "size_bytes": int(mb * 1e6), "metrics": {"top1": top1}, "metrics_data": "ImageNet-1k validation"}
    return Candidate(Checkpoint(**facts))


def names(found: list[Candidate]) -> list[str]:
    return [one.record.tag for one in found]


def test_what_ships_is_a_candidate_and_nothing_is_fetched_offline() -> None:
    found = usual_candidates(offline=True)
    assert "ResNet20:cifar10" in [one.name for one in found]
    assert all(one.here for one in found)


def test_a_few_others_are_fetched_within_size_and_licence() -> None:
    fetched = [one for one in usual_candidates(offline=False, max_mb=20, license=lambda license: license == "Apache-2.0") if not one.here]
    assert len(fetched) == candidates.FETCHED
    assert all(one.mb <= 20 and one.record.license == "Apache-2.0" for one in fetched)


def test_the_front_comes_first_spread_over_the_sizes() -> None:
    front = [made("a", 1, 50), made("b", 2, 60), made("c", 4, 70), made("d", 100, 80)]
    beaten = [made("x", 3, 40), made("y", 50, 65)]
    assert names(shortlist([*beaten, *front], 4)) == ["a", "b", "c", "d"]
    assert names(shortlist([*beaten, *front], 2)) == ["a", "d"]
    assert names(shortlist([*beaten, *front], 5)) in (["a", "b", "x", "c", "d"], ["a", "b", "c", "y", "d"])
    assert len(shortlist([*beaten, *front], 99)) == 6


def test_candidates_are_named_as_everywhere() -> None:
    assert [one.name for one in named_candidates(["resnet20", "ResNet50:imagenet1k_v1"])] == ["ResNet20:cifar10", "ResNet50:imagenet1k_v1"]
    assert named_candidates([ResNet20])[0].here
    with pytest.raises(UnknownWeights, match="did you mean"):
        named_candidates(["resnet21"])
    with pytest.raises(UnknownWeights, match="YOLOv3Tiny is no classifier"):
        named_candidates(["YOLOv3Tiny"])
    with pytest.raises(ValueError, match="ResNet20:cifar10 is named twice"):
        named_candidates(["resnet20", "resnet20:cifar10"])
    with pytest.raises(ValueError, match="this ResNet20 is untrained"):
        named_candidates([ResNet20()])
    with pytest.raises(TypeError, match="models are names"):
        named_candidates([3])
