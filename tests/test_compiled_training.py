"""Training compiled: how often torch compiles, and what is saved."""

import dataclasses

import pandas as pd
import pytest
import torch
from test_engine import MODEL, RUN, TRAIN, begin, weights

from rsnakit import engine, env, models, trainer
from rsnakit.engine import LoopConfig


@pytest.fixture
def graphs(monkeypatch) -> list:
    """What torch.compile hands to its backend, one entry a compilation; run as it stands, since only the number counts."""
    seen = []

    def backend(graph, inputs):
        seen.append([tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor) and x.ndim == 4])
        return graph.forward

    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, mode: real(self, backend=backend))
    monkeypatch.setattr(trainer.env, "choose_compile", lambda device, wanted: env.Choice(wanted, "tried"))
    torch._dynamo.reset()
    return seen


@pytest.mark.parametrize("views", ["none", pytest.param("attention", marks=pytest.mark.slow)])
def test_nothing_is_compiled_after_the_first_epoch(graphs, store, table, tmp_path, views, monkeypatch):  # T13
    """Batches of two sizes, evaluation with other ones and a short last batch, an average evaluated too."""
    config = dataclasses.replace(TRAIN, epochs=2, ema_decay=0.9, batch_size=6)
    model = dataclasses.replace(MODEL, views=views)
    folder = begin(tmp_path, store, table, config, model=model)
    after, real = [], trainer.Trainer.end_epoch

    def noted(self):
        after.append(len(graphs))
        return real(self)

    monkeypatch.setattr(trainer.Trainer, "end_epoch", noted)
    engine.fit_folds(table, store, model, config, RUN, folder, LoopConfig(compile="default"))
    assert after[0] > 0 and after == [after[0]] * config.epochs, (after, graphs)
    if views == "none":
        assert after[0] <= 3  # training, evaluation, and the average's


def test_what_is_saved_is_a_plain_model_that_goes_on_plain(graphs, store, table, tmp_path):  # M03
    config = dataclasses.replace(TRAIN, epochs=1)
    plain, compiled = (begin(tmp_path / name, store, table, config) for name in ("plain", "compiled"))
    engine.fit_folds(table, store, MODEL, config, RUN, plain)
    engine.fit_folds(table, store, MODEL, config, RUN, compiled, LoopConfig(compile="default"))
    assert graphs
    a, b = weights(plain), weights(compiled)
    assert a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)
    names = torch.load(compiled / "fold0" / "last.pt", weights_only=True)["model"]
    assert names.keys() == models.build_model(MODEL).state_dict().keys()
    longer = dataclasses.replace(config, epochs=2)
    for folder, loop in (
        (compiled, LoopConfig()),
        (plain, LoopConfig(compile="default")),
    ):  # each goes on the other way
        begin(folder.parents[1], store, table, longer, folder.name)
        engine.fit_folds(table, store, MODEL, longer, RUN, folder, loop)
        assert pd.read_csv(folder / "fold0" / "history.csv")["epoch"].tolist() == [1, 2]


@pytest.mark.parametrize(("accumulate", "mode"), [(1, "max-autotune"), (2, "max-autotune-no-cudagraphs")])
def test_gradients_that_add_up_are_not_recorded(store, table, tmp_path, monkeypatch, accumulate, mode):
    """On a GPU a recorded backward pass writes to the same gradients again, and torch refuses to add to them."""
    modes = []
    monkeypatch.setattr(trainer.env, "choose_compile", lambda device, wanted: env.Choice(wanted, "tried"))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, mode: modes.append(mode))
    config = dataclasses.replace(TRAIN, accumulate=accumulate)
    trainer.Trainer(table, store, MODEL, config, LoopConfig(compile="max-autotune"), "cpu", "fp32", 0, 0, {}, None)
    assert modes == [mode]


@pytest.mark.slow
def test_compiled_in_earnest(store, table, tmp_path):
    """By torch's own compiler, where this machine has what it needs."""
    choice = env.choose_compile("cpu", "default")
    if choice.value == "off":
        pytest.skip(choice.reason)
    config = dataclasses.replace(TRAIN, epochs=2)
    found = {}
    for loop in (LoopConfig(), LoopConfig(compile="default")):
        folder = begin(tmp_path / loop.compile, store, table, config)
        engine.fit_folds(table, store, MODEL, config, RUN, folder, loop)
        found[loop.compile] = pd.read_csv(folder / "fold0" / "history.csv")
    columns = ["train_loss", "valid_loss"]
    pd.testing.assert_frame_equal(found["off"][columns], found["default"][columns], rtol=0.05)
