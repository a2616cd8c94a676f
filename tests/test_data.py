"""Datasets and their batches: the same sample whoever loads it, and small to send."""

import hashlib
import os
import pickle
import pickletools
import signal
import subprocess
import time
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from rsnakit import augment, store
from rsnakit.data import MammogramDataset, collate, grouped, per_breast, sample_seed, usable, worker_init
from rsnakit.samplers import BalancedSampler, StepBatches
from rsnakit.shared import Lent

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


# 1_L has three images, in two kinds of view; 1_R two of one kind; 2_L one, from the side.
BREASTS = pd.DataFrame(
    {
        "image_id": ["03", "00", "05", "01", "04", "02"],
        "breast_id": ["1_L", "1_R", "1_L", "1_L", "1_R", "2_L"],
        "view": ["MLO", "CC", "CC", "CC", "CC", "AT"],
        "cancer": [1, 0, 1, 1, 0, 0],
        "BIRADS": [0.0, 2.0, np.nan, 0.0, 1.0, np.nan],
        "difficult_negative_case": [False, True, False, False, True, True],
    }
)


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


@pytest.mark.parametrize("unit, aux", [("image", ()), ("breast", ("biopsy",))])
def test_a_large_dataset_is_arrays_and_small_to_send(tmp_path, unit, aux):
    # A04: 54,706 rows; a frame or list of them would be copied into every worker as it is touched
    ids = [str(2_000_000_000 + i) for i in range(54_706)]
    path = tmp_path / "store"
    store.open_for_writing(path, SETTINGS, "raw16", SHAPE, {})
    rows = pd.DataFrame({name: 0 for name in store.INDEX_COLUMNS}, index=range(len(ids)))
    rows = rows.assign(row=range(len(ids)), image_id=ids, patient_id=ids, status="blank", reason="no breast found")
    rows.to_csv(path / "index.csv", index=False)
    table = frame(ids).assign(breast_id=[i[:-1] for i in ids], view="CC", biopsy=0)
    dataset = MammogramDataset(table, store.Store(path), augment.build("light", *SHAPE), unit, aux=aux)
    held = {k: v for k, v in vars(dataset).items() if k not in ("store", "augment", "aux")}
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


def hash_of(image: torch.Tensor) -> str:
    return hashlib.sha256(image.numpy().tobytes()).hexdigest()[:12]


def one_positive(small: store.Store, unit: str = "image") -> MammogramDataset:
    """43 items that all show the same, augmented; one of them positive."""
    table = BREASTS[BREASTS["breast_id"] == "1_L"] if unit == "breast" else BREASTS[:1]
    table = pd.concat([table.assign(breast_id=f"{n}_L", cancer=int(n == 20)) for n in range(43)], ignore_index=True)
    return MammogramDataset(table, small, augment.build("second_place", *SHAPE), unit, seed=4, draw=True)


def batches_of(dataset: MammogramDataset, rank: int = 0, world: int = 1) -> StepBatches:
    """Three steps of two batches; 42 negatives and seven times the positive."""
    return StepBatches(BalancedSampler(dataset.labels, 6, 9, seed=4, accumulate=2), rank, world)


def looks(dataset, batches: StepBatches, workers: int, context: str | None = None, epochs=(0, 1), start=0) -> list:
    """For each epoch its batches, of (item, hash of its image)."""
    loader = DataLoader(
        dataset, batch_sampler=batches, num_workers=workers, multiprocessing_context=context, collate_fn=collate,
        worker_init_fn=worker_init, persistent_workers=workers > 0, timeout=120 if workers else 0,
    )  # fmt: skip
    seen = []
    for epoch in epochs:
        batches.sampler.set_epoch(epoch)
        batches.start = start
        seen.append([list(zip(b["item"].tolist(), map(hash_of, b["image"]), strict=True)) for b in loader])
    return seen


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("unit", ["image", "breast"])
def test_a_sample_looks_the_same_whoever_loads_it(small, unit):
    # A01, C04: decided by seed, epoch and position in the epoch's order alone
    dataset = one_positive(small, unit)
    expected = looks(dataset, batches_of(dataset), 0, epochs=(0, 1, 2))
    everything = [look for epoch in expected for batch in epoch for _, look in batch]
    assert len(everything) == len(set(everything)) == 3 * 49  # no two alike, in an epoch or across them
    for epoch in expected:
        assert [item for batch in epoch for item, _ in batch].count(20) == 7  # so the positive looks seven ways
        assert [len(batch) for batch in epoch] == [9, 8, 8, 8, 8, 8]
    assert len({tuple(item for batch in epoch for item, _ in batch) for epoch in expected}) == 3
    for workers in (2, 4):
        assert looks(dataset, batches_of(dataset), workers, "fork", epochs=(0, 1, 2)) == expected
    # After a resume, within an epoch too.
    for workers in (0, 2):
        assert looks(dataset, batches_of(dataset), workers, epochs=(1, 2), start=2) == [e[4:] for e in expected[1:]]
    # On two processors: every other batch of a step.
    for rank in (0, 1):
        for workers in (0, 2):
            share = looks(dataset, batches_of(dataset, rank, 2), workers, epochs=(2, 0))
            assert share == [expected[2][rank::2], expected[0][rank::2]]
    # A spawned worker gets a copy.
    assert looks(pickle.loads(pickle.dumps(dataset)), batches_of(dataset, 1, 2), 0) == [e[1::2] for e in expected[:2]]


def test_spawned_workers_give_the_same(small):
    # A05
    dataset = one_positive(small)
    assert looks(dataset, batches_of(dataset), 1, "spawn") == looks(dataset, batches_of(dataset), 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("unit, context, workers", [("image", "spawn", 4), ("breast", "forkserver", 2)])
def test_workers_begun_in_any_way_give_the_same(small, unit, context, workers):
    # A01, A05
    dataset = one_positive(small, unit)
    share = looks(dataset, batches_of(dataset, 1, 2), workers, context, start=1)
    assert share == looks(dataset, batches_of(dataset, 1, 2), 0, start=1)
    assert share == [epoch[3::2] for epoch in looks(dataset, batches_of(dataset), 0)]


def resized(image: np.ndarray, seed: int) -> np.ndarray:
    """An augmentation that has OpenCV work on a large image."""
    assert cv2.getNumThreads() <= 1 and torch.get_num_threads() == 1  # a worker's
    cv2.resize(np.zeros((4000, 3000), np.float32), (1500, 2000))
    return image


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_start_after_opencv_was_used_here(small):
    # A02
    threads = cv2.getNumThreads()
    cv2.setNumThreads(4)
    try:
        cv2.resize(
            np.zeros((4000, 3000), np.float32), (1500, 2000)
        )  # its threads are up, and a fork does not copy them
        dataset = MammogramDataset(frame(["02"] * 16), small, resized)
        loader = DataLoader(
            dataset, 4, num_workers=4, multiprocessing_context="fork", worker_init_fn=worker_init, timeout=60
        )  # a loader that hangs raises after a minute
        assert [len(batch["item"]) for _ in range(2) for batch in loader] == [4] * 8
    finally:
        cv2.setNumThreads(threads)


class Processes(Dataset):
    """Each item is the number of the process that loads it."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, item: int) -> int:
        time.sleep(0.01)
        return os.getpid()


@pytest.fixture
def noted():
    """SIGTERM is only taken note of in this process, as in a training that ends cleanly."""
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_goes_on_at_ctrl_c_and_dies_at_sigterm(noted, context):
    loader = DataLoader(
        Processes(), 1, num_workers=2, multiprocessing_context=context, worker_init_fn=worker_init, timeout=60
    )
    batches = iter(loader)
    pids = {int(next(batches)), int(next(batches))}
    assert len(pids) == 2 and os.getpid() not in pids
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert {int(next(batches)) for _ in range(20)} == pids
    # Not by its parent: that is how a loader ends its workers, and no failure.
    subprocess.run(["kill", "-TERM", str(min(pids))], check=True)
    # Its own words for it where the loader notices, else those of a pipe that has lost its other end.
    with pytest.raises((RuntimeError, OSError, EOFError), match=r"worker|[Cc]onnection|pipe|^$|No such file"):
        list(batches)
    assert noted == []


# --- breasts ------------------------------------------------------------------------------------------------------------


def which(view: torch.Tensor, images: dict[str, np.ndarray]) -> str:
    """The id of the image that a view shows."""
    return next(i for i, image in images.items() if np.allclose(view[0].numpy(), image / 4095, atol=1e-7))


def test_a_breast_comes_with_all_its_images(small, images):
    dataset = MammogramDataset(BREASTS, small, unit="breast")
    assert len(dataset) == 3 and dataset.labels.tolist() == [1, 0, 0]  # in first-seen order
    expected = [(["03", "05", "01"], [1, 0, 0]), (["00", "04"], [0, 0]), (["02"], [1])]
    for number, (ids, kinds) in enumerate(expected):
        sample = dataset[(number, 5, number + 7)]
        assert sample["image"].shape == (len(ids), 1, *SHAPE) and sample["image"].dtype == torch.float32
        assert [which(view, images) for view in sample["image"]] == ids
        assert sample["view_id"].tolist() == kinds and sample["view_id"].dtype == torch.int64
        assert sample["view_mask"].tolist() == [True] * len(ids)
        assert sample["item"].item() == number and sample["cancer"].item() == dataset.labels[number]
    assert per_breast(BREASTS)["breast_id"].tolist() == ["1_L", "1_R", "2_L"]
    assert per_breast(BREASTS)["cancer"].tolist() == dataset.labels.tolist()
    assert per_breast(BREASTS)["image_id"].tolist() == [""] * 3


def test_training_draws_one_view_of_each_kind(small, images):
    dataset = MammogramDataset(BREASTS, small, unit="breast", draw=True, seed=3)
    places = [(epoch, position) for epoch in range(3) for position in range(20)]
    drawn = {n: [[which(v, images) for v in dataset[(n, *place)]["image"]] for place in places] for n in range(3)}
    assert {tuple(ids) for ids in drawn[0]} == {("05", "03"), ("01", "03")}  # CC, then MLO
    assert {tuple(ids) for ids in drawn[1]} == {("00",), ("04",)}  # one kind: one view
    assert {tuple(ids) for ids in drawn[2]} == {("02",)}
    for number, ids in ((0, "05"), (1, "00")):  # 60 fair draws: outside 15 to 45 once in 9,000 tries
        assert 15 <= sum(ids in views for views in drawn[number]) <= 45
    assert dataset[(0, 1, 4)]["view_id"].tolist() == [0, 1] and dataset[(2, 1, 4)]["view_id"].tolist() == [1]
    other = MammogramDataset(BREASTS, small, unit="breast", draw=True, seed=4)
    assert [[which(v, images) for v in other[(0, *place)]["image"]] for place in places] != drawn[0]


def test_each_view_is_augmented_by_itself(small):  # A01
    calls = []

    def record(image, seed):
        calls.append(seed)
        return image

    dataset = MammogramDataset(BREASTS, small, record, unit="breast", seed=11)
    for item in ((0, 0, 0), (0, 2, 5), (0, 5, 2), 0):
        dataset[item]
    assert calls[:3] == calls[9:] and len(set(calls[:9])) == 9 and all(0 <= seed < 2**32 for seed in calls)


def test_auxiliary_targets_come_with_each_item(small):
    dataset = MammogramDataset(BREASTS, small, aux=("birads", "difficult", "view"))
    targets = [[dataset[row][name].item() for name in ("birads", "difficult", "view")] for row in range(6)]
    nan = np.nan
    expected = [[0, 0, 1], [2, 1, 0], [nan, 0, 0], [0, 0, 0], [1, 1, 0], [nan, 1, nan]]
    np.testing.assert_array_equal(targets, expected)
    sample = dataset[0]
    assert sample["birads"].dtype == torch.float32 and sample["birads"].shape == ()
    # One a breast: what is missing in one image is known from the others; what they disagree on is not.
    dataset = MammogramDataset(BREASTS, small, unit="breast", aux=("difficult", "birads"))
    targets = [[dataset[number][name].item() for name in ("birads", "difficult")] for number in range(3)]
    np.testing.assert_array_equal(targets, [[0, 0], [nan, 1], [nan, 1]])
    with pytest.raises(ValueError, match="no column density"):
        MammogramDataset(BREASTS, small, aux=("density",))


def test_a_batch_of_breasts_is_padded_with_zeros_and_a_mask(small):
    dataset = MammogramDataset(BREASTS, small, unit="breast", aux=("birads",))
    batch = collate([dataset[number] for number in (2, 0, 1)])
    assert batch["image"].shape == (3, 3, 1, *SHAPE) and batch["image"].dtype == torch.float32
    assert batch["view_mask"].tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    assert batch["view_id"].tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 0]]
    for place, number in enumerate((2, 0, 1)):
        n = int(batch["view_mask"][place].sum())
        assert torch.equal(batch["image"][place, :n], dataset[number]["image"])
        assert (batch["image"][place, n:] == 0).all()
    assert batch["item"].tolist() == [2, 0, 1] and batch["birads"].dtype == torch.float32
    single = collate([MammogramDataset(BREASTS, small)[row] for row in (0, 1)])
    assert set(single) == {"image", "cancer", "item"} and single["image"].shape == (2, 1, *SHAPE)


@pytest.mark.parametrize("unit", ["image", "breast"])
def test_items_asked_for_together_are_those_asked_for_one_by_one(small, unit):
    dataset = MammogramDataset(BREASTS, small, augment.build("heavy", *SHAPE), unit, aux=("birads",), draw=False)
    asked = [(2, 5, 0), (0, 5, 1), (1, 5, 2), (0, 6, 3)]
    together, one_by_one = collate(dataset.__getitems__(asked)), collate([dataset[item] for item in asked])
    assert list(together) == list(one_by_one)
    for name, values in one_by_one.items():
        assert torch.equal(together[name].nan_to_num(9), values.nan_to_num(9)) and together[name].dtype == values.dtype
    assert together["image"].is_contiguous()
    samples = dataset.__getitems__(asked)
    assert collate(samples)["image"].data_ptr() == samples[0]["image"].data_ptr()  # written once, and not moved
    assert torch.equal(collate(samples[1:])["image"], collate([dataset[item] for item in asked[1:]])["image"])


def test_a_worker_writes_a_batch_to_memory_that_it_shares(small):
    dataset = MammogramDataset(BREASTS, small)

    def stay(samples):
        return {**collate(samples), "shared": torch.tensor(isinstance(samples.images, Lent))}

    for workers, shared in (0, False), (1, True):
        loader = DataLoader(dataset, 3, num_workers=workers, collate_fn=stay, worker_init_fn=worker_init)
        assert [bool(batch["shared"]) for batch in loader] == [shared] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_items_of_a_worker_stay_what_they_are_however_they_are_collated(small, workers):
    """One by one, as a dataset around this one asks for them, and without this module's collate, which would lend memory."""
    dataset = MammogramDataset(BREASTS, small)
    expected = [dataset[number]["image"] for number in range(len(dataset))]
    found = {
        "around": [
            image for batch in DataLoader(ConcatDataset([dataset]), 3, num_workers=workers) for image in batch["image"]
        ],
        "no batches": [sample["image"] for sample in list(DataLoader(dataset, None, num_workers=workers))],
        "listed": [
            sample["image"]
            for batch in list(DataLoader(dataset, 2, num_workers=workers, collate_fn=list))
            for sample in batch
        ],
    }
    for images in found.values():
        assert len(images) == len(expected) and all(torch.equal(a, b) for a, b in zip(images, expected, strict=True))


def test_groups_keep_their_members_in_order():
    rng = np.random.default_rng(0)
    codes, _ = pd.factorize(rng.integers(0, 9, 50))
    members = grouped(codes)
    for group, row in enumerate(members):
        found = row[row >= 0].tolist()
        assert found == [i for i, code in enumerate(codes) if code == group]
        assert (row[len(found) :] == -1).all()
    assert grouped(np.zeros(0, np.int64)).shape == (0, 0)
