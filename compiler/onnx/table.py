"""How each kind of op is written as ONNX operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tapeout.compiler.ir import Op
from tapeout.compiler.onnx import attention, basic, compressed, experts, rotary, streams
from tapeout.compiler.onnx.writer import GraphWriter, OpScope
from tapeout.runtime.errors import TapeoutError

WRITERS: Mapping[str, Callable[[OpScope], str]] = {
    "embed": basic.embed,
    "rmsnorm": basic.rmsnorm,
    "unit_norm": basic.unit_norm,
    "layernorm": basic.layernorm,
    "linear": basic.linear,
    "head_linear": basic.head_linear,
    "columns": basic.columns,
    "gated": basic.gated,
    "add": basic.add,
    "select": basic.select,
    "rope": rotary.rope,
    "rotate": rotary.rotate,
    "attention": attention.attention,
    "latent_attention": attention.latent_attention,
    "sparse_latent_attention": attention.sparse_latent_attention,
    "index_select": attention.index_select,
    "compress": compressed.compress,
    "select_entries": compressed.select_entries,
    "window_attention": compressed.window_attention,
    "compressed_attention": compressed.compressed_attention,
    "sparse_compressed_attention": compressed.sparse_compressed_attention,
    "repeat": streams.repeat,
    "hyper_weights": streams.hyper_weights,
    "hyper_mix": streams.hyper_mix,
    "hyper_join": streams.hyper_join,
    "route": experts.route,
    "route_by_token": experts.route_by_token,
    "expert_linear": experts.expert_linear,
    "expert_sum": experts.expert_sum,
}


def write_op(writer: GraphWriter, op: Op) -> None:
    """Write down one op. Raises TapeoutError for a kind that is not in the table."""
    write = WRITERS.get(op.kind)
    if write is None:
        raise TapeoutError(
            f"export-onnx: {op.name} is of the kind {op.kind}, which is not written as ONNX yet; "
            f"those that are: {', '.join(WRITERS)}"
        )
    writer.finish(op, write(OpScope(writer, op.name, op)))
