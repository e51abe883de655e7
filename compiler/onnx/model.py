"""ONNX models of a whole program, and of one of its ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import helper

from tapeout.compiler.checkpoints.onnx import PRODUCER
from tapeout.compiler.ir import Graph, Op
from tapeout.compiler.onnx.table import write_op
from tapeout.compiler.onnx.writer import FLOAT, INT64, IR_VERSION, OPSET, TOKENS, GraphWriter
from tapeout.runtime.manifest import RUNTIME_VERSION

LOGITS = "logits"


def program_model(graph: Graph, metadata: Mapping[str, str]) -> tuple[onnx.ModelProto, GraphWriter]:
    """The whole program from ``input_ids`` to ``logits``; its weights are to be added as initializers."""
    writer = GraphWriter(graph)
    for op in graph.ops:
        write_op(writer, op)
    writer.nodes.append(helper.make_node("Identity", [graph.output], [LOGITS], name=LOGITS))
    outputs = [_value(LOGITS, graph.op(graph.output).width)]
    return _model(writer, [_tokens()], outputs, metadata), writer


def op_model(graph: Graph, op: Op) -> tuple[onnx.ModelProto, GraphWriter]:
    """One op alone: ``input_ids``, the values it reads and its weights go in, its value comes out."""
    writer = GraphWriter(graph)
    write_op(writer, op)
    slots = {slot: graph.slots[slot] for slot in op.weights}
    inputs = [
        _tokens(),
        *(_value(name, writer.widths[name]) for name in dict.fromkeys(op.inputs)),
        *(helper.make_tensor_value_info(writer.weight(name), FLOAT, slot.shape) for name, slot in slots.items()),
    ]
    return _model(writer, inputs, [_value(op.name, op.width)], {}), writer


def _tokens() -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(TOKENS, INT64, ["batch", "sequence"])


def _value(name: str, width: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, FLOAT, ["batch", "sequence", width])


def _model(
    writer: GraphWriter,
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    metadata: Mapping[str, str],
) -> onnx.ModelProto:
    graph = helper.make_graph(writer.nodes, "tapeout", inputs, outputs, list(writer.constants.values()))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name=PRODUCER)
    model.ir_version = IR_VERSION
    model.producer_version = RUNTIME_VERSION
    helper.set_model_props(model, dict(metadata))
    return model
