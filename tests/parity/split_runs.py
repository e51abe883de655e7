"""Compiles a model for several ranks and runs them as processes: what each of them computed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tapeout.compiler.driver import compile_spec
from tapeout.compiler.spec import Model, Quantization, Serving, Spec, Topology
from tapeout.runtime.ranks import run_ranks

Floats = npt.NDArray[np.float32]

POSITIONS = 100
PROMPT = 20
SERVING = {"kv_dtype": "f32", "max_context": 512, "max_sequences": 2, "page_tokens": 16, "prefill_chunk": 64}

RUN = """
import json, sys
import numpy as np
from tapeout.runtime import load
artifact, ids, prompt, out = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with load(artifact, threads=1) as model:
    logits = model.logits(ids)
    tokens = [step.token for step in model.generate(ids[:prompt], max_tokens=12)]
    np.savez(f"{out}/{model.backend.rank}.npz", logits=logits, tokens=tokens)
"""


def build(source: Path, output: Path, count: int, expert: int, quantization: Quantization | None = None) -> Path:
    topology = Topology.model_validate({"count": count, "parallel": {"expert": expert}})
    spec = Spec(model=Model(source=str(source)), quantization=quantization or Quantization(), topology=topology,
                serving=Serving.model_validate(SERVING))  # fmt: skip
    compile_spec(spec, output, cache=False)
    return output


def run(artifact: Path, ids: list[int], out: Path) -> list[tuple[Floats, list[int]]]:
    """Logits and greedy tokens of every rank."""
    comm = json.loads((artifact / "plan.json").read_bytes())["memory"]["comm"]
    out.mkdir()
    words = [sys.executable, "-c", RUN, str(artifact), json.dumps(ids), str(PROMPT), str(out)]
    assert run_ranks(comm["ranks"], words, comm["buffer_bytes"]) == 0
    found = [np.load(out / f"{rank}.npz") for rank in range(comm["ranks"])]
    return [(each["logits"], each["tokens"].tolist()) for each in found]
