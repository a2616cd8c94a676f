"""rsnakit.feeding and rsnakit.stretches: the training's own loader is timed, over any store; a stretch of training waits."""

import dataclasses
import math
import time
from multiprocessing import active_children

import numpy as np
import pytest
import torch

from rsnakit import data, feeding
from rsnakit.engine import LoopConfig, TrainConfig
from rsnakit.measuring import Workload
from rsnakit.models import ModelConfig
from rsnakit.store import FORMATS, Store
from rsnakit.stretches import Stretch, StretchError
from rsnakit.trainer import Trainer

MODEL = ModelConfig(backbone="test_efficientnet", weights="none")
TRAIN = TrainConfig(batch_size=4)


@pytest.fixture
def images(table, store):
    return data.usable(table, store)[0]


def test_a_row_each_format_and_number_of_workers(store, images):
    found = feeding.rates(images, store.path, TRAIN, workers=(0, 1), seconds=0.05)
    assert list(found.columns) == list(feeding.COLUMNS)
    assert found[["store_format", "workers"]].to_numpy().tolist() == [[name, n] for name in FORMATS for n in (0, 1)]
    assert (found["skipped"] == "").all()
    assert ((found["low"] > 0) & (found["low"] <= found["images_s"]) & (found["images_s"] <= found["high"])).all()
    assert not active_children()


@pytest.mark.parametrize("count", [4, 2])
def test_rates_are_images_over_time(store, images, monkeypatch, count):
    """A store that takes 5 ms an image: no more than 200 a second, and half as many breasts of two images."""
    real = Store.__getitem__

    def slow(self, row):
        time.sleep(0.005)
        return real(self, row)

    monkeypatch.setattr(Store, "__getitem__", slow)
    views = "none" if count == 4 else "mean"
    train = dataclasses.replace(TRAIN, batch_size=count, augment="none")
    model = dataclasses.replace(MODEL, views=views)
    found = feeding.rates(images, store, train, ("block8",), (0,), 0.3, model_config=model)
    most = 200 if views == "none" else 100  # a breast has one image of each of at least two views
    assert most / 8 < found["images_s"].iloc[0] <= most


def test_the_loader_is_that_of_training(store, images):
    """All that a loader can be given, but the order and the patience with workers."""
    trainer = Trainer(images, store, MODEL, TRAIN, LoopConfig(), "cpu", "fp32", 2, 0, {}, None)
    ours, its = feeding.loader(images, store, TRAIN, MODEL, 2, "cpu"), trainer.train_loader
    names = (
        "num_workers", "pin_memory", "collate_fn", "worker_init_fn", "persistent_workers", "prefetch_factor", "drop_last",
        "multiprocessing_context",
    )  # fmt: skip
    assert {name: getattr(ours, name) for name in names} == {name: getattr(its, name) for name in names}
    assert ours.prefetch_factor == feeding.AHEAD
    a, b = ours.dataset[(3, 0, 5)], its.dataset[(3, 0, 5)]
    assert a.keys() == b.keys() and a["image"].shape == b["image"].shape
    assert (ours.dataset.draw and repr(ours.dataset.augment) == repr(its.dataset.augment)) or ours.dataset.augment


def test_a_store_in_another_format_holds_the_same_images(store, images, tmp_path):
    sample = images.head(5)
    for name in ("raw16", "png16", "png8"):
        other = feeding.written(sample, store, name, tmp_path / name)
        assert other.manifest["format"] == name and other.index["image_id"].tolist() == sample["image_id"].tolist()
        error = 0 if name != "png8" else 8
        for new, old in enumerate(store.rows_of(sample["image_id"])):
            assert np.abs(other[new].astype(int) - store[int(old)]).max() <= error


def test_what_cannot_be_written_is_skipped(store, images, monkeypatch):
    real = feeding.write_image

    def full(path, image_format, *rest):
        if image_format == "raw16":
            raise OSError(28, "No space left on device")
        real(path, image_format, *rest)

    monkeypatch.setattr(feeding, "write_image", full)
    found = feeding.rates(images, store, TRAIN, ("raw16", "block8"), (0,), 0.05).set_index("store_format")
    assert "No space left on device" in found.loc["raw16", "skipped"] and math.isnan(found.loc["raw16", "images_s"])
    assert found.loc["block8", "images_s"] > 0


def test_a_loader_that_fails_is_skipped_with_the_reason(store, images, monkeypatch):
    def broken(self, row):
        raise RuntimeError("a decoder fails")

    monkeypatch.setattr(feeding, "written", lambda *_: store)
    monkeypatch.setattr(Store, "__getitem__", broken)
    found = feeding.rates(images, store, TRAIN, ("block8",), (0, 1), 0.05)
    assert found["skipped"].eq("RuntimeError: a decoder fails").all() and found["images_s"].isna().all()


def test_workers_that_would_use_up_the_memory_are_not_begun(store, images, monkeypatch):
    """Two batches ahead for each: of 4 images, or 4 breasts of two views, of 64x32 float32."""
    image = 64 * 32 * 4
    for views, most in (("none", 8), ("mean", 16)):
        model = dataclasses.replace(MODEL, views=views)
        monkeypatch.setattr(feeding.device_memory, "available", lambda most=most: most * image)
        found = feeding.rates(images, store, TRAIN, ("block8",), (0, 1, 2), 0.05, model_config=model)
        assert (found["images_s"] > 0).tolist() == [True, True, False]
        assert "loaded ahead would take" in found["skipped"].iloc[2]


def test_ctrl_c_leaves_no_workers(store, images, monkeypatch):
    """However long a notebook keeps the error and its frames."""
    begun = []

    def stopped(batches):
        begun.append(len(active_children()))
        if len(begun) == 3:
            raise KeyboardInterrupt
        return next(batches)

    monkeypatch.setattr(feeding, "next", stopped, raising=False)
    with pytest.raises(KeyboardInterrupt) as error:
        feeding.rates(images, store, TRAIN, ("block8",), (1,), 0.05)
    assert begun[-1] == 1 and error.value.__traceback__ is not None and not active_children()


def test_what_time_does_not_suffice_for_says_so(store, images):
    found = feeding.rates(images, store, TRAIN, workers=(0, 1), seconds=0.05, limit_s=0)
    assert (found["images_s"] > 0).tolist() == [True] + [False] * 7
    assert (found["skipped"].iloc[1:] == feeding.NO_TIME).all()


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, (0, 1)), (2, (0, 1, 2)), (4, (0, 1, 2, 4)), (12, (0, 1, 2, 4, 8, 12))]
)
def test_workers_up_to_the_cores_are_tried(cores, counts):
    assert feeding.worker_counts(cores) == counts


@pytest.mark.parametrize("unit", ["image", "breast"])
def test_a_sample_has_both_classes_and_whole_breasts(store, images, monkeypatch, unit):
    monkeypatch.setattr(feeding, "SAMPLE", 10)
    rare = images.assign(cancer=(images["breast_id"] == images["breast_id"].iloc[-1]).astype(int))
    sample = feeding.sampled(rare, store, unit)
    assert sample["cancer"].nunique() == 2 and len(sample) <= 10
    if unit == "breast":
        counts = images["breast_id"].value_counts()
        assert (sample["breast_id"].value_counts() == counts[sample["breast_id"].unique()]).all()
    assert feeding.sampled(images[images["cancer"] == 0], store, unit)["cancer"].eq(0).all()


def test_nothing_to_load_and_unknown_formats_are_refused(store, images):
    with pytest.raises(ValueError, match="no images"):
        feeding.rates(images.head(0), store, TRAIN)
    with pytest.raises(ValueError, match="'jpeg': expected one of block8"):
        feeding.rates(images, store, TRAIN, ("jpeg",))


def test_a_repeated_table_has_other_breasts_each_time(images):
    twice = feeding.repeated(images, 2)
    assert len(twice) == 2 * len(images) and twice["breast_id"].nunique() == 2 * images["breast_id"].nunique()


# ---- stretches


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stretch_trains_waits_and_ends(store, images, workers):
    """In earnest; what the rates are is the machine's, that they are of whole rounds is not."""
    workload = Workload(images, store.path, MODEL, TRAIN, LoopConfig(), "cpu")
    with Stretch(workload, "fp32", workers) as stretch:
        stretch.begin(120)
        begun = time.monotonic()
        rates = [stretch.round(0.5), stretch.round(0.5)]
        assert min(rates) > 0 and time.monotonic() - begun >= 1.0
        assert stretch.peak_mb > 0 or math.isnan(stretch.peak_mb)
    assert not active_children()


@pytest.mark.slow
def test_a_stretch_that_cannot_begin_says_why(store, images):
    fixed = dataclasses.replace(MODEL, backbone="vit_tiny_patch16_224")
    workload = Workload(images, store.path, fixed, TRAIN, LoopConfig(), "cpu")
    with Stretch(workload, "fp32", 0) as stretch, pytest.raises(StretchError, match="fails on an input"):
        stretch.begin(120)
    with Stretch(workload, "fp32", 0) as stretch, pytest.raises(StretchError, match="not done after 0 s"):
        stretch.begin(0.01)
    assert not active_children() and torch.get_num_threads() >= 1
