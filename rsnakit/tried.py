"""What a tuner was asked for, what it has tried, and what it has chosen so far."""

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from rsnakit import data, deciding, distributed, env
from rsnakit.env import RunConfig
from rsnakit.feeding import NO_TIME
from rsnakit.files import write_atomic
from rsnakit.models import ModelConfig
from rsnakit.recipe import LoopConfig, TrainConfig
from rsnakit.samplers import BalancedSampler
from rsnakit.store import Store
from rsnakit.trainer import check_settings, loader_workers, unit_of
from rsnakit.trials import Measured, Setting, Trials, Workload

COLUMNS = ("part", "name", "batch", "images_s", "low", "high", "peak_mb", "compile_s", "chosen", "skipped")
# Parts in their order, and what each gets of the time that is left, against those that are still to come.
SHARES = {"precision": 3, "compile": 3, "checkpointing": 1, "batch": 2, "loader": 2, "together": 5}
OF_RESULT = ("batch_size", "accumulate", "store_format")  # written only where they changed
ROUNDS = 5
LEAST_S = 1.0  # with less time left nothing is begun


class Tried:
    """The settings of a training that was asked for, with room for trials of others: each part of them has a share of the time,
    and leaves rows, and reasons.

    Args:
        images: of the training side, with pixels, both classes among them.
        store: that holds them.
        model_config, train_config, run_config, loop_config: as a training would get them: what is asked.
        minutes: for how long, all parts together.
        trials: what makes the trials of a workload.

    Attributes:
        table: all that was tried, a row each; first in each part what was asked. Columns: part, name, batch, images_s (the
            median round; breasts where the model sees these), low and high (the slowest and fastest round), peak_mb (the
            most memory of a step), compile_s, chosen, skipped (why there is no rate).
        settings: what is chosen so far, by the notebooks' names for it; `reasons`: a sentence for each.
        limit: what training waits for, a `deciding.Limit`; None before `loading`.
        loader_rates: as `feeding.rates` gives it, None before `loading`.
        rate: images (breasts) a second, end to end where `together` has measured it; NaN before anything was measured.
        asked: the settings as they were asked, such as precision and num_workers resolved.
        device: as it was asked for or found; `unit`: images or breasts; `left`: seconds that are left.

    Raises:
        RuntimeError: the device that was asked for does not work.
        ValueError: settings that training would refuse, or a table of one class.
    """

    def __init__(
        self, images: pd.DataFrame, store: Store | Path | str, model_config: ModelConfig, train_config: TrainConfig,
        run_config: RunConfig, loop_config: LoopConfig, minutes: float,
        trials: Callable[[Workload], Trials] = Trials,
    ) -> None:  # fmt: skip
        check_settings(model_config, train_config)
        self.images, self.store = images, store if isinstance(store, Store) else Store(store)
        self.model_config, self.loop_config = model_config, loop_config
        self.device = env.choose_device(run_config.device).value
        self.world = distributed.processes(loop_config.n_procs, self.device) if loop_config.n_procs >= 0 else 1
        accumulate = distributed.batches_a_step(train_config.accumulate, self.world)
        self.train_config = dataclasses.replace(train_config, accumulate=accumulate)
        self.max_hours, self.left = run_config.max_hours, 60 * minutes
        self.unit = f"{unit_of(model_config)}s"
        items = images if self.unit == "images" else data.per_breast(images)
        self.items, self.positives = len(items), int(items["cancer"].sum())
        self.epoch_items = self._epoch_items(self.items, self.positives)  # refuses one class, too

        self.reasons, self.limit, self.loader_rates = {}, None, None
        self._rows, self._candidates, self._model_rate, self._end_to_end = {}, [], math.nan, math.nan
        workers = loader_workers(run_config.num_workers, self.device, self.world)
        self._wanted, self._refused = run_config.precision, ""
        if self._wanted != "auto":
            self._refused = self._problem(self._wanted)
        precision = env.choose_precision(self.device, "auto" if self._refused else self._wanted).value
        self.asked = {
            "precision": precision, "channels_last": loop_config.channels_last, "compile": loop_config.compile,
            "grad_checkpointing": model_config.grad_checkpointing, "num_workers": workers,
            "store_format": self.store.manifest["format"], "batch_size": train_config.batch_size, "accumulate": accumulate,
        }  # fmt: skip
        self._now = dict(self.asked)
        self._batch = train_config.batch_size  # that trials are made with
        _, train, _ = self._configs(self.asked)
        self._trials = trials(Workload(images, self.store.path, model_config, train, loop_config, self.device))

    def __enter__(self) -> "Tried":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process of the trials, and frees the memory it holds; another part would start one anew."""
        self._trials.close()

    @property
    def table(self) -> pd.DataFrame:
        rows = [row for part in SHARES for row in self._rows.get(part, ())]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    @property
    def settings(self) -> dict[str, object]:
        return {name: value for name, value in self._now.items() if name in self.reasons}

    @property
    def decided(self) -> dict[str, object]:
        """What `write` writes: the settings, but the batch and the store's format only where they changed."""
        return {
            name: value for name, value in self.settings.items()
            if name not in OF_RESULT or value != self.asked[name]
        }  # fmt: skip

    @property
    def rate(self) -> float:
        if not math.isnan(self._end_to_end):
            return self._end_to_end
        if self.limit is None:
            return self._model_rate
        return deciding.side_by_side(
            self._model_rate, self.limit.loader, self._now["num_workers"] > 0 and self.device != "cpu"
        )

    # ---- what is told of them

    def hours(self, n_images: int, epochs: int = 1, n_positives: int | None = None) -> float:
        """Hours that training takes at the speed that was measured, on one device, scoring after epochs not counted.

        Args:
            n_images: of the training side, such as three quarters of the competition's 54,706.
            epochs: each has all negatives once, and positives as often as `negatives_per_positive` says.
            n_positives: images with a cancer among them; None: the share of the images at hand.
        """
        items = round(n_images * self.items / len(self.images))
        share = self.positives / self.items if n_positives is None else n_positives / n_images
        batch, accumulate = self._now["batch_size"], self._now["accumulate"]
        seen = self._epoch_items(items, max(1, round(share * items)), batch, accumulate)
        return epochs * seen / self.rate / 3600

    def write(self, path: Path | str) -> Path:
        """Writes what was `decided` as a YAML that papermill's `-f` takes, with reasons; whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = self.store.shape
        heading = deciding.heading(
            self.device, f"{self.model_config.backbone}, {height}x{width}, batches of {self.asked['batch_size']} {self.unit}, "
            f"augment {self.train_config.augment}, views {self.model_config.views}", self.world, path,
        )  # fmt: skip
        write_atomic(path, deciding.as_yaml(heading, self.decided, self.reasons))
        return path

    # ---- for the parts

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[Callable[[], float]]:
        """Gives a function that says how many seconds the part has left, and takes what it took off `left`."""
        begun = time.monotonic()
        ahead = sum(share for part, share in SHARES.items() if part not in self._rows or part == name)
        end = begun + self.left * SHARES[name] / ahead
        try:
            yield lambda: max(0.0, end - time.monotonic())
        finally:
            self.left = max(0.0, self.left - (time.monotonic() - begun))

    def _keep(self, part: str, rows: list[dict], reasons: dict[str, str]) -> pd.DataFrame:
        self._rows[part] = rows
        self.reasons |= reasons
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def _setting(self, **changes: object) -> Setting:
        """What is chosen so far, with changes, as trials take it."""
        names = ("precision", "channels_last", "compile", "grad_checkpointing")
        return Setting(**{**{name: self._now[name] for name in names}, "batch_size": self._batch, **changes})

    def _in_turn(self, settings: Sequence[Setting], limit_s: float) -> list[Measured]:
        if limit_s < LEAST_S:
            return [Measured(error=NO_TIME)] * len(settings)
        return self._trials.in_turn(settings, ROUNDS, limit_s)

    def _configs(self, values: dict) -> tuple[ModelConfig, TrainConfig, LoopConfig]:
        """The configs of a training with these settings."""
        share = max(1, values["accumulate"] // self.world)  # of one device, which is what is measured
        return (
            dataclasses.replace(self.model_config, grad_checkpointing=values["grad_checkpointing"]),
            dataclasses.replace(self.train_config, batch_size=values["batch_size"], accumulate=share),
            dataclasses.replace(self.loop_config, channels_last=values["channels_last"], compile=values["compile"]),
        )

    def _epoch_items(self, items: int, positives: int, batch: int = 0, accumulate: int = 0) -> int:
        """Images (breasts) that an epoch shows."""
        train, labels = self.train_config, np.zeros(items, np.int8)
        labels[:positives] = 1
        return len(BalancedSampler(
            labels, train.negatives_per_positive, batch or train.batch_size, train.min_positives, train.seed,
            accumulate or train.accumulate, train.negatives_per_epoch,
        ))  # fmt: skip

    def _problem(self, precision: str) -> str:
        """Why the device does not compute in a precision, or nothing."""
        try:
            env.choose_precision(self.device, precision)
        except ValueError as error:
            return re.sub(r"^precision \w+ was asked for, but |; use [\w, ]+$", "", str(error))
        return ""

    def _sessions(self, seconds: float) -> int:
        """How often a training of so many seconds begins, and compiles: `max_hours` ends it, and it goes on."""
        return max(1, math.ceil(seconds / 3600 / self.max_hours)) if self.max_hours else 1


def row_of(part: str, name: str, batch: int, measured: Measured, chosen: bool) -> dict:
    return dict(zip(COLUMNS, (
        part, name, batch, measured.median, measured.low, measured.high, measured.peak_mb, measured.compile_s,
        bool(chosen), measured.error,
    ), strict=True))  # fmt: skip
