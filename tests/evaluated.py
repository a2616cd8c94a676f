"""Runs as training leaves them, as far as an evaluation reads them, and scores of breasts."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from rsnakit import data
from rsnakit.runs import OOF_COLUMNS


def make_run(folder: Path, table: pd.DataFrame, seed: int = 0, by_breast: bool = False, **settings) -> Path:
    """A run of two folds as training leaves it, as far as an evaluation reads it, with scores that know a little."""
    rng = np.random.default_rng(seed)
    known = {"train": {"epochs": 1}, "data": data.fingerprint(table), "debug": False, "is_demo": True}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"settings": {**known, **settings}}))
    rows = table.assign(fold=data.make_folds(table, 2, 0))
    rows = data.per_breast(rows) if by_breast else rows
    rows = rows.assign(score=(0.3 * rows["cancer"] + 0.7 * rng.random(len(rows))).round(3))[OOF_COLUMNS]
    for fold, part in rows.groupby("fold"):
        (folder / f"fold{fold}").mkdir()
        part.to_csv(folder / f"fold{fold}" / "oof.csv", index=False)
        (folder / f"fold{fold}" / "best.safetensors").touch()
        model = {"model": {}, "epoch": 1, "oof_rows": len(part)}
        (folder / f"fold{fold}" / "model.json").write_text(json.dumps(model))
    return folder


def breasts_of(seed: int, n: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    cancer = (np.arange(n) % 4 == 0) * 1
    frame = pd.DataFrame({"patient_id": [f"{i // 2}" for i in range(n)], "laterality": ["L", "R"] * (n // 2)})
    return frame.assign(
        cancer=cancer, fold=np.arange(n) // 2 % 3, score=0.35 * cancer + 0.65 * rng.random(n), n_images=2
    )


def drawn_breasts(n_patients: int = 200, seed: int = 0) -> pd.DataFrame:
    """Two breasts a patient, a tenth with cancer, and scores that overlap and tie."""
    rng = np.random.default_rng(seed)
    cancer = (rng.random(2 * n_patients) < 0.1).astype(int)
    return pd.DataFrame(
        {
            "patient_id": np.repeat(np.arange(n_patients), 2).astype(str),
            "laterality": np.tile(["L", "R"], n_patients),
            "cancer": cancer,
            "score": np.round(np.clip(rng.normal(0.3 + 0.3 * cancer, 0.2), 0, 1), 2),
        }
    )
