"""How much of a device a plan may take: the published case, the least fraction, the longest context, what is said."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from tiny import CONFIG, compile_tiny

from tapeout.compiler.checkpoints.config import written_config
from tapeout.compiler.devices import Device, load_device
from tapeout.compiler.lowering.logical import lower_logical
from tapeout.compiler.spec import Serving, Topology
from tapeout.compiler.stages import FusedModel, MemoryPlan, SelectedModel
from tapeout.passes.plan_memory import kv_room, plan_memory
from tapeout.runtime.errors import TapeoutError

GIB = 2**30
LAYERS, TOKEN = 2, 2 * 2 * 2 * 16 * 2  # bytes a token: 2 layers, keys and values, 2 heads of 16 channels, 16 bits


@dataclass(frozen=True)
class Case:
    """A lowered tiny model on a device: CPU kernels, or a GPU that has none for it."""

    selected: SelectedModel
    device: Device

    def plan(self, memory: int, **serving: Any) -> MemoryPlan:
        """The memory plan on ``memory`` bytes. Raises TapeoutError."""
        return plan_memory(self.selected, self.device, Topology(memory=memory), Serving(**serving))

    @property
    def own(self) -> int:
        """Bytes that the driver takes."""
        return getattr(self.device, "context", 0)


@pytest.fixture(scope="module", params=["cpu", "h200"])
def case(request: pytest.FixtureRequest) -> Case:
    results = compile_tiny(written_config(CONFIG))
    if request.param == "cpu":
        return Case(results.get(SelectedModel), load_device("cpu"))
    device = load_device("h200")
    return Case(lower_logical(results.get(FusedModel), device, Serving(), "nothing"), device)


def refusal(function: Callable[..., object], *arguments: Any, **options: Any) -> str:
    with pytest.raises(TapeoutError) as refused:
        function(*arguments, **options)
    return str(refused.value)


def least(message: str) -> float:
    found = re.search(r"; the smallest that holds it is ([\d.]+)", message)
    assert found, message
    return float(found[1])


def test_the_published_case() -> None:
    """A card of 94 GiB, 21.71 of them free behind the weights: 10.43 GiB of KV at 0.88, 20.6 GiB too few at 0.55."""
    memory, rest = 94 * GIB, (94 - 21.71) * GIB
    assert round(kv_room(memory, round(rest), 0.88) / GIB, 2) == 10.43
    assert round(kv_room(memory, round(rest), 0.55) / GIB, 1) == -20.6


def test_what_a_fraction_leaves_is_said(case: Case) -> None:
    total = case.plan(1 << 40).total
    pool = 256 * TOKEN
    memory = 2 * (total + case.own)
    message = refusal(case.plan, memory, memory_fraction=0.4)
    short = total - pool + case.own - 0.4 * memory
    said = f"of {memory / GIB:.2f} GiB, which is {short / GIB:.2f} GiB too little even without KV; the smallest that "
    assert short > 0 and f"at serving.memory_fraction 0.4 {said}" in message
    assert least(message) == 0.5


def test_the_least_fraction_compiles_and_a_hundredth_less_does_not(case: Case) -> None:
    needed = case.plan(1 << 40).total + case.own
    numbers = random.Random(5)
    for _ in range(200):
        memory = int(needed * numbers.uniform(1.0, 60.0))
        fraction = least(refusal(case.plan, memory, memory_fraction=0.01))
        assert case.plan(memory, memory_fraction=fraction).total + case.own == needed
        if fraction > 0.01:
            again = refusal(case.plan, memory, memory_fraction=round(fraction - 0.01, 2))
            assert least(again) == fraction


def test_a_fraction_of_exactly_what_is_needed_compiles(case: Case) -> None:
    """Hundredths are decimals: 0.57 of 100 bytes are 57, though 0.57 * 100 in binary is less."""
    assert Serving(memory_fraction=0.57).share_of(100) == 57
    needed = case.plan(1 << 40).total + case.own
    for hundredths in (each for each in range(1, 101) if 100 * needed % each == 0):
        memory = 100 * needed // hundredths
        assert case.plan(memory, memory_fraction=hundredths / 100).capacity == needed - case.own


def test_more_than_all_is_not_suggested(case: Case) -> None:
    needed = case.plan(1 << 40).total + case.own
    assert "smallest" not in refusal(case.plan, needed - 1, memory_fraction=0.9)
    assert least(refusal(case.plan, needed, memory_fraction=0.9)) == 1.0


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_longest_context_compiles_and_a_page_more_does_not(case: Case, sequences: int) -> None:
    """Of contexts that no list is shortened for."""
    served: dict[str, Any] = {"max_sequences": sequences, "prefill_chunk": 32, "page_tokens": 32}
    whole = case.plan(1 << 40, **served)
    numbers = random.Random(7)
    for _ in range(100):
        memory = whole.total + case.own - numbers.randrange(1, whole.kv_pool * 7 // 8)
        message = refusal(case.plan, memory, **served, memory_fraction=1.0)
        found = re.search(r"; the longest context that fits is (\d+)$", message)
        assert found, message
        longest = int(found[1])
        fits = case.plan(memory, **served, memory_fraction=1.0, max_context=longest)
        assert fits.kv_pool == sequences * longest * TOKEN
        with pytest.raises(TapeoutError):
            case.plan(memory, **served, memory_fraction=1.0, max_context=longest + 32)


def test_headroom_stays_free_where_there_is_no_fraction(case: Case) -> None:
    plan = case.plan(1 << 34, headroom=1 << 30)
    assert plan.capacity == (1 << 34) - (1 << 30) - case.own
    message = refusal(case.plan, 1 << 28)
    assert " are there after serving.headroom; raise topology.memory or use smaller formats" in message
    assert message.startswith("the model does not fit in memory at any context: weights ")


def test_tokens_that_fit_fill_the_pool(case: Case) -> None:
    plan = case.plan(1 << 34, memory_fraction=0.5)
    room = (1 << 33) - case.own - (plan.total - plan.kv_pool)
    # pages of 32 tokens are 4,096 bytes a layer, so that nothing is lost to rounding
    assert plan.tokens_that_fit == room // (32 * TOKEN) * 32
