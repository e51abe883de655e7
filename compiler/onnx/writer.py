"""Collects the nodes of an ONNX graph while ops are written down one after the other.

A value of the program is [batch, sequence, width]; the node that makes it bears the op's name, and the nodes on the
way there ``NAME/Kind``, so that a viewer shows the program's structure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from tapeout.compiler.ir import Graph, Op

OPSET = 20  # the first with Gelu
IR_VERSION = 9
TOKENS = "input_ids"
FLOAT, INT64, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL
ENDS = np.iinfo(np.int64).max


class GraphWriter:
    """The nodes and constants of a graph; ``widths`` are those of the program's values."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[tuple[str, tuple[int, ...], bytes], onnx.TensorProto] = {}
        self.widths: Mapping[str, int] = {name: width for op in graph.ops for name, width in op.outputs}
        self._shared: dict[str, str] = {}
        self._used: dict[str, int] = {}

    def weight(self, slot: str) -> str:
        """What a weight is called: values and weights share one name space, so a slot named as its op gets a suffix."""
        return f"{slot}.weight" if slot in self.widths else slot

    def add(self, kind: str, inputs: tuple[str, ...], prefix: str, outputs: int, attributes: Mapping[str, Any]) -> str:
        """Add a node; the name of its first output, further ones are NAME:1 and so on."""
        at = self._used.setdefault(f"{prefix}/{kind}", 0)
        self._used[f"{prefix}/{kind}"] += 1
        name = f"{prefix}/{kind}" + (f"_{at}" if at else "")
        made = [name, *(f"{name}:{index}" for index in range(1, outputs))]
        self.nodes.append(helper.make_node(kind, list(inputs), made, name=name, **attributes))
        return name

    def finish(self, op: Op, value: str) -> None:
        """Let the node that made an op's value, the last one, bear the op's name."""
        node = self.nodes[-1]
        assert node.output[0] == value, (op.name, value)
        node.output[0] = op.name
        node.name = op.name

    def constant(self, values: npt.NDArray[Any]) -> str:
        """An initializer; equal ones are one."""
        key = (values.dtype.str, values.shape, values.tobytes())
        known = self.constants.get(key)
        if known is None:
            known = numpy_helper.from_array(values, f"constants/{len(self.constants)}")
            self.constants[key] = known
        return known.name

    def shared(self, name: str, make: Callable[[Scope], str]) -> str:
        """A value that many ops read, made where the first one needs it."""
        if name not in self._shared:
            self._shared[name] = make(Scope(self, name))
        return self._shared[name]


@dataclass(frozen=True)
class Scope:
    """Where nodes are added under one prefix. Calling it adds a node with one output."""

    writer: GraphWriter
    prefix: str

    def __call__(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node of a kind; the name of its output."""
        return self.writer.add(kind, inputs, self.prefix, 1, attributes)

    def floats(self, *values: float) -> str:
        """A float32 constant: a scalar, or a vector of several."""
        array = np.array(values, np.float32)
        return self.writer.constant(array[0] if len(values) == 1 else array)

    def integers(self, *values: int) -> str:
        """An int64 vector."""
        return self.writer.constant(np.array(values, np.int64))

    def integer(self, value: int) -> str:
        """An int64 scalar."""
        return self.writer.constant(np.array(value, np.int64))

    def reshape(self, x: str, *shape: int) -> str:
        """x in another shape; 0 keeps a dimension, -1 is what is left over."""
        return self("Reshape", x, self.integers(*shape))

    def slice(self, x: str, start: int, stop: int = ENDS) -> str:
        """x[..., start:stop]."""
        return self("Slice", x, self.integers(start), self.integers(stop), self.integers(-1))

    def unsqueeze(self, x: str, *axes: int) -> str:
        """x with further dimensions of 1."""
        return self("Unsqueeze", x, self.integers(*axes))

    def transpose(self, x: str, *order: int) -> str:
        """x with its dimensions in another order."""
        return self("Transpose", x, perm=list(order))

    def top(self, x: str, count: str, *, largest: bool = True) -> tuple[str, str]:
        """The ``count`` (an int64 vector of 1) largest or smallest of the last dimension, in order, and where."""
        values = self.writer.add("TopK", (x, count), self.prefix, 2, {"axis": -1, "largest": int(largest)})
        return values, f"{values}:1"

    def length(self) -> str:
        """The number of positions, an int64 scalar."""
        return self.writer.shared("sequence", lambda at: at("Gather", at("Shape", TOKENS), at.integer(1), axis=0))

    def positions(self) -> str:
        """0, 1, 2 ... one for each position, int64."""
        return self.writer.shared("positions", lambda at: at("Range", at.integer(0), at.length(), at.integer(1)))


@dataclass(frozen=True)
class OpScope(Scope):
    """The scope of one op of the program."""

    op: Op

    @property
    def inputs(self) -> tuple[str, ...]:
        """The values it reads."""
        return self.op.inputs

    @property
    def weights(self) -> tuple[str, ...]:
        """Its weights, as they are called in the model."""
        return tuple(self.writer.weight(slot) for slot in self.op.weights)

    def width(self, value: str) -> int:
        """Columns of a value of the program."""
        return self.writer.widths[value]
