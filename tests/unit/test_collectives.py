"""Collectives between ranks, here threads of one process with an engine each, against numpy sums in rank order."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from native_engine import build, make_step, poison, rows_step, supported
from rank_programs import KERNELS, TARGET, Rank

from tapeout.compiler.kernels import collective, simple
from tapeout.runtime.cpu import Launch
from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.ranks import Member, Place, RankError, Segment
from tapeout.runtime.ranks.segment import PATIENCE_S

Floats = npt.NDArray[np.float32]
SHAPES = ((1, 1), (3, 7), (1, 576), (7, 1001), (9, 2311))  # rows, k; the last are several tasks, with odd ends

pytestmark = pytest.mark.skipif(not supported(TARGET), reason=f"this CPU does not run {TARGET}")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collectives")
    build(folder, [TARGET], [*KERNELS, simple.ADD_F32])
    return folder / f"cpu-{TARGET}.so"


class Group:
    """Some ranks of one segment. ``each`` runs a function once for every rank at the same time."""

    def __init__(
        self, library: Path, count: int, threads: int = 1, buffer_bytes: int = 1 << 20, patience_s: float = PATIENCE_S
    ):
        self.segment = Segment.create(count, buffer_bytes, patience_s)
        members = [Member(Place(rank, count, ""), self.segment) for rank in range(count)]
        self.ranks = [Rank(library, member, threads) for member in members]

    def each(self, function: Callable[[Rank], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(function, self.ranks))

    def close(self) -> None:
        for rank in self.ranks:
            rank.native.close()


@pytest.fixture
def group(library: Path) -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(count: int, *arguments: Any, **options: Any) -> Group:
        made.append(Group(library, count, *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def operands(count: int, rows: int, columns: int, seed: int = 0) -> list[Floats]:
    """Values whose sum depends on its order."""
    rng = np.random.default_rng(seed)
    shape = (count, rows, columns)
    return list((rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 5, shape)).astype(np.float32))


def expected(kind: str, xs: list[Floats], rank: int) -> Floats:
    width = xs[0].shape[1] // len(xs)
    mine = slice(rank * width, (rank + 1) * width)
    total = functools.reduce(np.add, xs)
    if kind in ("all_reduce", "reduce_scatter"):
        return total if kind == "all_reduce" else total[:, mine]
    return np.concatenate(xs if kind == "all_gather" else [x[:, mine] for x in xs], axis=1)


def same(a: Floats, b: Floats) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def wide(kind: str, count: int, k: int) -> int:
    """Columns of an operand whose share is k."""
    return k * count if kind in ("reduce_scatter", "all_to_all") else k


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_every_collective_equals_numpy_in_rank_order(group: Callable[..., Group], count: int, threads: int) -> None:
    ranks = group(count, threads)
    for rows, k in SHAPES:
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            xs = operands(count, rows, wide(kind, count, k))

            def run(rank: Rank, kind: str = kind, k: int = k, xs: list[Floats] = xs) -> Floats:
                y = poison(*expected(kind, xs, rank.rank).shape)
                getattr(rank.comm, kind)(xs[rank.rank].ctypes.data, y.ctypes.data, len(y), k)
                return y

            for rank, y in enumerate(ranks.each(run)):
                assert same(y, expected(kind, xs, rank)), f"{kind} of {rows} x {k} on rank {rank}"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_one_shot_and_two_shots_and_adding_give_the_same_bits(group: Callable[..., Group], count: int) -> None:
    ranks = group(count, 2)
    for rows, k in SHAPES:
        xs, before = operands(count, rows, k), operands(1, rows, k, seed=1)[0]

        def run(rank: Rank, xs: list[Floats] = xs, before: Floats = before) -> list[Floats]:
            x, results = xs[rank.rank], list[Floats]()
            for two_shot in (False, True):
                for add in (False, True):
                    y = before.copy() if add else poison(*x.shape)
                    rank.comm.all_reduce(x.ctypes.data, y.ctypes.data, *x.shape, add=add, two_shot=two_shot)
                    results.append(y)
            return results

        total = functools.reduce(np.add, xs)
        for results in ranks.each(run):
            assert all(same(y, want) for y, want in zip(results, [total, before + total] * 2, strict=True))


@pytest.mark.parametrize("kernel", [entry.name for entry in KERNELS])
def test_rows_may_lie_apart_and_nothing_between_them_is_touched(group: Callable[..., Group], kernel: str) -> None:
    count, rows, k = 3, 5, 37
    ranks = group(count)
    xs = operands(count, rows, wide(kernel, count, k))

    def run(rank: Rank) -> tuple[Floats, Floats]:
        want = expected(kernel, xs, rank.rank)
        x, y = poison(rows, xs[0].shape[1] + 3), poison(rows, want.shape[1] + 11)
        x[:, :-3] = xs[rank.rank]
        tail = (0, 1) if kernel == "all_reduce" else ()
        rank.native.call(kernel, rows_step(rows), x, x.shape[1], y, y.shape[1], k, rank.comm.address, *tail)
        return y, want

    for y, want in ranks.each(run):
        assert same(y[:, :-11], want) and np.isnan(y[:, -11:]).all()


@pytest.mark.parametrize("columns", [1, 36, 37, 38, 2 * 37, 3 * 37 - 1])
def test_a_gather_leaves_out_the_padding_of_the_last_ranks(group: Callable[..., Group], columns: int) -> None:
    rows, k = 5, 37
    ranks = group(3)
    xs = operands(3, rows, k)

    def run(rank: Rank) -> Floats:
        y = poison(rows, columns + 2)
        rank.native.call("all_gather", rows_step(rows), xs[rank.rank], k, y, columns + 2, k, rank.comm.address, columns)
        return y

    for y in ranks.each(run):
        assert same(y[:, :columns], np.concatenate(xs, axis=1)[:, :columns]) and np.isnan(y[:, columns:]).all()


@pytest.mark.parametrize("count", [2, 4])
def test_launch_lists_reuse_the_buffers_turn_by_turn(group: Callable[..., Group], count: int) -> None:
    """Many collectives in one step, a reader that lags behind, and steps of an odd number of collectives."""
    ranks, rows, k, layers = group(count, 2), 2, 5000, 25
    xs = operands(count, rows, k, seed=3)

    def run(rank: Rank) -> Floats:
        x, y = xs[rank.rank].copy(), poison(rows, k)
        body: list[Launch] = []
        for layer in range(layers):
            body.append(rank.native.launch("all_reduce", x, k, y, k, k, rank.comm.address, 0, layer % 3 == 0))
            body.append(rank.native.launch("add_f32", y, x, k))
        for _ in range(3):
            assert rank.native.run(make_step([(0, rows, [0])]), body) == 0
        return x

    want = [x.copy() for x in xs]
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(3 * layers):
            total = functools.reduce(np.add, want)
            want = [x + total for x in want]
    for x, wanted in zip(ranks.each(run), want, strict=True):
        assert same(x, wanted)


def test_a_head_list_reduces_the_wanted_rows_only(group: Callable[..., Group]) -> None:
    ranks, k = group(2), 33
    xs = operands(2, 3, k)

    def run(rank: Rank) -> Floats:
        y = poison(3, k)
        head = [rank.native.launch("all_reduce", xs[rank.rank], k, y, k, k, rank.comm.address, 0, 0)]
        assert rank.native.run(rows_step(3, [0, 2]), [], head) == 0
        return y

    for y in ranks.each(run):
        assert same(y[:2], xs[0][:2] + xs[1][:2]) and np.isnan(y[2]).all()


def reduce_rows(rank: Rank, rows: int, k: int = 8) -> str:
    """An all_reduce of zeros; the error's text, if it fails."""
    x = np.zeros((rows, k), np.float32)
    try:
        rank.comm.all_reduce(x.ctypes.data, x.ctypes.data, rows, k)
    except RankError as error:
        return str(error)
    return "done"


def test_ranks_that_run_different_steps_are_told_so(group: Callable[..., Group]) -> None:
    ranks = group(3)
    said = ranks.each(lambda rank: reduce_rows(rank, 2 if rank.rank == 1 else 1))
    assert set(said) <= {
        f"rank {rank} runs another step than the ranks before it; all ranks must be given the same tokens in the same "
        "order"
        for rank in (1, 2)
    }


def test_a_rank_that_does_not_come_is_named(group: Callable[..., Group]) -> None:
    ranks = group(3, patience_s=0.3)
    said = ranks.each(lambda rank: "absent" if rank.rank == 1 else reduce_rows(rank, 1))
    wanted = "rank 1 is stuck: the others have waited 0.3 s for it in a collective, and were ended"
    assert said == [wanted, "absent", wanted]
    assert reduce_rows(ranks.ranks[1], 1) == wanted, "who comes too late learns it at once"


def test_a_layer_may_take_a_rank_seconds_longer_than_the_others(group: Callable[..., Group]) -> None:
    def run(rank: Rank) -> str:
        time.sleep(5 * rank.rank)  # all rows of a chunk chose its experts
        return reduce_rows(rank, 1)

    assert group(2).each(run) == ["done", "done"]


def test_the_leader_may_pause_and_nobody_else(group: Callable[..., Group]) -> None:
    ranks = group(2, patience_s=0.2)

    def run(rank: Rank, pausing: int) -> str:
        rank.member.idle()
        if rank.rank == pausing:
            time.sleep(0.8)
        rank.member.busy()
        return reduce_rows(rank, 1)

    assert ranks.each(lambda rank: run(rank, 0)) == ["done", "done"]
    with pytest.raises(RankError, match="rank 1 is stuck"):
        ranks.each(lambda rank: run(rank, 1))


def test_an_operand_larger_than_the_buffer_is_refused_before_it_is_copied(group: Callable[..., Group]) -> None:
    rank = group(1, buffer_bytes=4096).ranks[0]
    x = np.zeros((1, 1025), np.float32)
    sizes = {"ldx": 1025, "ldy": 1025, "k": 1025, "columns": 0}
    arguments = {"x": x.ctypes.data, "y": x.ctypes.data, "comm": rank.comm.address, **sizes}
    assert rank.run("all_gather", 1, arguments) == 2
    assert reduce_rows(rank, 1) == "done", "the communicator is as it was"


def test_the_plans_choice_follows_size() -> None:
    assert [collective.two_shot_rows(width) for width in (576, 7168, 16384, 65536)] == [29, 3, 1, 1]
    assert collective.buffer_bytes(collective.ALL_REDUCE, 4, 2, 100) == 800
    assert collective.buffer_bytes(collective.ALL_TO_ALL, 4, 2, 100) == 3200


def test_a_descriptor_of_something_else_is_refused(tmp_path: Path) -> None:
    for size in (0, 100, 1 << 20):
        (tmp_path / "file").write_bytes(bytes(size))
        with (
            (tmp_path / "file").open("r+b") as file,
            pytest.raises(TapeoutError, match="is not the shared memory"),
        ):
            Segment(file.fileno())


def test_a_segment_holds_a_stated_number_of_ranks() -> None:
    with pytest.raises(TapeoutError, match="65 ranks were asked for; one machine runs 1 to 64"):
        Segment.create(65, 4096)
