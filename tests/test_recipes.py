"""The files of params/: known, in range, and what they promise; and each recipe trains."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
import timm
import yaml

from rsnakit import data, distributed, engine, models, params, runs
from rsnakit.demo import DemoConfig
from rsnakit.env import RunConfig
from rsnakit.infer import InferConfig
from rsnakit.models import ModelConfig
from rsnakit.preprocess import BuildConfig, PreprocessConfig
from rsnakit.recipe import LoopConfig, TrainConfig

FILES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "params").glob("*.yaml"))}
PLACES = ("kaggle_t4x2", "colab_a100", "paperspace_6h", "cpu")
WINNERS = ("first_place", "second_place", "sixth_place", "seventh_place", "sixteenth_place")
RECIPES = ("demo", "baseline", "views", *WINNERS)
CONFIGS = (RunConfig, DemoConfig, PreprocessConfig, BuildConfig, ModelConfig, TrainConfig, LoopConfig, InferConfig)
DECIDES_NO_RESULT = (RunConfig, LoopConfig, BuildConfig)


def values_of(*names: str) -> dict:
    """The settings of files composed as papermill does: later ones win."""
    return {key: value for name in names for key, value in yaml.safe_load(FILES[name].read_text("utf-8")).items()}


def configs(*names: str) -> dict[type, object]:
    return dict(zip(CONFIGS, params.from_mapping(values_of(*names), *CONFIGS), strict=True))


def test_there_is_a_file_for_each():
    assert set(FILES) == {*PLACES, *RECIPES}


@pytest.mark.parametrize("name", FILES)
def test_every_parameter_file_is_known_and_in_range(name):
    """And nothing in it is turned into something else: 1e-4 without a point is text, off without quotes is false."""
    values, given = values_of(name), {}
    for config in configs(name).values():
        given |= {key: value for key, value in vars(config).items() if key in values}
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    assert given == values
    assert {key: type(value) for key, value in given.items()} == {key: type(value) for key, value in values.items()}


@pytest.mark.parametrize("name", [name for name in RECIPES if "backbone" in values_of(name)])
def test_weights_are_in_timms_list(name):
    model = configs(name)[ModelConfig]
    known = timm.list_pretrained() if model.weights == "hub" else timm.list_models()
    assert model.backbone in known


@pytest.mark.parametrize("place", PLACES)
def test_a_place_sets_what_decides_no_result(place):
    fields = {field.name for config in DECIDES_NO_RESULT for field in dataclasses.fields(config)}
    assert set(values_of(place)) <= fields - {"fold", "debug", "run", "data_dir", "store_format"}


def name_of_run(found: dict) -> str:
    settings = runs.settings_of(found[PreprocessConfig], found[ModelConfig], found[TrainConfig], "data", False, False)
    return runs.run_name(settings)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("place", PLACES)
def test_on_top_of_a_recipe_a_place_changes_no_result(recipe, place):
    alone, there = configs(recipe), configs(recipe, place)
    for config in (PreprocessConfig, ModelConfig, TrainConfig, InferConfig):
        assert there[config] == alone[config]
    assert name_of_run(there) == name_of_run(alone)
    for key, value in values_of(place).items():
        assert any(getattr(there[config], key, None) == value for config in DECIDES_NO_RESULT)


@pytest.mark.parametrize("recipe", WINNERS)
@pytest.mark.parametrize("place", PLACES)
def test_a_winners_step_is_the_same_on_each_number_of_gpus(recipe, place):
    """Its batches are told, and can be shared among the place's processes."""
    found = configs(recipe, place)
    accumulate, n_procs = found[TrainConfig].accumulate, found[LoopConfig].n_procs
    assert accumulate and distributed.batches_a_step(accumulate, n_procs) == accumulate


def test_first_place_is_what_its_write_up_tells():
    found = configs("first_place")
    train, model, pixels = found[TrainConfig], found[ModelConfig], found[PreprocessConfig]
    assert (pixels.height, pixels.width, pixels.window) == (2048, 1024, "first")
    assert (model.pooling, model.dropout, model.drop_path, model.aux) == ("max", 0.5, 0.2, ())
    assert train.batch_size * train.accumulate == 8
    assert train.lr == 3e-3 and train.lr * train.lr_end == pytest.approx(5e-5, rel=1e-4)
    assert train.epochs * train.warmup == pytest.approx(4, rel=1e-4)
    assert (train.optimizer, train.ema_decay, train.positive_target) == ("sgd", 0.9998, 0.9)


def test_first_place_has_a_positive_in_every_step_of_8():
    """On as many images as a side of the competition has: 2.12 % of 54,706, three of four folds."""
    from rsnakit.samplers import BalancedSampler

    train = configs("first_place")[TrainConfig]
    labels = [int(i % 47 == 0) for i in range(41_030)]
    sampler = BalancedSampler(
        labels, train.negatives_per_positive, train.batch_size, train.min_positives, 0, train.accumulate
    )
    rows = iter(sampler)
    positives = [sum(labels[next(rows)[0]] for _ in range(sum(sizes))) for sizes in sampler.steps]
    assert min(positives) >= 1 and sum(positives) == pytest.approx(len(labels) * 46 / 47 / 7, rel=0.01)


def test_second_place_is_what_its_write_up_tells():
    found = configs("second_place")
    train, model, pixels = found[TrainConfig], found[ModelConfig], found[PreprocessConfig]
    assert (pixels.height, pixels.width, pixels.crop) == (1536, 1536, False)
    assert set(model.aux) == {"birads", "density", "difficult", "view", "invasive"} and train.aux_weight == 0.1
    assert train.batch_size * train.accumulate == 192 and train.negatives_per_positive == 0
    assert (train.optimizer, train.lr, train.weight_decay, train.epochs) == ("adamw", 1.5e-4, 0.05, 24)
    assert train.ema_decay > 0 and train.augment == "second_place"
    assert found[InferConfig].tta == "diagonal"


@pytest.mark.parametrize("recipe", WINNERS)
def test_a_recipe_builds_a_model_that_takes_its_images(recipe):
    found = configs(recipe)
    pixels = found[PreprocessConfig]
    model = models.build_model(dataclasses.replace(found[ModelConfig], weights="none"))
    engine.check_size(model, (pixels.height, pixels.width))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", WINNERS)
def test_a_recipe_trains(recipe, store, table, tmp_path):
    """Two steps on the shrunken demo, with all else as the file has it; and the same command goes on, here to nothing more."""
    found = configs(recipe, "cpu")
    model = dataclasses.replace(found[ModelConfig], weights="none")
    few = {"negatives_per_epoch": 4} if found[TrainConfig].negatives_per_positive else {}
    train = dataclasses.replace(found[TrainConfig], epochs=2, n_folds=2, **few)
    run = dataclasses.replace(found[RunConfig], fold="0", num_workers=0)
    loop = dataclasses.replace(found[LoopConfig], n_procs=1)
    pixels = PreprocessConfig(**store.manifest["preprocess"])
    settings = runs.settings_of(pixels, model, train, data.fingerprint(table), is_demo=True, debug=False)
    folder = runs.open_run(tmp_path, "", settings)
    for _ in range(2):
        summary = engine.fit_folds(table, store, model, train, run, folder, loop)
        assert summary["folds"] == [0]
    history = pd.read_csv(folder / "fold0" / "history.csv")
    assert len(history) == 2 and history[["train_loss", "valid_loss", "grad_norm"]].notna().all(axis=None)
    assert (history["grad_norm"] > 0).all() and (history["skipped_steps"] == 0).all()
