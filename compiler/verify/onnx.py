"""A second reference: the logical program as ONNX operators, run by ONNX Runtime one op at a time.

It shares the compiler's reading of the checkpoint and nothing of its lowering, kernels and packing. A model larger than
memory can be verified, since the weights of one op are held at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.compiler.checkpoints import open_checkpoint
from tapeout.compiler.emit.evaluate import Evaluator
from tapeout.compiler.ir import Graph, Op
from tapeout.compiler.onnx.driver import open_model
from tapeout.compiler.onnx.model import op_model
from tapeout.compiler.onnx.weights import float_weight
from tapeout.compiler.onnx.writer import TOKENS
from tapeout.compiler.recipes import Recipe
from tapeout.compiler.spec import Model
from tapeout.compiler.verify.reference import Floats, Visit, library


class OnnxReference:
    """A program and its weights, in the formats of the checkpoint."""

    def __init__(self, evaluator: Evaluator, graph: Graph, recipes: Mapping[str, Recipe]) -> None:
        self.evaluator, self.graph, self.recipes = evaluator, graph, recipes
        self.runtime = library("onnxruntime")
        self.name = f"the logical program in ONNX Runtime {self.runtime.__version__}, float32"

    @classmethod
    def open(cls, path: Path, section: Model) -> OnnxReference:
        """From a checkpoint and the section ``model`` of a spec. Raises TapeoutError."""
        evaluator, logical = open_model(open_checkpoint(path), section)
        return cls(evaluator, logical.graph, dict(logical.recipes))

    def knows(self, op: str) -> bool:
        """Whether the program has an op of that name."""
        return op in self.graph.by_name

    def run(self, ids: Sequence[int], ops: Iterable[str], visit: Visit) -> Floats:
        """Logits float32 [positions, vocab]; ``visit`` sees every named op's value [positions, columns] in order.

        What ``visit`` answers replaces the value for all that reads it.
        """
        wanted, values = frozenset(ops), dict[str, Floats]()
        readers = {name: len(found) for name, found in self.graph.consumers().items()}
        for op in self.graph.ops:
            value = self._value(op, ids, values)
            replacement = visit(op.name, value) if op.name in wanted else None
            values[op.name] = value if replacement is None else replacement
            for name in op.inputs:
                readers[name] -= 1
                if not readers[name]:
                    values.pop(name, None)
        return values[self.graph.output]

    def _value(self, op: Op, ids: Sequence[int], values: Mapping[str, Floats]) -> Floats:
        model, writer = op_model(self.graph, op)
        options = self.runtime.SessionOptions()
        options.log_severity_level = 3  # it warns of inputs that an op does not read
        session: Any = self.runtime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        given: dict[str, Any] = {TOKENS: np.array([ids], np.int64)}
        given |= {name: values[name][None] for name in op.inputs}
        given |= {writer.weight(slot): float_weight(self.evaluator, self.recipes[slot]) for slot in op.weights}
        return session.run([op.name], given)[0][0]
