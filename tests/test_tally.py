"""What an epoch's steps gave, against NumPy and scikit-learn."""

import io
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from rsnakit import distributed
from rsnakit.tally import PARTS, Tally

SIZES = [5, 5, 4, 4, 1]


def drawn(sizes=SIZES, seed=0):
    """Batches as (logits, batch) with the loss that they have."""
    rng, first, made = np.random.default_rng(seed), 0, []
    for size in sizes:
        logits, labels = rng.normal(0, 3, size).astype(np.float32), rng.integers(0, 2, size).astype(np.float32)
        items = torch.arange(first, first + size) * 7 % 1000
        loss = log_loss(labels, 1 / (1 + np.exp(-logits.astype(np.float64))), labels=[0, 1])
        made.append(
            (
                torch.tensor(loss, dtype=torch.float32),
                torch.from_numpy(logits),
                {"cancer": torch.from_numpy(labels), "item": items},
            )
        )
        first += size
    return made


def filled(made, accumulate=2, tally=None):
    """A tally of these batches, a step after each `accumulate` of them, with norms 1, 2, 3 ..."""
    tally = Tally() if tally is None else tally
    for number, each in enumerate(made, start=1):
        tally.add(*each)
        if number % accumulate == 0 or number == len(made):
            tally.add_step(torch.tensor(float(tally.taken + 1)), True)
    return tally


def whole(made):
    """Labels, scores and items of all batches, scores in float64."""
    logits = np.concatenate([logits.double().numpy() for _, logits, _ in made])
    labels, items = (np.concatenate([batch[name].numpy() for *_, batch in made]) for name in ("cancer", "item"))
    return labels, 1 / (1 + np.exp(-logits)), items


def plain_pf1(labels, scores):
    """2 sum(p y) / (sum y + sum p), as the competition has it."""
    return 2 * (labels * scores).sum() / (labels.sum() + scores.sum())


def test_scores_items_loss_and_norm_are_those_of_all_batches():
    made = drawn()
    found = filled(made).scored()
    labels, scores, items = whole(made)
    np.testing.assert_allclose(found.scores, scores, atol=1e-6)
    assert found.scores.dtype == np.float32 and found.items.dtype == np.int64
    assert found.items.tolist() == items.tolist()
    assert found.loss == pytest.approx(log_loss(labels, scores), rel=1e-5)  # over images: the last batch has one
    assert found.grad_norm == pytest.approx(2.0) and found.skipped == 0


@pytest.mark.parametrize("every", [1, 2, 3])
def test_reading_in_between_changes_nothing(every):
    made, tally = drawn(), Tally()
    for number, each in enumerate(made, start=1):
        tally.add(*each)
        tally.add_step(torch.tensor(0.5), True)
        if number % every == 0:
            tally.read()
            tally.read()  # twice in a row
    expected, found = filled(made, accumulate=1).scored(), tally.scored()
    np.testing.assert_array_equal(found.scores, expected.scores)
    np.testing.assert_array_equal(found.items, expected.items)
    assert found.loss == expected.loss


def test_what_was_noted_is_brought_over_in_one_copy(monkeypatch):
    tally, copies, cpu = filled(drawn()), [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copies.append(self.shape) or cpu(self))
    tally.read()
    assert copies == [(5 + 19 + 3,)]  # losses, logits, norms


def test_half_precision_logits_are_scored_in_float32():
    logits = torch.tensor([-9.0, 0.25, 7.5], dtype=torch.bfloat16, requires_grad=True)
    tally = Tally()
    batch = {"cancer": torch.tensor([0.0, 1, 1]), "item": torch.arange(3)}
    tally.add(logits.float().sum(), logits, batch)
    found = tally.scored()
    np.testing.assert_allclose(found.scores, 1 / (1 + np.exp(-np.array([-9.0, 0.25, 7.5]))), rtol=1e-6)


def test_live_values_are_those_so_far():
    made = drawn()
    tally = filled(made[:3])
    tally.read()
    labels, scores, _ = whole(made[:3])
    live = tally.live()
    assert live["loss"] == pytest.approx(log_loss(labels, scores), rel=1e-5)
    assert live["norm"] == 2.0  # the newest
    assert live["pF1"] == pytest.approx(plain_pf1(labels, scores), rel=1e-5)
    assert live["AUC"] == pytest.approx(roc_auc_score(labels, scores))


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_live_scores_wait_for_both_kinds(label):
    loss, logits, batch = drawn([6])[0]
    tally = Tally()
    tally.add(loss, logits, {**batch, "cancer": torch.full((6,), label)})
    tally.read()
    assert set(tally.live()) == {"loss"}  # and no norm before the first step is over


# Steps that overflowed


def test_skipped_steps_are_counted_and_their_losses_left_out():
    made, tally = drawn([4, 4, 4]), Tally()
    _, logits, batch = made[1]
    for each, taken in ((made[0], True), ((torch.tensor(math.inf), logits * math.nan, batch), False), (made[2], True)):
        tally.add(*each)
        tally.add_step(torch.tensor(3.0 if taken else math.inf), taken)
    found = tally.scored(may_overflow=True)
    assert (tally.taken, tally.skipped, tally.in_a_row, found.skipped) == (2, 1, 0, 1)
    assert found.loss == pytest.approx(float(made[0][0] + made[2][0]) / 2)
    assert found.grad_norm == 3.0
    assert len(found.scores) == 12 and np.isnan(found.scores[4:8]).all()
    assert {"loss", "norm", "pF1", "AUC"} == set(tally.live())  # of the rows that are finite
    assert math.isfinite(tally.live()["pF1"])


def test_an_epoch_of_nothing_but_skipped_steps_has_no_loss():
    tally = Tally(in_a_row=4)
    loss, logits, batch = drawn([4])[0]
    for _ in range(2):
        tally.add(loss * math.inf, logits, batch)
        tally.add_step(torch.tensor(math.inf), False)
    found = tally.scored(may_overflow=True)
    assert (found.skipped, tally.in_a_row, tally.taken) == (2, 6, 0)
    assert math.isnan(found.loss) and math.isnan(found.grad_norm)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("read_before", [False, True])
def test_a_loss_that_is_not_finite_is_an_error_with_its_batch(value, read_before):
    made, tally = drawn(), Tally()
    for number, (loss, logits, batch) in enumerate(made):
        if read_before and number == 2:
            tally.read()
        tally.add(torch.tensor(value) if number in (3, 4) else loss, logits, batch)
    with pytest.raises(FloatingPointError, match=rf"the loss is {value} in batch 4 of this epoch.*Lower lr"):
        tally.read()


def test_a_norm_that_is_not_finite_is_an_error():
    tally = Tally()
    tally.add(*drawn([3])[0])
    tally.add_step(torch.tensor(math.nan), True)
    with pytest.raises(FloatingPointError, match="gradients' norm is nan"):
        tally.scored()


# Saved, and taken up


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_a_state_taken_up_goes_on_as_if_nothing_had_been():
    made = drawn()
    begun = filled(made[:2])
    begun.skipped, begun.in_a_row = 3, 2
    begun.read()
    tally = Tally()
    tally.load_state(through_a_file(begun.state()))
    assert (tally.taken, tally.skipped, tally.in_a_row) == (1, 3, 2)
    found, expected = filled(made[2:], tally=tally).scored(), filled(made).scored()
    np.testing.assert_array_equal(found.scores, expected.scores)
    np.testing.assert_array_equal(found.items, expected.items)
    assert (found.loss, found.grad_norm, found.skipped) == (expected.loss, expected.grad_norm, 3)


def test_the_state_of_an_epoch_that_has_not_begun_is_empty():
    state = through_a_file(Tally(in_a_row=3).state())
    assert all(len(state[name]) == 0 for name in PARTS)
    tally = Tally()
    tally.load_state(state)
    assert tally.in_a_row == 3 and tally.scored().items.tolist() == []
    assert tally.live()["loss"] != tally.live()["loss"]  # NaN, and no error


def test_later_batches_leave_a_state_as_it_was():
    made = drawn()
    tally = filled(made[:2])
    tally.read()
    state = tally.state()
    before = {name: state[name].clone() for name in PARTS}
    filled(made[2:], tally=tally).read()
    assert all(torch.equal(state[name], before[name]) for name in PARTS)


def test_one_processor_takes_up_what_two_had():
    """Rows of both, steps and norms once: gradients are shared."""
    made = drawn([3, 3, 2, 2])
    first, second = filled(made[:2], accumulate=1), filled(made[2:], accumulate=1)
    for tally in (first, second):
        tally.read()
    tally = Tally()
    tally.load_state(first.state(), second.state())
    found = tally.scored()
    labels, scores, items = whole(made)
    assert tally.taken == len(tally.state()["norms"]) == 2 and found.items.tolist() == items.tolist()
    assert found.loss == pytest.approx(log_loss(labels, scores), rel=1e-5)
    assert found.grad_norm == pytest.approx(1.5)


def test_a_processor_that_forgets_keeps_count_of_the_steps():
    tally = filled(drawn())
    tally.read()
    tally.forget()
    assert tally.taken == 3 and len(tally.scored().items) == 0


def test_scores_of_all_processors_come_together(monkeypatch):
    """Two processors with batches of their own: each sees the rows of both, the loss over all of them, one of the norms."""
    made = drawn([3, 3, 2, 2])
    tallies, sent = [filled(made[:2], accumulate=1), filled(made[2:], accumulate=1)], []
    for tally in tallies:
        monkeypatch.setattr(distributed, "gather", lambda value: sent.append(value) or [value])
        tally.scored()
    monkeypatch.setattr(distributed, "gather", lambda _: sent)
    labels, scores, items = whole(made)
    for tally in tallies:
        found = tally.scored()
        assert found.items.tolist() == items.tolist()
        np.testing.assert_allclose(found.scores, scores, atol=1e-6)
        assert found.loss == pytest.approx(log_loss(labels, scores), rel=1e-5)
        assert found.grad_norm == pytest.approx(1.5)


def test_logits_may_be_written_over_afterwards():
    """As a compiled model does that replays what a GPU has recorded."""
    made = drawn()
    tally, place = Tally(), torch.empty(max(SIZES))
    for number, (loss, logits, batch) in enumerate(made, start=1):
        out = place[: len(logits)].copy_(logits)
        tally.add(loss, out, batch)
        tally.add_step(torch.tensor(float(number)), True)
    assert np.allclose(tally.scored().scores, whole(made)[1])
