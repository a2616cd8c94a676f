"""Shared memory that a loader's worker uses again: never before the parent has let go of all that lies in it."""

import gc
import os
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from rsnakit.shared import Lent, Pool


def sent(lent: Lent) -> torch.Tensor:
    """What the parent gets."""
    return ForkingPickler.loads(ForkingPickler.dumps(lent))


def places(pool: Pool) -> list[int]:
    return [piece.data_ptr() for piece in pool.pieces]


def test_values_arrive_in_the_shape_that_was_taken():
    lent = Pool().lend((2, 1, 3))
    lent.values[...] = torch.arange(6.0).view(2, 1, 3)
    received = sent(lent.take(lent.values[:, 0]))
    assert received.dtype == torch.float32 and received.tolist() == [[0, 1, 2], [3, 4, 5]]
    received += 1  # the parent's own, to be changed as it likes
    assert received.sum() == 21


@pytest.mark.parametrize(
    "view", [lambda x: x[0], lambda x: x.numpy()[1:], lambda x: x.view(-1)[3:].numpy(), lambda x: x.T]
)
def test_memory_is_out_until_the_last_view_is_gone(view):
    pool = Pool()
    first = pool.lend((2, 3))
    first.values.fill_(7)
    received = sent(first)
    del first
    kept = view(received)
    del received
    gc.collect()
    pool.lend((2, 3)).values.fill_(9)
    assert len(pool.pieces) == 2 and (kept == 7).all()
    before = places(pool)
    del kept
    gc.collect()
    again = pool.lend((2, 3))
    assert again.values.data_ptr() - before[0] == 64 and places(pool) == before


def test_memory_is_out_while_the_worker_has_a_view_of_it():
    """As where a dataset keeps samples; also after the parent has let go."""
    pool = Pool()
    lent = pool.lend((2, 3))
    lent.values.fill_(7)
    kept, received = lent.values[1], sent(lent)
    del lent, received
    gc.collect()
    pool.lend((2, 3)).values.fill_(9)
    assert (kept == 7).all() and len(pool.pieces) == 2


def test_a_view_that_is_sent_by_itself_is_a_copy():
    pool = Pool()
    lent = pool.lend((2, 3))
    lent.values.fill_(7)
    received = ForkingPickler.loads(ForkingPickler.dumps(lent.values[1]))
    del lent
    gc.collect()
    pool.lend((2, 3)).values.fill_(9)
    assert (received == 7).all() and len(pool.pieces) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_that_is_forked_lets_go_of_nothing():
    """As a second loader's workers, which have what the parent held when they began."""
    pool = Pool()
    lent = pool.lend((2, 3))
    received = [sent(lent)]
    del lent
    child = os.fork()
    if not child:
        received.clear()
        os._exit(0)
    os.waitpid(child, 0)
    pool.lend((2, 3)).values.fill_(9)
    assert len(pool.pieces) == 2 and len(received) == 1


def test_what_was_never_sent_is_free_again():
    """As where an image of the batch could not be read."""
    pool = Pool()
    for _ in range(5):
        pool.lend((4,)).values.fill_(1)
    assert len(pool.pieces) == 1


def test_batches_that_grow_take_the_place_of_smaller_ones():
    pool = Pool(2)
    for size in (4, 8, 6, 16):
        values = pool.lend((size,)).values
        assert values.shape == (size,)
        del values
    assert [len(piece) for piece in pool.pieces] == [64 + 4 * 16]


def test_where_all_is_out_more_is_lent_but_not_kept():
    pool = Pool(2)
    lent = [pool.lend((3,)) for _ in range(5)]
    for number, each in enumerate(lent):
        each.values.fill_(number)
    received = [sent(each) for each in lent]
    assert len(pool.pieces) == 2 and [each.tolist() for each in received] == [[n] * 3 for n in range(5)]


POOL = Pool()


class Numbers(Dataset):
    """Batches of a number each, from a worker's own memory; its second item is where that lies."""

    def __len__(self) -> int:
        return 40

    def __getitems__(self, items: list[int]) -> tuple[Lent, int]:
        lent = POOL.lend((256, 256))
        lent.values.fill_(items[0])
        return lent, lent.values.data_ptr()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_worker_writes_again_to_what_is_let_go_of(start):
    loader = DataLoader(Numbers(), 1, num_workers=1, collate_fn=tuple, multiprocessing_context=start)
    found = []
    for number, (batch, place) in enumerate(loader):
        assert batch.shape == (256, 256) and (batch == number).all()
        found.append(place)
        del batch
    assert 1 < len(set(found)) <= 4  # of 40


def test_a_parent_that_keeps_everything_keeps_it_as_it_was():
    loader = DataLoader(Numbers(), 1, num_workers=2, collate_fn=tuple)
    kept = [batch for batch, _ in loader]
    assert [float(batch.min()) for batch in kept] == [float(batch.max()) for batch in kept] == list(range(40))
