"""Dataset and samplers: the same sample whoever loads it, small to send, and every row as often as promised."""

import collections
import hashlib
import pickle
import pickletools
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader

from rsnakit import augment, store
from rsnakit.data import BalancedSampler, MammogramDataset, one_thread, sample_seed, usable

SHAPE = (32, 24)
SETTINGS = {"height": SHAPE[0], "width": SHAPE[1]}


def make_store(path: Path, images: dict[str, np.ndarray | None]) -> store.Store:
    """A store of 12-bit images by id; None is an image that could not be decoded."""
    store.open_for_writing(path, SETTINGS, "raw16", SHAPE, {})
    rows = []
    for row, (image_id, image) in enumerate(images.items()):
        if image is not None:
            store.write_image(path, "raw16", row, "1", image_id, image)
        known = {"row": row, "patient_id": "1", "image_id": image_id, "flipped": False, "seconds": 0.1}
        state = ("failed", "cut short") if image is None else ("ok", "")
        blank = {name: 0 for name in store.INDEX_COLUMNS}
        rows.append({**blank, **known, "status": state[0], "reason": state[1]})
    store.append_index(path, rows)
    return store.Store(path)


@pytest.fixture(scope="module")
def images() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {f"0{i}": rng.integers(0, 4096, SHAPE, dtype=np.uint16) for i in range(6)}
    made["00"][0, :2] = 0, 4095
    return made


@pytest.fixture(scope="module")
def small(images, tmp_path_factory) -> store.Store:
    return make_store(tmp_path_factory.mktemp("data") / "store", {**images, "bad": None})


def frame(image_ids, cancer=None) -> pd.DataFrame:
    return pd.DataFrame({"image_id": list(image_ids), "cancer": cancer if cancer is not None else 0})


# --- the dataset --------------------------------------------------------------------------------------------------------


def test_items_are_float32_in_unit_range(small, images):
    dataset = MammogramDataset(frame(["03", "00", "05"], [1, 0, 1]), small)
    assert len(dataset) == 3
    for row, image_id in enumerate(["03", "00", "05"]):
        item = dataset[row]
        assert set(item) == {"image", "cancer", "item"}
        assert item["image"].dtype == torch.float32 and item["image"].shape == (1, *SHAPE)
        np.testing.assert_allclose(item["image"][0].numpy(), images[image_id] / 4095, atol=1e-7)
        assert item["item"].dtype == torch.int64 and item["item"].item() == row
    assert dataset[1]["image"].min() == 0 and dataset[1]["image"].max() == 1
    assert [dataset[i]["cancer"].item() for i in range(3)] == [1, 0, 1]
    assert dataset[0]["cancer"].dtype == torch.float32


def test_an_item_is_asked_for_by_row_or_with_epoch_and_position(small):
    calls = []

    def record(image, seed):
        calls.append(seed)
        return image

    dataset = MammogramDataset(frame(["00", "01"]), small, record, seed=11)
    for item in (1, (1, 0, 0), (1, 2, 5), (0, 2, 5), (1, 5, 2)):
        dataset[item]
    expected = [sample_seed(11, *ep) for ep in ((0, 0), (0, 0), (2, 5), (2, 5), (5, 2))]
    assert calls == expected and len(set(calls)) == 3
    assert torch.equal(dataset[(1, 3, 3)]["image"], dataset[1]["image"])


def test_seeds_are_32_bits_and_differ():
    seeds = {sample_seed(s, e, p) for s in (0, 1, 2**31 - 1) for e in range(20) for p in range(200)}
    assert len(seeds) >= 12_000 - 1 and all(0 <= s < 2**32 for s in seeds)  # 12,000 draws of 2**32: 0.02 pairs expected
    assert sample_seed(0, 1, 2) == int(np.random.SeedSequence([0, 1, 2]).generate_state(1)[0])


def test_a_table_without_labels_has_none(small):
    dataset = MammogramDataset(pd.DataFrame({"image_id": ["00"]}), small)
    assert torch.isnan(dataset[0]["cancer"])


def test_what_is_not_there_is_refused(small):
    with pytest.raises(store.StoreError, match=r"1 of 2 images are not in this store.*'9'"):
        MammogramDataset(frame(["00", "9"]), small)
    with pytest.raises(store.StoreError, match=r"bad has no pixels.*cut short"):
        MammogramDataset(frame(["bad"]), small)[0]
    with pytest.raises(ValueError, match="unit 'breasts'"):
        MammogramDataset(frame(["00"]), small, unit="breasts")


def test_usable_parts_the_images_with_pixels_from_the_others(small):
    table = frame(["04", "bad", "00"], [0, 1, 1])
    good, bad = usable(table, small)
    assert good["image_id"].tolist() == ["04", "00"] and good["cancer"].tolist() == [0, 1]
    assert good.columns.tolist() == table.columns.tolist() and good.index.tolist() == [0, 1]
    assert bad[["image_id", "status", "reason"]].to_numpy().tolist() == [["bad", "failed", "cut short"]]


def test_a_large_dataset_is_arrays_and_small_to_send(tmp_path):
    # A04: 54,706 rows; a frame or list of them would be copied into every worker as it is touched
    ids = [str(2_000_000_000 + i) for i in range(54_706)]
    path = tmp_path / "store"
    store.open_for_writing(path, SETTINGS, "raw16", SHAPE, {})
    rows = pd.DataFrame({name: 0 for name in store.INDEX_COLUMNS}, index=range(len(ids)))
    rows = rows.assign(row=range(len(ids)), image_id=ids, patient_id=ids, status="blank", reason="no breast found")
    rows.to_csv(path / "index.csv", index=False)
    dataset = MammogramDataset(frame(ids), store.Store(path), augment.build("light", *SHAPE))
    held = {k: v for k, v in vars(dataset).items() if k not in ("store", "augment")}
    assert all(isinstance(v, (np.ndarray, int, type(None))) for v in held.values()), held
    assert all(v.dtype != object for v in held.values() if isinstance(v, np.ndarray))
    sent = pickle.dumps(dataset)
    names = {argument for _, argument, _ in pickletools.genops(sent) if isinstance(argument, str)}
    assert not any("pandas" in name or name == "DataFrame" for name in names)
    assert len(sent) < 4_000_000  # ids of 10 characters at 4 bytes, labels at 4
    assert pickle.loads(sent).rows.tolist() == dataset.rows.tolist()


def test_a_sent_dataset_finds_its_images_in_a_store_that_has_grown(tmp_path, images):
    """Images of an unfinished store move when those between them are added."""
    path = tmp_path / "store"
    make_store(path, {"a": images["01"], "c": images["03"]})
    index = pd.read_csv(path / "index.csv", dtype=str)
    with open(path / "images.bin", "r+b") as f:  # c is record 2, and record 1 is still to come
        content = f.read()
        f.write(content[len(content) // 2 :])
    index.assign(row=["0", "2"]).to_csv(path / "index.csv", index=False)
    sent = pickle.dumps(MammogramDataset(frame(["c", "a"]), store.Store(path)))
    store.write_image(path, "raw16", 1, "1", "02", images["02"])
    store.append_index(path, [{**index.iloc[0].to_dict(), "row": 1, "image_id": "b"}])
    dataset = pickle.loads(sent)
    np.testing.assert_allclose(dataset[0]["image"][0].numpy(), images["03"] / 4095, atol=1e-7)
    np.testing.assert_allclose(dataset[1]["image"][0].numpy(), images["01"] / 4095, atol=1e-7)


# --- loading in processes -----------------------------------------------------------------------------------------------


def quiet(worker: int) -> None:
    one_thread(worker)  # what training gives its own workers
    assert cv2.getNumThreads() <= 1


def hashes(batches) -> list[tuple[int, str]]:
    return [
        (item, hashlib.sha256(image.numpy().tobytes()).hexdigest()[:12])
        for batch in batches
        for item, image in zip(batch["item"].tolist(), batch["image"], strict=True)
    ]


def three_epochs(small: store.Store, workers: int, context: str | None = None, epochs=(0, 1, 2)) -> list[list]:
    """What 16 rows with one and the same image look like, epoch by epoch."""
    dataset = MammogramDataset(frame(["02"] * 16), small, augment.build("heavy", *SHAPE), seed=4)
    sampler = BalancedSampler([0, 1] * 8, 0, 4, seed=4)
    loader = DataLoader(
        dataset, 4, sampler=sampler, num_workers=workers, multiprocessing_context=context, worker_init_fn=quiet,
        persistent_workers=workers > 0,
    )  # fmt: skip
    seen = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        seen.append(hashes(loader))
    return seen


def test_sixteen_copies_look_sixteen_ways_with_any_number_of_workers(small):
    # A01
    expected = three_epochs(small, 0)
    for epoch in expected:
        assert sorted(item for item, _ in epoch) == list(range(16))
        assert len({look for _, look in epoch}) >= 15
    looks = [look for epoch in expected for _, look in epoch]
    assert len(set(looks)) >= 45  # no epoch repeats another
    orders = {tuple(item for item, _ in epoch) for epoch in expected}
    assert len(orders) == 3
    assert three_epochs(small, 2, "fork") == expected
    assert three_epochs(small, 0, epochs=(2,)) == expected[2:]  # after a resume
    assert three_epochs(small, 1, "fork", epochs=(1, 2)) == expected[1:]


def test_spawned_workers_give_the_same(small):
    # A05
    assert three_epochs(small, 1, "spawn", epochs=(1,)) == three_epochs(small, 0, epochs=(1,))


def test_workers_start_after_opencv_was_used_here(small):
    # A02
    cv2.resize(np.zeros((4000, 3000), np.float32), (1500, 2000))  # its threads are up, and a fork does not copy them
    dataset = MammogramDataset(frame(["02"] * 16), small, augment.build("heavy", *SHAPE))
    loader = DataLoader(
        dataset, 4, num_workers=2, multiprocessing_context="fork", worker_init_fn=quiet, timeout=60
    )  # a loader that hangs raises after a minute
    assert [len(batch["item"]) for _ in range(2) for batch in loader] == [4] * 8


# --- the sampler --------------------------------------------------------------------------------------------------------


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
