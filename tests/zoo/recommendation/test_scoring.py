import math

import numpy as np
import pytest
import torch

from zoo.embedding.classifiers import fitted, logits
from zoo.recommendation.scoring import Score, behind, consistency, narrowed, probe, ranks


def clusters(count: int, spread: float, width: int = 8, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    y = torch.arange(count) % classes
    return torch.randn(classes, width, generator=drawn)[y] + spread * torch.randn(count, width, generator=drawn), y


def answers(right: int, count: int) -> Score:
    return Score((np.arange(count) < right).astype(float), 50.0)


def test_classes_that_lie_apart_are_all_named_rightly() -> None:
    score = probe(*clusters(60, 0.05), 3, 5)
    assert (score.percent, score.knn) == (100, 100)


def test_labels_that_mean_nothing_reach_chance_however_wide_the_vectors_are() -> None:
    """With more numbers than images a classifier names all that it learnt from rightly; one image known beforehand would show."""
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(160, 400, generator=drawn), torch.arange(160) % 2
    score = probe(x, y, 2, 5)
    assert abs(score.percent - 50) < 3 * score.error


def test_the_same_vectors_have_the_same_score() -> None:
    x, y = clusters(30, 1.5)
    one, other = probe(x, y, 3, 2), probe(x, y, 3, 2)
    assert (one.each == other.each).all()
    assert (one.knn, one.penalties) == (other.knn, other.penalties)


def test_scale_and_offset_of_a_column_change_nothing() -> None:
    x, y = clusters(30, 1.5)
    moved = x * torch.logspace(-3, 3, x.shape[1]) + torch.arange(x.shape[1])
    assert (probe(x, y, 3, 2).each == probe(moved, y, 3, 2).each).all()


def test_a_narrowed_space_gives_the_answers_of_the_wide_one() -> None:
    x, y = clusters(40, 1.0, width=100)
    asked = clusters(70, 1.0, width=100)[0][40:]
    thin, thin_asked = narrowed(x, asked)
    assert thin.shape == (40, 40)
    wide = logits(fitted(x, y, 3, 0.01), asked)
    torch.testing.assert_close(logits(fitted(thin, y, 3, 0.01), thin_asked), wide, atol=5e-3, rtol=0)


def test_the_penalty_is_stronger_where_there_is_more_noise() -> None:
    clear, noisy = probe(*clusters(30, 0.3), 3, 2), probe(*clusters(30, 6.0), 3, 2)
    assert max(clear.penalties) < min(noisy.penalties)


def test_all_right_still_has_an_error() -> None:
    score = answers(30, 30)
    assert score.percent == 100
    assert score.error == pytest.approx(100 * math.sqrt(32 / 34 * 2 / 34 / 34))


def test_only_images_on_which_two_differ_count_for_their_difference() -> None:
    one, other = np.ones(100), np.ones(100)
    one[:3], other[3:15] = 0, 0
    points, error = behind(Score(one, 0.0), Score(other, 0.0))
    assert points == pytest.approx(9)
    assert error == pytest.approx(math.sqrt(15))


def test_a_rank_is_shared_by_what_cant_be_told_apart_from_its_first() -> None:
    scores = [answers(right, 100) for right in (90, 88, 80, 79, 20)]
    assert ranks(scores) == [1, 1, 3, 3, 5]
    assert ranks(scores[:1]) == [1]


def test_consistency_is_that_of_a_loop_over_all_pairs() -> None:
    x, _ = clusters(30, 1.0)
    k = 4
    unit = x - x.mean(0)
    unit = unit / unit.norm(dim=1, keepdim=True)
    similar = unit @ unit.T
    similar.fill_diagonal_(-2)
    near = [set(torch.argsort(-row)[:k].tolist()) for row in similar]
    wanted = [sum(len(near[i] & near[j]) / k for j in near[i] if i in near[j]) / k for i in range(30)]
    assert consistency(x, k).each == pytest.approx(wanted)


def test_a_kept_score_is_read_back_and_a_damaged_one_is_not() -> None:
    score = probe(*clusters(30, 1.0), 3, 3)
    back = Score.of(score.facts())
    assert (back.each == score.each).all()
    assert (back.knn, back.penalties) == (score.knn, score.penalties)
    for damaged in ({}, {"each": 1, "knn": None, "penalties": []}, {"each": ["x"], "knn": None, "penalties": []}):
        with pytest.raises((TypeError, KeyError, ValueError)):
            Score.of(damaged)
