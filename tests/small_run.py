"""A run as training leaves it, written by hand: small models of some folds, and scores that a test chooses."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from rsnakit.models import ModelConfig, build_model, save_model
from rsnakit.runs import OOF_COLUMNS
from rsnakit.store import Store

TINY = ModelConfig(backbone="test_efficientnet", weights="none", pooling="avg", stem_stride=(1,))


def write_run(
    folder: Path, table: pd.DataFrame, store: Store, fold_of: Mapping[str, int], config: ModelConfig = TINY
) -> Path:
    """A run's folder with a model and scores for each of the folds named.

    Args:
        table: images; those of patients that `fold_of` does not name were held out by no fold.
        fold_of: patient_id to fold.
    """
    folder.mkdir(parents=True)
    settings = {"preprocess": store.manifest["preprocess"], "train": {"epochs": 1}, "is_demo": True, "debug": False}
    (folder / "config.json").write_text(json.dumps({"settings": settings}))
    index = store.index.set_index("image_id")["status"]
    rows = table[table["patient_id"].isin(fold_of.keys()) & (table["image_id"].map(index) == "ok")]
    if config.views != "none":
        rows = rows.drop_duplicates("breast_id").assign(image_id="")
    rng = np.random.default_rng(0)
    rows = rows.assign(fold=rows["patient_id"].map(fold_of), score=rng.uniform(0.01, 0.99, len(rows)).round(4))
    for fold, part in rows.groupby("fold"):
        torch.manual_seed(fold)
        model = build_model(config)
        torch.nn.init.uniform_(model.head.weight, -0.5, 1)  # as if trained; most of it speaks for cancer
        more = {"preprocess": store.manifest["preprocess"], "prior": 0.3, "epoch": 1, "oof_rows": len(part)}
        save_model(model, folder / f"fold{fold}", **more, select="last")
        part[OOF_COLUMNS].to_csv(folder / f"fold{fold}" / "oof.csv", index=False)
        pd.DataFrame({"epoch": [1]}).to_csv(folder / f"fold{fold}" / "history.csv", index=False)
    return folder


def with_settings(store: Store, **changes) -> Store:
    """The same store, said to be prepared with other settings."""
    other = Store(store.path)
    other.manifest = {**store.manifest, "preprocess": {**store.manifest["preprocess"], **changes}}
    return other


BREASTS = dataclasses.replace(TINY, views="attention")
