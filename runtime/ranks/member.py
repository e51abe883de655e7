"""Makes this process one of the ranks of a run, shows the others that it lives, and learns when the run is over."""

from __future__ import annotations

import contextlib
import ctypes as C
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType

from tapeout.runtime.errors import TapeoutError
from tapeout.runtime.ranks.environment import Place
from tapeout.runtime.ranks.meeting import Host, ask_for_segment
from tapeout.runtime.ranks.segment import (
    PATIENCE_S,
    TICK,
    RankError,
    Reason,
    Segment,
    State,
    Watch,
    process_state,
)

JOIN_S = 60.0  # for how long ranks wait for one that has not started
_POLL_S = 0.005
_PR_SET_PDEATHSIG = 1


class Member:
    """This process as one of the ranks. As a context manager it tells the others how it ended.

    Rank 0 leads: it alone may pause between two steps, and says so with ``idle``.
    """

    def __init__(self, place: Place, segment: Segment) -> None:
        self.rank, self.count, self.segment = place.rank, place.count, segment
        if segment.ranks != self.count:
            raise TapeoutError(f"rank {self.rank} was told of {self.count} ranks, but rank 0 of {segment.ranks}")
        self.supervised = place.parent is not None
        """Whether Tapeout started this process and reports errors of the run, so that this process need not."""
        self._own = segment.shared.rank[self.rank]
        if self._own.state != State.ABSENT or not segment.claim(self.rank):
            raise TapeoutError(f"two processes say that they are rank {self.rank}; every rank is one process")
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="tapeout-heartbeat", daemon=True)

    def arrive(self, digest: bytes) -> None:
        """Show up with the digest of what this rank opened, and begin to watch and to be watched."""
        C.memmove(self._own.digest, digest, len(digest))
        self._own.pid = os.getpid()
        _, self._own.born = process_state(os.getpid())
        self._own.state = State.HERE
        self._heart.start()

    def _beat(self) -> None:
        watch = Watch(self.segment, self.rank)
        while True:
            self._own.beats = (self._own.beats + 1) & 0xFFFFFFFF
            if self._stop.wait(TICK):
                return
            watch.look()

    def check(self) -> None:
        """Raise RankError when the run is over."""
        if self.segment.shared.fault:
            raise self.segment.error()

    def ready(self) -> None:
        """Wait until every rank has loaded what it needs, however long that takes. Raises RankError."""
        self.segment.touch(self.rank)
        self._own.ready = 1
        ranks = self.segment.shared.rank
        while waiting := [rank for rank in range(self.count) if not ranks[rank].ready]:
            if gone := [rank for rank in waiting if ranks[rank].state == State.LEFT]:
                self.segment.end(Reason.LEFT, gone[0])
            self.check()
            time.sleep(_POLL_S)
        self.idle()

    def busy(self) -> None:
        """A step begins. Raises RankError when the run is over."""
        self.check()
        self._own.state = State.HERE

    def idle(self) -> None:
        """A step is over. The others wait for rank 0 from here on as long as it likes."""
        if self.rank == 0:
            self._own.state = State.IDLE

    def leave(self, error: BaseException | None = None) -> None:
        """End this rank's part; with an error, the others end too and say why. The segment is gone afterwards.

        To be called once the engine is closed; a second call does nothing.
        """
        if self.segment.fd < 0:
            return
        if isinstance(error, Exception) and not isinstance(error, RankError):
            self.segment.end(Reason.FAILED, self.rank, f"failed: {error or type(error).__name__}")
        self._stop.set()
        if self._heart.ident is not None:
            self._heart.join()
        self._own.state = State.LEFT
        del self._own
        self.segment.close()

    def __enter__(self) -> Member:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)


def join(
    place: Place,
    digest: bytes,
    planned: int,
    buffer_bytes: int,
    *,
    patience_s: float = PATIENCE_S,
    wait_s: float = JOIN_S,
) -> Member:
    """Meet the other ranks of an artifact that was planned for ``planned`` of them.

    ``digest`` is 32 bytes that stand for the artifact, ``buffer_bytes`` what a collective needs at most. Raises
    TapeoutError when the plan is for another number of ranks, when the ranks opened different artifacts, and when one
    does not come within ``wait_s`` seconds.
    """
    _check_count(place, planned)
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as stack:
        wait: Callable[[], None] = functools.partial(time.sleep, _POLL_S)
        if place.segment is not None:
            _die_with_parent(place)
            segment = Segment(place.segment)
            os.set_inheritable(place.segment, False)
        elif place.rank == 0:
            segment = Segment.create(place.count, buffer_bytes, patience_s)
            host = stack.enter_context(contextlib.closing(Host(place.job, segment.fd)))
            wait = host.serve
        else:
            segment = Segment(ask_for_segment(place, deadline))
        member = None
        try:
            member = Member(place, segment)
            member.arrive(digest)
            _meet(member, wait, deadline)
        except BaseException as error:
            if isinstance(error, TapeoutError):
                segment.end(Reason.REFUSED, place.rank, str(error))
                error = segment.error()  # the same for every rank and for whoever started them
            if member:
                member.leave(error)
            raise error
        return member


def _check_count(place: Place, planned: int) -> None:
    if place.count != planned:
        raise TapeoutError(
            f"the artifact was planned for {planned} rank{'s' * (planned != 1)}, but {place.count} were started; start "
            f"{planned}, or compile it with topology.count={place.count}"
        )


def _meet(member: Member, wait: Callable[[], None], deadline: float) -> None:
    """Wait until all are there, a moment at a time, and compare digests."""
    segment = member.segment
    while missing := [rank for rank in range(member.count) if segment.shared.rank[rank].state == State.ABSENT]:
        member.check()
        if time.monotonic() > deadline:
            segment.end(Reason.ABSENT, missing[0])
        wait()
    _same_artifact(segment)
    member.check()


def _same_artifact(segment: Segment) -> None:
    digests = [bytes(segment.shared.rank[rank].digest).hex() for rank in range(segment.ranks)]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise TapeoutError(
                f"the ranks opened different artifacts: the manifest of rank 0 has digest {digests[0][:12]}, that of "
                f"rank {rank} {digest[:12]}; give every rank the same artifact"
            )


def _die_with_parent(place: Place) -> None:
    """However the parent ends, this process ends with it. Ctrl-C is for the parent and for the rank that leads."""
    C.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != place.parent:  # it was faster
        os._exit(1)
    if place.rank and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
