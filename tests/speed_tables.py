"""Tables of measured speed that figures are drawn from in tests, ordinary ones and odd ones, and the figures of them."""

import math

import numpy as np
import pandas as pd

from rsnakit import plots_speed

REASON = (
    "bf16 has no units on this processor, so that a step takes four times as long; fp16 is not implemented for it at all, and "
    "the first convolution says so: RuntimeError: not implemented for 'Half', which torch 2.6 and later may"
)


def make_trials(part: str = "precision", chosen: int = 2, rates=(10.0, 8.0, 16.0, math.nan)) -> pd.DataFrame:
    """Rows of a tuner's table: what was asked first, the last skipped."""
    names = ["fp32", "fp32, channels last", "bf16, channels last", "fp16"][: len(rates)]
    rates = np.array(rates)
    return pd.DataFrame(
        {"part": part, "name": names, "batch": 8, "images_s": rates, "low": 0.9 * rates, "high": 1.05 * rates,
         "peak_mb": 100 * np.arange(4.0, 4 + len(rates)), "compile_s": math.nan, "chosen": np.arange(len(rates)) == chosen,
         "skipped": ["" if rate > 0 else "no fp16 on this processor" for rate in rates]}
    )  # fmt: skip


def many_trials(n: int = 30) -> pd.DataFrame:
    rates = np.where(np.arange(n) % 7 == 3, math.nan, 1000.0 + np.arange(n))
    names = [f"bf16, channels last, compiled with $mode$ {i} of a long name" for i in range(n)]
    return pd.DataFrame(
        {"part": ["precision", "compile", "loader"] * (n // 3), "name": names, "batch": 8, "images_s": rates,
         "low": rates - 300, "high": rates + 200, "peak_mb": math.nan, "compile_s": 3.0, "chosen": np.arange(n) == 24,
         "skipped": [REASON if math.isnan(rate) else "" for rate in rates]}
    )  # fmt: skip


def make_batches(fits: int = 6, fails: tuple[int, ...] = (64, 48, 40)) -> pd.DataFrame:
    """Batches that double until one does not fit, then bisection."""
    batch = [2**k for k in range(fits)] + [*fails]
    rates = np.array([10.0 * (k + 1) for k in range(fits)] + [math.nan] * len(fails))
    return pd.DataFrame(
        {"part": "batch", "name": [f"batch {n}" for n in batch], "batch": batch, "images_s": rates, "low": 0.9 * rates,
         "high": 1.1 * rates, "peak_mb": 100.0 * np.array(batch), "compile_s": math.nan,
         "chosen": np.arange(len(batch)) == 3, "skipped": [""] * fits + ["out of memory"] * len(fails)}
    )  # fmt: skip


def make_loading(formats=("block8", "raw16", "png16", "png8"), workers=(0, 1, 2)) -> pd.DataFrame:
    rows = [(name, n, 100.0 * (4 - place) * (n + 1), "") for place, name in enumerate(formats) for n in workers]
    table = pd.DataFrame(rows, columns=["store_format", "workers", "images_s", "skipped"])
    return table.assign(low=0.9 * table["images_s"], high=1.1 * table["images_s"])


def make_transforms(n: int = 4) -> pd.DataFrame:
    ms = np.array([2.0 / 2**k for k in range(n)])
    return pd.DataFrame({"ms": ms, "share": ms / ms.sum()}, index=[f"Transform{k}" for k in range(n)])


def make_tricks() -> pd.DataFrame:
    rows = {"checkpointing, convnext_tiny": (1.3, 0.13), "checkpointed loop": (1.5, 0.1), "bf16 autocast": (0.7, 0.55)}
    return pd.DataFrame.from_dict(rows, "index", columns=["time", "memory"])


def make_report(
    chosen: int = 25, calls: int = 10, gains=(1.0, 2.0, 3.0, 5.4, 5.0), left_out: bool = True
) -> pd.DataFrame:
    """As `Steps.report` has it: eager takes 2 s a call of 1,000 steps, a chunk of n steps 3 s and n / 2 to compile."""
    sizes = np.array([0, 1, 5, 25, 50])[: len(gains)]
    gains, compile_s = np.array(gains), np.where(sizes > 0, 3.0 + sizes / 2, 0.0)
    run_s = 2.0 / gains
    with np.errstate(divide="ignore", invalid="ignore"):
        pays = np.where(sizes > 0, np.where(run_s < 2, compile_s / np.maximum(2 - run_s, 0), math.inf), 0.0)
    report = pd.DataFrame(
        {"n": sizes, "compile_s": compile_s, "ms_step": run_s, "run_s": run_s, "total_s": compile_s + calls * run_s,
         "pays_after": pays, "chosen": sizes == chosen, "left_out": ""}
    )  # fmt: skip
    if left_out:
        report.loc[len(report)] = [
            100,
            *[math.nan] * 4,
            math.inf,
            False,
            "compiling it would go beyond the budget of 60 s",
        ]
    return report


def make_record(nt: int = 200, nx: int = 30, late: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """A pulse that moves at 2,000 m/s over receivers 10 m apart, `late` samples of 1 ms after its prediction, in s."""
    arrival = 0.02 + np.abs(np.arange(nx) - 10) * 10 / 2000
    time = np.arange(nt)[:, None] * 0.001 - arrival - late * 0.001
    return (1 - 2 * (time / 0.005) ** 2) * np.exp(-((time / 0.005) ** 2)), arrival


def make_formats() -> pd.DataFrame:
    """As `formats.compare` gives it of a million values."""
    rows = {
        "float32": (4_000_000, 0.0, 0.0, 1.0), "float16": (2_000_000, 0.001, 2e-4, 1.5),
        "8+1 bits": (1_125_000, 0.01, 3e-3, 2.5), "int8, one scale": (1_000_000, 0.1, 4e-2, 1.2),
    }  # fmt: skip
    table = pd.DataFrame.from_dict(rows, "index", columns=["bytes", "largest_error", "error", "load_ms"])
    ends = {"low": 0.9 * table["load_ms"], "high": 1.2 * table["load_ms"], "times": 1 / table["load_ms"]}
    return table.assign(bits=table["bytes"] / 125_000, **ends)


FIGURES = {  # by the function, then by what it is drawn from
    "rates": {
        "ordinary": lambda: plots_speed.rates(make_trials()),
        "several parts": lambda: plots_speed.rates(
            pd.concat([make_trials(), make_trials("compile", 0), make_trials("loader", 1)], ignore_index=True)
        ),
        "one point": lambda: plots_speed.rates(make_trials().head(1)),
        "no point": lambda: plots_speed.rates(make_trials().head(0)),
        "missing": lambda: plots_speed.rates(make_trials().assign(low=math.nan, high=math.nan, chosen=None)),
        "all skipped": lambda: plots_speed.rates(make_trials(rates=[math.nan] * 4).assign(skipped=REASON)),
        "many": lambda: plots_speed.rates(many_trials()),
    },
    "tuned": {
        "ordinary": lambda: plots_speed.tuned(make_trials()),
        "one point": lambda: plots_speed.tuned(make_trials().head(1)),
        "no point": lambda: plots_speed.tuned(make_trials().head(0)),
        "missing": lambda: plots_speed.tuned(make_trials()[["name", "images_s"]].tail(1)),
        "no memory": lambda: plots_speed.tuned(make_trials().assign(peak_mb=math.nan, chosen=None)),
        "many": lambda: plots_speed.tuned(many_trials()),
    },
    "batch_rates": {
        "ordinary": lambda: plots_speed.batch_rates(make_batches()),
        "one point": lambda: plots_speed.batch_rates(make_batches(1, ())),
        "no point": lambda: plots_speed.batch_rates(make_batches().head(0)),
        "missing": lambda: plots_speed.batch_rates(make_batches().assign(peak_mb=math.nan, low=math.nan, chosen=None)),
        "two precisions": lambda: plots_speed.batch_rates(
            pd.concat([make_batches(n, (2**n,)).assign(name=lambda t, p=p: p + ", " + t["name"], chosen=False)
                       for n, p in ((4, "fp32"), (6, "bf16"))], ignore_index=True)
        ),
        "none fits": lambda: plots_speed.batch_rates(make_batches(0, (1,)).assign(skipped=REASON)),
        "many": lambda: plots_speed.batch_rates(make_batches(18, tuple(range(140000, 260000, 9000)))),
    },
    "loader_limits": {
        "ordinary": lambda: plots_speed.loader_limits(make_loading(), 300.0),
        "one point": lambda: plots_speed.loader_limits(make_loading(["block8"], [2]), 2000.0),
        "no point": lambda: plots_speed.loader_limits(make_loading().head(0), 300.0),
        "missing": lambda: plots_speed.loader_limits(
            make_loading().assign(images_s=[math.nan, *range(11)], skipped=REASON, low=math.nan), math.nan
        ),
        "all skipped": lambda: plots_speed.loader_limits(make_loading().assign(images_s=math.nan, skipped=REASON), 3.0),
        "many": lambda: plots_speed.loader_limits(
            make_loading([f"format {i} $x$ {'y' * 20}" for i in range(6)], range(40)), 9e4
        ),
    },
    "transform_costs": {
        "ordinary": lambda: plots_speed.transform_costs(make_transforms()),
        "one point": lambda: plots_speed.transform_costs(make_transforms(1)),
        "no point": lambda: plots_speed.transform_costs(make_transforms(0)),
        "missing": lambda: plots_speed.transform_costs(make_transforms().assign(ms=[1, 2, math.nan, 3], share=math.nan)),
        "many": lambda: plots_speed.transform_costs(make_transforms(30).rename(lambda name: name + " of $long$ name" * 3)),
    },
    "time_memory": {
        "ordinary": lambda: plots_speed.time_memory(make_tricks()),
        "one point": lambda: plots_speed.time_memory(make_tricks().head(1)),
        "no point": lambda: plots_speed.time_memory(make_tricks().head(0)),
        "missing": lambda: plots_speed.time_memory(make_tricks().assign(memory=[0.5, math.nan, math.nan])),
        "many": lambda: plots_speed.time_memory(
            pd.DataFrame({"time": 1.3, "memory": 0.5}, index=[f"checkpointing of $m$ {i} {'long' * 9}" for i in range(30)])
        ),
    },
    "chunk_gain": {
        "ordinary": lambda: plots_speed.chunk_gain({"70x70": make_report(), "310x310, batch 5": make_report(1)}),
        "one point": lambda: plots_speed.chunk_gain({"70x70": make_report(0, gains=[1.0], left_out=False)}),
        "one chunk": lambda: plots_speed.chunk_gain({"70x70": make_report(1, gains=[1.0, 0.8]), "none": None}),
        "no point": lambda: plots_speed.chunk_gain({}),
        "missing": lambda: plots_speed.chunk_gain(
            {"70x70": make_report().assign(ms_step=math.nan, run_s=math.nan, left_out=REASON, chosen=None)}
        ),
        "many": lambda: plots_speed.chunk_gain({f"case {i}, $x$ {'long' * 20}": make_report() for i in range(5)}),
    },
    "shot_record": {
        "ordinary": lambda: plots_speed.shot_record(make_record()[0], 0.001, 10.0, make_record()[1]),
        "one point": lambda: plots_speed.shot_record(np.ones((1, 1)), 0.001, 10.0, np.zeros(1)),
        "no point": lambda: plots_speed.shot_record(np.zeros((0, 70)), 0.001, 10.0),
        "missing": lambda: plots_speed.shot_record(np.full((9, 5), math.nan), 0.001, 10.0, np.full(5, math.nan)),
        "silent": lambda: plots_speed.shot_record(np.zeros((9, 5)), 0.001, 10.0, np.full(5, math.nan)),
        "many": lambda: plots_speed.shot_record(make_record(1000, 700)[0], 0.001, 10.0),
    },
    "format_costs": {
        "ordinary": lambda: plots_speed.format_costs(make_formats()),
        "one point": lambda: plots_speed.format_costs(make_formats().head(1)),
        "no point": lambda: plots_speed.format_costs(make_formats().head(0)),
        "missing": lambda: plots_speed.format_costs(
            make_formats().assign(error=[0.0, math.inf, 1e-9, math.nan], load_ms=math.nan, times=math.nan)
        ),
    },
}  # fmt: skip
