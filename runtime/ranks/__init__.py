"""Several processes of one machine that run one artifact together: starting, finding and watching them.

``run_ranks`` starts them and ends them all when one fails; ``join`` makes a process one of them, whoever started it;
a ``Communicator`` runs collectives between them.
"""

from __future__ import annotations

from tapeout.runtime.ranks.communicator import Communicator, SharedMemory
from tapeout.runtime.ranks.environment import Place, read_place
from tapeout.runtime.ranks.member import Member, join
from tapeout.runtime.ranks.segment import RankError, Segment
from tapeout.runtime.ranks.supervisor import Ranks, run_ranks, start_ranks

__all__ = [
    "Communicator",
    "Member",
    "Place",
    "RankError",
    "Ranks",
    "Segment",
    "SharedMemory",
    "join",
    "read_place",
    "run_ranks",
    "start_ranks",
]
