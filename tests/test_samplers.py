"""The sampler: every row as often as promised, in an order that the seed and the epoch decide."""

import collections

import numpy as np
import pytest

from rsnakit import data
from rsnakit.samplers import BalancedSampler


def test_it_is_found_where_it_was():
    assert data.BalancedSampler is BalancedSampler


def batches_of(sampler: BalancedSampler, size: int) -> list[list[int]]:
    rows = [row for row, _, _ in sampler]
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def labels_of(positives: int, negatives: int) -> np.ndarray:
    labels = np.zeros(positives + negatives, int)
    labels[np.random.default_rng(0).choice(len(labels), positives, replace=False)] = 1
    return labels


@pytest.mark.parametrize("batch_size", [2, 3, 8, 16])
@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.5, 1, 2.5, 3, 7, 20, 1000])
@pytest.mark.parametrize("least", [0, 1, 2])
def test_what_an_epoch_promises(batch_size, ratio, least):
    if least >= batch_size:
        with pytest.raises(ValueError, match="a negative has to fit in"):
            BalancedSampler(labels_of(3, 9), ratio, batch_size, least)
        return
    for positives, negatives in [(1, 1), (1, 40), (3, 2), (3, 101), (17, 5), (17, 200)]:
        labels = labels_of(positives, negatives)
        sampler = BalancedSampler(labels, ratio, batch_size, least, seed=1)
        batches = batches_of(sampler, batch_size)
        rows = np.concatenate(batches)
        assert len(rows) == len(sampler)
        drawn = np.bincount(rows, minlength=len(labels))
        assert (drawn[labels == 0] == 1).all()  # every negative exactly once
        assert drawn[labels == 1].max() - drawn[labels == 1].min() <= 1  # positives evenly
        in_batch = [int(labels[batch].sum()) for batch in batches]
        assert min(in_batch) >= least
        assert all(n < len(batch) for n, batch in zip(in_batch, batches, strict=True))  # and a negative in each
        if batch_size / (1 + ratio) >= least and ratio >= 1 / (batch_size - 1):
            # A positive that waits for the next batch lets a negative in, which 1 / ratio positives go with.
            assert -1 - 1 / ratio < sum(in_batch) - negatives / ratio <= max(1, least)
            assert max(in_batch[:-1], default=0) - min(in_batch[:-1], default=0) <= 1  # spread over the epoch


def test_the_first_places_ratio_by_hand():
    # 1,158 positive of 54,706 images, one positive to seven negatives, batches of 8: one positive in each
    labels = labels_of(1158, 54_706 - 1158)
    sampler = BalancedSampler(labels, 7, 8)
    assert len(sampler) == 53_548 + 7650  # 53,548 / 7 = 7,649.7 batches
    assert set(collections.Counter(int(labels[b].sum()) for b in batches_of(sampler, 8))) == {1}
    counts = np.bincount([row for row, _, _ in sampler], minlength=len(labels))[labels == 1]
    assert set(counts.tolist()) == {6, 7}  # 7,650 / 1,158 = 6.6


def test_a_huge_ratio_still_puts_one_positive_in_each_batch():
    labels = labels_of(1, 70)
    batches = batches_of(BalancedSampler(labels, 1000, 8, min_positives=1), 8)
    assert [int(labels[b].sum()) for b in batches] == [1] * 10  # 70 negatives at 7 a batch
    assert len(batches_of(BalancedSampler(labels, 1000, 8, min_positives=0), 8)) == 9  # 70 at 8


@pytest.mark.parametrize("ratio", [0, 2])
def test_order_changes_with_epoch_and_seed_and_with_nothing_else(ratio):
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


def test_positives_do_not_always_come_first_in_a_batch():
    labels = labels_of(10, 70)
    sampler = BalancedSampler(labels, 7, 8)
    assert len({tuple(labels[b]) for b in batches_of(sampler, 8)}) > 3


@pytest.mark.parametrize("labels", [[0, 1, 1, 0, 0], [0, 0, 0], [1, 1]])
def test_ratio_zero_takes_each_row_once(labels):
    sampler = BalancedSampler(labels, 0, 4, min_positives=9)
    assert sorted(row for row, _, _ in sampler) == list(range(len(labels))) and len(sampler) == len(labels)


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
