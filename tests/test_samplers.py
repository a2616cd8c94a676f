"""The sampler: every row as often as promised, in an order that the seed and the epoch decide, in steps that can be shared."""

import math
import time
from fractions import Fraction
from itertools import chain

import numpy as np
import pytest

from rsnakit import data
from rsnakit.samplers import BalancedSampler, StepBatches


def test_it_is_found_where_it_was():
    assert data.BalancedSampler is BalancedSampler


def labels_of(positives: int, negatives: int) -> np.ndarray:
    labels = np.zeros(positives + negatives, int)
    labels[np.random.default_rng(0).choice(len(labels), positives, replace=False)] = 1
    return labels


def rows_of(sampler: BalancedSampler, epoch: int = 0) -> list[int]:
    sampler.set_epoch(epoch)
    return [row for row, _, _ in sampler]


def batches_of(sampler: BalancedSampler, epoch: int = 0) -> list[list[int]]:
    rows = iter(rows_of(sampler, epoch))
    batches = [[next(rows) for _ in range(size)] for size in sampler.batches]
    assert next(rows, None) is None
    return batches


def fewest_batches(negatives: int, positives: int, batch_size: int, least: int, accumulate: int) -> tuple[int, int]:
    """Batches and positives by trial: the fewest whole steps into which the rows go, or, where they fill no step, as many
    batches as have two rows and a negative."""

    def rows(batches: int) -> int:
        return negatives + max(positives, least * batches)

    batches = accumulate
    while rows(batches) > batches * batch_size:
        batches += accumulate
    if batches == accumulate:
        while batches > 1 and (rows(batches) < 2 * batches or negatives < batches):
            if rows(batches - 1) > (batches - 1) * batch_size:
                break
            batches -= 1
    return batches, max(positives, least * batches, 2 - negatives)  # one alone is not left alone


@pytest.mark.parametrize("batch_size", [2, 3, 8, 16])
@pytest.mark.parametrize("accumulate", [1, 2, 4, 16])
@pytest.mark.parametrize("least", [0, 1, 2])
def test_what_an_epoch_promises(batch_size, accumulate, least):
    if least >= batch_size:
        with pytest.raises(ValueError, match="a negative has to fit in"):
            BalancedSampler(labels_of(3, 9), 3, batch_size, least)
        return
    for ratio in (0.05, 0.3, 0.5, 1, 2.5, 7, 1000):
        for positives, negatives in [(1, 1), (1, 40), (3, 2), (17, 5), (17, 200)]:
            labels = labels_of(positives, negatives)
            sampler = BalancedSampler(labels, ratio, batch_size, least, seed=1, accumulate=accumulate)
            batches, case = batches_of(sampler), f"ratio {ratio}, {positives} and {negatives}"
            sizes = [len(batch) for batch in batches]
            assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1, case  # no short last batch
            assert sizes[-1] >= 2 and sizes[0] <= batch_size and sum(sizes) == len(sampler), case
            assert list(chain(*sampler.steps)) == sampler.batches == sizes, case
            assert all(len(step) == accumulate for step in sampler.steps) or len(sampler.steps) == 1, case

            in_batch = [int(labels[batch].sum()) for batch in batches]
            assert min(in_batch) >= least and max(in_batch) - min(in_batch) <= 1, case
            assert all(n < size for n, size in zip(in_batch, sizes, strict=True)), case  # and a negative in each
            drawn = np.bincount(np.concatenate(batches), minlength=len(labels))
            assert drawn[labels == 0].min() >= 1, case
            for kind in (0, 1):
                assert drawn[labels == kind].max() - drawn[labels == kind].min() <= 1, case

            # A batch without room for more than one negative cannot have the ratio.
            wanted = round(min(Fraction(negatives) / Fraction(ratio), negatives * (batch_size - 1)))
            if batch_size > 3 and ratio >= 0.5:
                expected = fewest_batches(negatives, wanted, batch_size, least, accumulate)
                assert (len(sizes), sum(in_batch)) == expected, case
                assert (drawn[labels == 0] == 1).all(), case  # every negative exactly once
            else:  # the last step may take a few rows more
                assert 0 <= sum(in_batch) - max(wanted, least * len(sizes)) <= 2 * accumulate, case
                assert 0 <= len(sampler) - sum(in_batch) - negatives < accumulate, case


def test_positives_are_spread_evenly():
    labels = labels_of(5, 200)
    in_batch = [int(labels[batch].sum()) for batch in batches_of(BalancedSampler(labels, 10, 16, 0))]
    assert len(in_batch) == 14 and sum(in_batch) == 20  # 220 rows; a batch has 1.43 positives
    for i in range(15):
        assert abs(sum(in_batch[:i]) - i * 20 / 14) < 1


def test_the_first_places_ratio_by_hand():
    # 1,158 positive of 54,706 images, one positive to seven negatives, batches of 8: one positive in each
    labels = labels_of(1158, 54_706 - 1158)
    sampler = BalancedSampler(labels, 7, 8)
    batches = batches_of(sampler)
    assert len(batches) == 7650 and len(sampler) == 53_548 + 7650  # 53,548 / 7 = 7,649.7
    assert {int(labels[b].sum()) for b in batches} == {1} and {len(b) for b in batches} == {7, 8}
    counts = np.bincount(np.concatenate(batches), minlength=len(labels))
    assert set(counts[labels == 1]) == {6, 7} and set(counts[labels == 0]) == {1}  # 7,650 / 1,158 = 6.6
    # In steps of 32 batches: 240 of them, so 30 positives more, and batches a little smaller.
    sampler = BalancedSampler(labels, 7, 8, accumulate=32)
    assert len(sampler.steps) == 240 and len(sampler) == 53_548 + 7680


@pytest.mark.parametrize("positives, ratio, accumulate", [(1158, 7, 1), (1158, 0, 4), (1, 7, 1), (1158, 1, 1)])
def test_an_epoch_of_the_whole_competition_is_no_wait(positives, ratio, accumulate):
    labels, seconds = labels_of(positives, 54_706 - positives), []
    for _ in range(3):
        begun = time.process_time()
        sampler = BalancedSampler(labels, ratio, 8, accumulate=accumulate)
        sampler.set_epoch(3)
        assert sum(map(len, StepBatches(sampler))) == len(sampler) >= 54_700
        seconds.append(time.process_time() - begun)
    assert min(seconds) < 0.5  # 0.05 to 0.15 s


def test_a_huge_ratio_still_puts_one_positive_in_each_batch():
    labels = labels_of(1, 70)
    batches = batches_of(BalancedSampler(labels, 1000, 8, min_positives=1))
    assert [int(labels[b].sum()) for b in batches] == [1] * 10  # 70 negatives at 7 a batch
    assert len(batches_of(BalancedSampler(labels, 1000, 8, min_positives=0))) == 9  # 70 at 8
    assert not labels[rows_of(BalancedSampler(labels, math.inf, 8, 0))].any()


@pytest.mark.parametrize("ratio", [0, 2])
def test_order_changes_with_epoch_and_seed_and_with_nothing_else(ratio):
    # C04
    labels = labels_of(6, 30)

    def rows(seed: int, epoch: int) -> list[tuple[int, int, int]]:
        sampler = BalancedSampler(labels, ratio, 6, seed=seed)
        sampler.set_epoch(epoch)
        assert list(sampler) == list(sampler)
        return list(sampler)

    orders = [tuple(row for row, _, _ in rows(seed, epoch)) for seed in (0, 1) for epoch in range(4)]
    assert len(set(orders)) == 8
    for kind in (0, 1):  # each kind in an order of its own, too
        assert len({tuple(row for row in order if labels[row] == kind) for order in orders}) == 8
    for epoch in (0, 3):
        yielded = rows(0, epoch)
        assert [p for _, _, p in yielded] == list(range(len(yielded)))
        assert {e for _, e, _ in yielded} == {epoch}
        assert all(type(v) is int for v in yielded[0])


@pytest.mark.parametrize("negatives_per_epoch", [0, 1, 7, 30, 45, 100])
def test_none_comes_again_before_all_were_seen(negatives_per_epoch):
    labels = labels_of(6, 30)
    sampler = BalancedSampler(labels, 3, 8, seed=2, negatives_per_epoch=negatives_per_epoch)
    epochs = [rows_of(sampler, epoch) for epoch in range(60)]
    assert {sum(labels[epoch] == 0) for epoch in epochs} == {negatives_per_epoch or 30}
    assert {len(epoch) for epoch in epochs} == {len(sampler)}
    for kind, there_are in ((0, 30), (1, 6)):
        drawn = np.cumsum([np.bincount(np.array(e)[labels[e] == kind], minlength=36) for e in epochs], axis=0)
        drawn = drawn[:, labels == kind]
        assert (drawn.max(1) - drawn.min(1) <= 1).all()
        assert drawn[-1].sum() >= 60 and drawn.shape[1] == there_are
    # Asked for alone, an epoch is the same: there is no state.
    assert rows_of(BalancedSampler(labels, 3, 8, seed=2, negatives_per_epoch=negatives_per_epoch), 41) == epochs[41]


def test_positives_do_not_always_come_first_in_a_batch():
    labels = labels_of(10, 70)
    assert len({tuple(labels[batch]) for batch in batches_of(BalancedSampler(labels, 7, 8))}) > 3


@pytest.mark.parametrize("labels", [[0, 1, 1, 0, 0], [0, 0, 0], [1, 1], [1]])
def test_ratio_zero_takes_each_row_once(labels):
    sampler = BalancedSampler(labels, 0, 4, min_positives=9)
    assert sorted(rows_of(sampler)) == list(range(len(labels))) and len(sampler) == len(labels)
    assert rows_of(BalancedSampler([], 0, 4)) == []


def test_batches_of_rows_that_come_once():
    def sizes(rows: int, batch_size: int, accumulate: int = 1) -> list[list[int]]:
        sampler = BalancedSampler([0] * rows, 0, batch_size, accumulate=accumulate)
        counts = np.bincount(rows_of(sampler, 2), minlength=rows)
        assert len(counts) == rows and counts.min() == 1 and counts.sum() == len(sampler)
        return sampler.steps

    assert sizes(9, 4) == [[3], [3], [3]]  # not 4, 4 and one alone, which has no batch statistics
    assert sizes(35, 8) == [[7]] * 5
    assert sizes(35, 8, 4) == [[5, 5, 5, 4], [4, 4, 4, 4]]  # T04: no short last step
    assert sizes(7, 8, 4) == [[3, 2, 2]]  # two rows for each of four there are not
    assert sizes(3, 8, 4) == [[3]] and sizes(1, 8, 4) == [[1]] and sizes(2, 2, 4) == [[2]]
    assert sizes(5, 2) == [[2]] * 3  # one of them comes twice: else one would be alone
    assert sizes(9, 2, 4) == [[2] * 4] * 2


@pytest.mark.parametrize("ratio", [0, 3, 7])
@pytest.mark.parametrize("batch_size, accumulate, world", [(8, 2, 2), (5, 4, 2), (2, 6, 3), (2, 2, 2), (16, 4, 4)])
def test_processors_together_take_what_one_takes(ratio, batch_size, accumulate, world):
    sampler = BalancedSampler(labels_of(9, 110), ratio, batch_size, seed=3, accumulate=accumulate)
    sampler.set_epoch(5)
    alone = list(StepBatches(sampler))
    assert list(chain(*alone)) == list(sampler) and [len(batch) for batch in alone] == sampler.batches
    ranks = [list(StepBatches(sampler, rank, world)) for rank in range(world)]
    assert {len(batches) for batches in ranks} == {len(StepBatches(sampler, 0, world))} == {len(alone) // world}
    for number, batch in enumerate(alone):
        step, place = divmod(number, accumulate)
        assert ranks[place % world][step * (accumulate // world) + place // world] == batch


def test_a_start_in_the_middle():
    # C06
    sampler = BalancedSampler(labels_of(9, 110), 3, 8, accumulate=4)
    sampler.set_epoch(1)
    for rank, world in ((0, 1), (0, 2), (1, 2)):
        batches = StepBatches(sampler, rank, world)
        whole = list(batches)
        assert len(sampler.steps) == 5 and len(whole) == 20 // world
        for start in range(7):
            batches.start = start
            assert list(batches) == whole[start * 4 // world :] and len(batches) == len(list(batches))
        batches.start = 0
        assert list(batches) == whole


def test_steps_that_cannot_be_shared():
    labels = labels_of(9, 110)
    with pytest.raises(ValueError, match=r"accumulate: 5 batches a step .* by 4 processors; .* is 8"):
        StepBatches(BalancedSampler(labels, 3, 8, accumulate=5), 0, 4)
    with pytest.raises(ValueError, match="epoch of 3 rows is 1 batches of two and more: too few for 2 processors"):
        StepBatches(BalancedSampler([0, 1, 0], 0, 8, accumulate=2), 0, 2)
    for rank in (2, -1):
        with pytest.raises(ValueError, match=f"rank {rank} of 2 processors: expected 0 to 1"):
            StepBatches(BalancedSampler(labels, 3, 8, accumulate=2), rank, 2)


@pytest.mark.parametrize("labels", [[0, 0, 0], [1, 1], []])
def test_balancing_needs_both_kinds(labels):
    with pytest.raises(
        ValueError, match=f"balancing {sum(labels)} positives and {len(labels) - sum(labels)} negatives"
    ):
        BalancedSampler(labels, 3, 4)


@pytest.mark.parametrize("labels", [[0, 1, 2], [0.0, 1.0, np.nan], [0, 1, -1]])
@pytest.mark.parametrize("ratio", [0, 3])
def test_other_labels_are_refused_and_no_row_is_lost(labels, ratio):
    with pytest.raises(ValueError, match="expected 0 and 1"):
        BalancedSampler(labels, ratio, 4)


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"negatives_per_positive": -1}, "negatives_per_positive is -1, expected at least 0"),
        ({"negatives_per_positive": math.nan}, "negatives_per_positive is nan"),
        ({"batch_size": 1}, "batch_size is 1, expected at least 2"),
        ({"accumulate": 0}, "accumulate is 0, expected at least 1"),
        ({"seed": -3}, "seed is -3"),
        ({"negatives_per_epoch": -1}, "negatives_per_epoch is -1"),
        ({"negatives_per_epoch": 5, "negatives_per_positive": 0}, "negatives_per_epoch: .* every row once"),
        ({"min_positives": -1}, "at least -1 positives"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_numbers_out_of_range_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        BalancedSampler(labels_of(3, 9), **{"negatives_per_positive": 3, "batch_size": 4, **wrong})
