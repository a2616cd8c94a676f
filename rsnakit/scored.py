"""What is known of a test set's images so far, and the report that is made of it."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from rsnakit import data
from rsnakit.ensemble import Ensemble, Pass
from rsnakit.ledger import Record
from rsnakit.targets import view_ids

REPORT_COLUMNS = [
    "prediction_id", "patient_id", "laterality", "image_id", "status", "score", "score_of", "seconds", "reason",
]  # fmt: skip
NOT_FINITE = "the model gave no finite score"
NOT_CLASSIFIED = "the model failed over its breast, or gave no finite score"
BREASTS = 512  # pooled at a time


class Scored:
    """What is known of a table's images so far, in arrays with a row each.

    Attributes:
        status: (n,) "" where an image has not been looked at.
        asked, used: (n, passes) bool: passes that it was shown to, and those that gave something finite.
        shape: (passes, channels) of an image's features, where the models see breasts; else None.
    """

    def __init__(self, table: pd.DataFrame, ensemble: Ensemble, passes: Sequence[Pass]) -> None:
        n, self.table, self.ensemble, self.passes = len(table), table, ensemble, tuple(passes)
        self.status, self.reason = np.full(n, "", dtype=object), np.full(n, "", dtype=object)
        self.score, self.seconds = np.zeros(n), np.zeros(n)
        self.asked, self.used = np.zeros((n, len(passes)), bool), np.zeros((n, len(passes)), bool)
        channels = next(iter(ensemble.models.values())).channels
        self.shape = (len(passes), channels) if ensemble.by_breast else None
        # Memory is taken as it is filled.
        self.features = np.zeros((n, *self.shape), np.float32) if self.shape else None

    def records(self, rows: np.ndarray, batch: Mapping, outputs: Mapping[Pass, np.ndarray]) -> list[Record]:
        """What a batch, and what `Scorer.run` says of it, say of the table's rows."""
        errors = batch.get("errors", {})
        places = [self.passes.index(each) for each in outputs]
        asked = sum(1 << place for place in places)
        whole = np.stack([*outputs.values()], 1)  # (B, passes) or (B, passes, C)
        finite = np.isfinite(whole).reshape(*whole.shape[:2], -1).all(2)
        found = []
        for i, row in enumerate(rows):
            status, reason, score, features = batch["status"][i], batch["reason"][i], 0.0, None
            right = finite[i] & (status == "ok")
            used = sum(1 << place for place, is_right in zip(places, right, strict=True) if is_right)
            if status == "ok" and not used:
                status, reason = "failed", errors.get(i, NOT_FINITE)
            if self.shape:
                features = np.zeros(self.shape, np.float32)
                if used:
                    features[np.array(places)[finite[i]]] = whole[i, finite[i]]
            elif used:
                score = _probability(whole[i, finite[i]]).mean()
            found.append(
                Record(int(row), status, float(score), float(batch["seconds"][i]), asked, used, reason, features)
            )
        return found

    def improves(self, record: Record) -> bool:
        """Whether an image has not been looked at, or was scored by fewer passes."""
        return self.status[record.row] == "" or record.used.bit_count() > self.used[record.row].sum()

    def put(self, record: Record) -> None:
        row, bits = record.row, range(len(self.passes))
        self.status[row], self.reason[row] = record.status, record.reason
        self.score[row], self.seconds[row] = record.score, record.seconds
        self.asked[row], self.used[row] = (
            [bool(mask >> bit & 1) for bit in bits] for mask in (record.asked, record.used)
        )
        if self.shape:
            self.features[row] = record.features

    def report(self, why_not: str, wanted: np.ndarray | None, keep_going: bool = False) -> pd.DataFrame:
        """The report.

        Args:
            why_not: the reason of images that were not looked at.
            wanted: (n,) bool, those that were to be looked at; None: all.
            keep_going: a breast over which a model fails has no score of it; else the error is raised.
        """
        status, reason, ok = self.status.copy(), self.reason.copy(), self.status == "ok"
        missing = status == ""
        status[missing], reason[missing] = "skipped", why_not
        if wanted is not None:
            reason[missing & ~wanted] = "debug: not looked at"
        if self.shape:
            score, asked, used = self._of_breasts(ok, keep_going)
            odd = ok & ~np.isfinite(score)
            status[odd], reason[odd] = "failed", NOT_CLASSIFIED if keep_going else NOT_FINITE
            ok, what = ok & ~odd, "its breast was scored"
            score = np.where(np.isfinite(score), score, self.ensemble.prior)
        else:
            asked, used, what = self.asked, self.used, "scored"
            score = np.where(ok, self.score, self.ensemble.prior)
        for row in np.flatnonzero(ok & ~used.all(1)):
            because = "the others gave nothing finite" if asked[row].all() else "for want of time"
            reason[row] = f"{what} by {used[row].sum()} of {len(self.passes)} passes, {because}"
        columns = {"status": status, "score": score, "score_of": "breast" if self.shape else "image"}
        return self.table.assign(**columns, seconds=self.seconds, reason=reason)[REPORT_COLUMNS]

    @torch.no_grad()
    def _of_breasts(self, ok: np.ndarray, keep_going: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each image its breast's score (n,) float64, NaN where there is none, and the passes (n, passes) that all its `ok`
        images were shown to, and that score it."""
        codes, _ = pd.factorize(self.table["breast_id"])
        members = data.grouped(codes)  # (breasts, views) rows of the table
        mask, members = (members >= 0) & ok[members], members.clip(min=0)
        asked, used = (np.where(mask[:, :, None], part[members], True).all(1) for part in (self.asked, self.used))
        used &= mask.any(1)[:, None]
        kinds, total = view_ids(self.table["view"])[members], np.zeros(len(members))
        for number, each in enumerate(self.passes):
            places = np.flatnonzero(used[:, number])
            for breasts in np.array_split(places, max(1, -(-len(places) // BREASTS))):
                if len(breasts):
                    given = self.features[members[breasts], number], mask[breasts], kinds[breasts]
                    logits = _classified(self.ensemble.models[each.fold], given, keep_going)
                    used[breasts, number] = np.isfinite(logits)
                    total[breasts] += np.where(np.isfinite(logits), _probability(logits), 0.0)
        count = used.sum(1)
        score = np.divide(total, count, out=np.full(len(members), np.nan), where=count > 0)
        return score[codes], asked[codes], used[codes]


def _classified(model: torch.nn.Module, given: tuple[np.ndarray, ...], keep_going: bool) -> np.ndarray:
    """Cancer logits (B,) of breasts by their features, mask and views; to keep going, NaN of one over which the model fails."""
    features, *views = map(torch.from_numpy, given)
    try:
        features = features.to(next(model.parameters()).device)
        return model.classify(features, *views)["cancer"].float().cpu().numpy()
    except Exception:
        if not keep_going:
            raise
    if len(features) == 1:
        return np.full(1, np.nan, np.float32)
    half = len(features) // 2
    parts = [tuple(each[:half] for each in given), tuple(each[half:] for each in given)]
    return np.concatenate([_classified(model, part, keep_going) for part in parts])


def _probability(logits: np.ndarray) -> np.ndarray:
    """Sigmoid in full precision."""
    return torch.from_numpy(logits).double().sigmoid().numpy()
