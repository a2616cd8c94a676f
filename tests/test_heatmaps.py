"""Heat maps: Grad-CAM by its definition on all the kit's kinds of model, and each by the model of the fold that held out."""

import copy

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_run import BREASTS, with_settings, write_run
from torch import nn

from rsnakit import heatmaps, models, runs
from rsnakit.models import ModelConfig, build_model


class Brightness(nn.Module):
    """A backbone whose two maps are known: the mean of each 8 x 8 pixels, and one less it."""

    num_features = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = F.avg_pool2d(x, 8)
        return torch.cat([mean, 1 - mean], 1)


def brightness_model(weights: tuple[float, float], pooling: str = "avg") -> nn.Module:
    """A model whose logit is known: the weighted sum of the pooled maps of `Brightness`."""
    model = build_model(ModelConfig(backbone="test_efficientnet", weights="none", pooling=pooling))
    model.backbone, model.head = Brightness(), nn.Linear(2, 1)
    model.mean.zero_(), model.std.fill_(1)
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([weights]))
    return model


def with_square() -> np.ndarray:
    """A dark image with a bright square that fills one of the maps' places: rows 16 to 23, columns 8 to 15."""
    image = np.zeros((64, 32), np.uint16)
    image[16:24, 8:16] = 4095
    return image


@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_a_planted_square_is_where_the_heat_is(pooling):
    (heat,) = heatmaps.heatmap(brightness_model((2.0, 0.0), pooling), [with_square()])
    y, x = np.mgrid[:64, :32]
    # enlarged from places of 8 x 8 pixels by straight lines: a tent over the square's centre, at 19.5 and 11.5
    tent = np.clip(1 - abs(y - 19.5) / 8, 0, 1) * np.clip(1 - abs(x - 11.5) / 8, 0, 1)
    np.testing.assert_allclose(heat, tent / tent.max(), atol=1e-6)
    assert heat.dtype == np.float32 and heat.shape == (64, 32) and heat.max() == 1


def test_what_speaks_against_cancer_is_not_shown():
    assert not heatmaps.heatmap(brightness_model((-2.0, 0.0)), [with_square()]).any()  # zeros, and no NaN
    # brightness for it and darkness against it: 2 m - (1 - m) is above zero in the square alone
    (heat,) = heatmaps.heatmap(brightness_model((2.0, -1.0)), [with_square()])
    assert np.argwhere(heat > 0.99).mean(0) == pytest.approx([19.5, 11.5]) and (heat[40:] == 0).all()


def by_hand(
    model: nn.Module, images: np.ndarray, view_id: list[int] | None, grids: list[tuple[int, int]]
) -> np.ndarray:
    """Grad-CAM from its paper (equations 1 and 2), with hooks on the pool and a backward pass through the whole model."""
    model, seen = copy.deepcopy(model).eval(), []
    model.pool.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = torch.from_numpy(images / np.float32(4095))[:, None]
    logits = model(x)["cancer"] if view_id is None else model(x[None], None, torch.tensor([view_id]))["cancer"]
    gradients = torch.autograd.grad(logits.sum(), seen)
    left, right, top, bottom = model.config.input_pad or (0, 0, 0, 0)
    height, width = images.shape[1] + top + bottom, images.shape[2] + left + right
    heat = np.zeros((len(images), height, width))
    for maps, gradient, grid in zip(seen, gradients, grids, strict=True):
        maps, gradient = (a.detach().double().numpy().reshape(*a.shape[:2], *grid) for a in (maps, gradient))
        for number in range(len(images)):
            weights = [gradient[number, k].mean() for k in range(maps.shape[1])]
            cam = np.maximum(sum(w * a for w, a in zip(weights, maps[number], strict=True)), 0)
            # the sum over a level's places is what it gave the logit, so each level counts as it has places
            heat[number] += grid[0] * grid[1] * cv2.resize(cam, (width, height), interpolation=cv2.INTER_LINEAR)
    heat = heat[:, top : height - bottom, left : width - right]
    return heat / (heat.max((1, 2), keepdims=True) if view_id is None else heat.max())


MODELS = {  # settings, views, rows and columns of each level's maps for an image of 128 x 64
    "max": (dict(pooling="max"), None, [(4, 2)]),
    "gem": (dict(pooling="gem"), None, [(4, 2)]),
    "attention": (dict(pooling="attention"), None, [(4, 2)]),
    "neck": (dict(pooling="avg", neck="fpn_scse", neck_channels=8), None, [(16, 8), (8, 4), (4, 2)]),
    "padded": (dict(pooling="avg", input_pad=(32, 0, 64, 32)), None, [(7, 3)]),
    "breast": (dict(views="attention"), [0, 1, 1], [(4, 2)]),
    "breast by max": (dict(views="max", pooling="avg"), [0, 1, 1], [(4, 2)]),
}


def noise(n: int, height: int = 128, width: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 4096, (n, height, width), dtype=np.uint16)


def unsettled(config: ModelConfig) -> nn.Module:
    """A model as if it were trained: what begins at zero is not."""
    torch.manual_seed(0)
    model = build_model(config)
    for name, parameter in model.named_parameters():
        if name.startswith(("head", "neck", "pool", "views")):
            nn.init.normal_(parameter, std=0.3) if parameter.ndim else None
    return model


@pytest.mark.parametrize("name", MODELS)
def test_it_is_grad_cam_by_its_definition(name):
    settings, view_id, grids = MODELS[name]
    model, images = unsettled(ModelConfig(backbone="test_efficientnet", weights="none", **settings)), noise(3)
    found = heatmaps.heatmap(model, images, view_id)
    np.testing.assert_allclose(found, by_hand(model, images, view_id, grids), atol=1e-4)
    assert found.shape == images.shape and found.min() >= 0 and found.max() == 1
    if view_id is None:
        assert (found.max((1, 2)) == 1).all()
    alone = heatmaps.heatmap(model, [images[1] / np.float32(4095)], view_id and view_id[1:2])
    if view_id is None:  # floats are taken as they are, and an image does not depend on the others
        np.testing.assert_allclose(alone[0], found[1], atol=1e-4)


def test_a_transformers_tokens_are_put_back_in_their_places():
    model = unsettled(ModelConfig(backbone="test_vit", weights="none", pooling="avg"))
    size = model.backbone.patch_embed.img_size
    images, grid = noise(2, *size), model.backbone.patch_embed.grid_size
    np.testing.assert_allclose(heatmaps.heatmap(model, images), by_hand(model, images, None, [grid]), atol=1e-4)


@pytest.mark.parametrize(
    ("places", "height", "width", "expected"),
    [
        (128, 256, 128, (16, 8)),
        (136, 272, 128, (17, 8)),
        (100, 160, 160, (10, 10)),
        (8, 256, 32, (8, 1)),
        (7, 112, 16, (7, 1)),
    ],
)
def test_the_shape_of_so_many_tokens_is_the_images(places, height, width, expected):
    assert heatmaps._grid(places, height, width) == expected


def test_the_model_stays_as_it_was():
    model, images = unsettled(ModelConfig(backbone="test_efficientnet", weights="none")).train(), noise(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    heatmaps.heatmap(model, images)
    assert model.training and all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


def test_models_and_maps_that_show_nothing_are_refused():
    with pytest.raises(ValueError, match="Linear has no maps that are known; expected a model of build_model"):
        heatmaps.heatmap(nn.Linear(2, 1), noise(1))
    model = build_model(ModelConfig(backbone="test_efficientnet", weights="none"))
    with pytest.raises(ValueError, match=r"the maps of an image of \(32, 32\) are of one place, which shows nothing"):
        heatmaps.heatmap(model, noise(1, 32, 32))


@pytest.fixture(scope="module")
def fold_of(table) -> dict[str, int]:
    """Two folds of all patients but two, whom no trained fold held out."""
    patients = sorted(table["patient_id"].unique())
    return {patient: 2 * (number % 2) for number, patient in enumerate(patients[:-2])}


def test_each_image_is_seen_by_the_model_that_never_saw_its_patient(tmp_path, table, store, fold_of):
    run = write_run(tmp_path / "run", table, store, fold_of)
    blank = store.index.loc[store.index["status"] != "ok", "patient_id"].iloc[0]
    last = sorted(table["patient_id"].unique())[-1]
    table = table[table["patient_id"].isin([blank, last, *list(fold_of)[:3]])]
    maps = heatmaps.OutOfFold(run, table, store)
    found = maps.of(table["image_id"])
    ok = set(store.index.loc[store.index["status"] == "ok", "image_id"])
    expected = table[table["patient_id"].isin(fold_of.keys()) & table["image_id"].isin(ok)]
    assert set(found) == set(expected["image_id"]) and not set(table["image_id"]) <= ok  # a blank one is left out
    by_fold = {fold: models.load_model(run / f"fold{fold}") for fold in (0, 2)}
    for row in expected.groupby("patient_id").head(1).itertuples():
        image = store[int(store.rows_of([row.image_id])[0])]
        right, wrong = (
            heatmaps.heatmap(by_fold[f], [image])[0] for f in (fold_of[row.patient_id], 2 - fold_of[row.patient_id])
        )
        np.testing.assert_allclose(found[row.image_id], right, atol=1e-3)  # OutOfFold has another memory format
        assert not np.allclose(right, wrong, atol=0.1)
    some = expected["image_id"].iloc[[0, -1]].tolist()
    assert list(maps.of(some)) == some and maps.of(["not there"]) == {}
    with pytest.raises(KeyError):
        maps.model_of(last)


def test_a_model_of_breasts_is_shown_all_views_though_one_is_asked_for(tmp_path, table, store, fold_of):
    maps = heatmaps.OutOfFold(write_run(tmp_path / "run", table, store, fold_of, BREASTS), table, store)
    image_id = table.loc[table["patient_id"] == next(iter(fold_of)), "image_id"].iloc[0]
    row = table[table["image_id"] == image_id].iloc[0]
    same = table[table["breast_id"] == row["breast_id"]]
    everything = maps.of(same["image_id"])
    assert list(maps.of([image_id])) == [image_id] and len(everything) > 1
    np.testing.assert_array_equal(maps.of([image_id])[image_id], everything[image_id])
    assert max(heat.max() for heat in everything.values()) == 1
    images = [store[int(r)] for r in store.rows_of(everything)]
    kinds = [0 if "CC" in view else 1 for view in same.set_index("image_id").loc[list(everything), "view"]]
    expected = heatmaps.heatmap(maps.model_of(row["patient_id"]), images, kinds)
    np.testing.assert_array_equal(np.stack(list(everything.values())), expected)


def test_a_store_prepared_in_another_way_is_refused(tmp_path, table, store, fold_of):
    run = write_run(tmp_path / "run", table, store, fold_of)
    with pytest.raises(
        runs.RunError, match=r"not the images that run was trained on: window='none' \(trained with 'first'\)"
    ):
        heatmaps.OutOfFold(run, table, with_settings(store, window="none"))
