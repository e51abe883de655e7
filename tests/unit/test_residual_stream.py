"""In whatever order a block adds into the residual stream, every GPU launch reads what its op reads. No GPU.

Launch lists run on symbols: a buffer holds an expression, and the logits must hold that of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from fake_builder import FakeBuilder

from tapeout.compiler.devices import CpuDevice, CudaDevice, load_device
from tapeout.compiler.ir import Builder, Graph
from tapeout.compiler.kernels.cuda.base import ADD, GATED_SILU, GpuKernel
from tapeout.compiler.lowering.cpu import lower_cpu
from tapeout.compiler.lowering.cuda import lower_cuda
from tapeout.compiler.recipes import Read
from tapeout.compiler.spec import Serving, Topology
from tapeout.compiler.stages import BuiltKernel, FusedModel, LogicalModel, QuantizedModel, SelectedModel, Span
from tapeout.passes.fuse_weights import fuse_weights
from tapeout.passes.partition import partition
from tapeout.runtime.errors import TapeoutError

Block = Callable[[Builder, str], str]


def norm(b: Builder, name: str, x: str) -> str:
    return b.rmsnorm(name, x, 1e-5)


def attention(b: Builder, at: str, x: str, layer: int = 1) -> str:
    q, k, v = (b.linear(f"{at}.{name}", x, 64, ("heads", "hidden"), fuse=f"{at}.qkv_proj") for name in "qkv")
    q, k = (b.rope(f"{name}_rope", name, "inv_freq", 16, 1.0) for name in (q, k))
    attended = b.attention(f"{at}.attention", (q, k, v), layer=layer, head_dim=16, scale=0.25, window=0)
    return b.linear(f"{at}.o_proj", attended, 64, ("hidden", "heads"))


def mlp(b: Builder, at: str, x: str) -> str:
    gate, up = (b.linear(f"{at}.{name}", x, 96, ("ffn", "hidden"), fuse=f"{at}.gate_up_proj") for name in ("g", "u"))
    return b.linear(f"{at}.down_proj", b.gated(f"{at}.act", gate, up, "silu"), 64, ("hidden", "ffn"))


def one_after_the_other(b: Builder, x: str) -> str:
    x = b.add("x1", x, attention(b, "attn", norm(b, "n1", x)))
    return b.add("x2", x, mlp(b, "mlp", norm(b, "n2", x)))


def one_norm_and_attention_added_first(b: Builder, x: str) -> str:
    h = norm(b, "h", x)
    x = b.add("x1", x, attention(b, "attn", h))
    return b.add("x2", x, mlp(b, "mlp", h))


def one_norm_and_both_added_last(b: Builder, x: str) -> str:
    h = norm(b, "h", x)
    attended, gated = attention(b, "attn", h), mlp(b, "mlp", h)
    return b.add("x2", b.add("x1", x, attended), gated)


def two_norms_and_attention_added_first(b: Builder, x: str) -> str:
    h1, h2 = norm(b, "h1", x), norm(b, "h2", x)
    x = b.add("x1", x, attention(b, "attn", h1))
    return b.add("x2", x, mlp(b, "mlp", h2))


def two_norms_and_both_added_last(b: Builder, x: str) -> str:
    attended = attention(b, "attn", norm(b, "h1", x))
    gated = mlp(b, "mlp", norm(b, "h2", x))
    return b.add("x2", b.add("x1", x, attended), gated)


def a_product_of_the_stream(b: Builder, x: str) -> str:
    return b.add("x1", x, b.linear("float", x, 64, ("hidden", "hidden")))


def a_product_of_its_norm(b: Builder, x: str) -> str:
    return b.add("x1", x, b.linear("float", norm(b, "h", x), 64, ("hidden", "hidden")))


def a_product_of_the_stream_read_twice(b: Builder, x: str) -> str:
    one, two = (b.linear(name, x, 64, ("hidden", "hidden")) for name in ("one", "half"))
    return b.add("x2", b.add("x1", x, one), two)


def a_norm_added_later(b: Builder, x: str) -> str:
    h = norm(b, "h", x)
    return b.add("x2", b.add("x1", x, attention(b, "attn", norm(b, "h1", x))), h)


def a_norm_added_to_what_it_normalises(b: Builder, x: str) -> str:
    return b.add("x1", x, norm(b, "h", x))


BLOCKS = (
    one_after_the_other,
    one_norm_and_attention_added_first,
    one_norm_and_both_added_last,
    two_norms_and_attention_added_first,
    two_norms_and_both_added_last,
    a_product_of_the_stream,
    a_product_of_its_norm,
    a_product_of_the_stream_read_twice,
    a_norm_added_later,
    a_norm_added_to_what_it_normalises,
)


def fused_with(block: Block) -> FusedModel:
    """One usual attention, then the block. Matrices are bf16; two are f16 and f32, and gate and up are f16."""
    b = Builder()
    x = b.embed("embed", 128, 64)
    x = block(b, b.add("x0", x, attention(b, "first", norm(b, "n0", x), layer=0)))
    graph = b.graph(b.linear("head", norm(b, "last", b.select("select", x)), 128, ("vocab", "hidden")))
    formats = {"float": "f32", "half": "f16", "mlp.g": "f16", "mlp.u": "f16"}
    recipes = tuple(
        (slot.name, Read(slot.name, slot.shape, formats.get(slot.name, "bf16" if len(slot.shape) == 2 else "f32")))
        for slot in graph.weights
    )
    logical = LogicalModel("hand-made", "", (), graph, recipes, "", 0, (), 128, 256)
    return fuse_weights(partition(QuantizedModel(logical, recipes, (), ()), Topology()))


def lower(block: Block) -> SelectedModel:
    device = load_device("h200")
    assert isinstance(device, CudaDevice)
    return lower_cuda(fused_with(block), [device], Serving(max_sequences=16), FakeBuilder())


def added(*terms: str) -> str:
    return f"({' + '.join(sorted(terms))})"


def expected(graph: Graph, value: str) -> str:
    """A value of the program; a fused product counts as a whole, and rotation as a part of attention."""
    op = next(op for op in graph.ops if value in dict(op.outputs))
    inputs = [expected(graph, name) for name in op.inputs]
    if op.kind in ("rope", "select"):
        return inputs[0]
    if op.kind == "add":
        return added(*inputs)
    return f"{op.kind}({', '.join([*op.weights, inputs[0]] if inputs else op.weights)})"


def computed(selected: SelectedModel, name: str) -> str:
    """What a list leaves in the logits."""
    kernels = {built.kernel.name: built.kernel for built in selected.kernels if isinstance(built, BuiltKernel)}
    (program,) = [program for program in selected.programs if program.name == name]
    held: dict[str, str] = {}
    for launch in program.launches:
        kernel, args = kernels[launch.kernel], dict[str, Any](launch.args)
        if kernel.template == "sample":
            continue
        source = args.get("x", args.get("qkv"))
        place = args.get("y", args.get("out")).buffer
        assert source != Span(place) or kernel.template not in ("gemv", "linear"), f"{launch.op}: blocks race"
        new = result(kernel, args, held[source.buffer] if source else "")
        held[place] = added(held[place], new) if adds(kernel) else new
    return held[selected.logits]


def result(kernel: GpuKernel, args: Mapping[str, Any], x: str) -> str:
    """What a launch stores, or adds to what is there."""
    match kernel.template:
        case "embed":
            return f"embed({args['w'].weight})"
        case "rmsnorm" | "rmsnorm_add":
            return f"rmsnorm({args['weight'].weight}, {x})"
        case "add" | "cast":
            return x
        case "attention_decode":
            return f"attention({x})"
        case "gemv" | "linear":
            x = f"rmsnorm({args['norm'].weight}, {x})" if args.get("norm") else x
            product = f"linear({args['w'].weight}, {x})"
            return f"gated({product})" if dict(kernel.defines)["EPILOGUE"] == GATED_SILU else product
        case other:
            raise AssertionError(other)


def adds(kernel: GpuKernel) -> bool:
    return kernel.template in ("add", "rmsnorm_add") or dict(kernel.defines).get("EPILOGUE") == ADD


@pytest.mark.parametrize("name", ["decode.1", "decode.16"])
@pytest.mark.parametrize("block", BLOCKS)
def test_every_launch_reads_what_its_op_reads(block: Block, name: str) -> None:
    selected = lower(block)
    selected.check()
    assert computed(selected, name) == expected(selected.fused.graph, selected.fused.graph.output)


def test_branches_added_to_each_other_before_the_stream_are_refused() -> None:
    def block(b: Builder, x: str) -> str:
        h = norm(b, "h", x)
        return b.add("x1", x, b.add("both", attention(b, "attn", h), mlp(b, "mlp", h)))

    with pytest.raises(TapeoutError, match="both: the GPU kernels add into the residual stream, which neither"):
        lower(block)


def test_head_norms_of_two_eps_are_refused() -> None:
    def block(b: Builder, x: str) -> str:
        q, k, v = (b.linear(name, x, 64, ("heads", "hidden"), fuse="qkv_proj") for name in "qkv")
        q, k = b.rmsnorm("q_norm", q, 1e-5, 16), b.rmsnorm("k_norm", k, 1e-6, 16)
        q, k = (b.rope(f"{name}_rope", name, "inv_freq", 16, 1.0) for name in (q, k))
        attended = b.attention("attn", (q, k, v), layer=1, head_dim=16, scale=0.25, window=0)
        return b.add("x1", x, b.linear("o", attended, 64, ("hidden", "heads")))

    match = "attn: q and k are normalised with eps 1e-06 and 1e-05; kernels take one for both"
    with pytest.raises(TapeoutError, match=match):
        lower(block)
    cpu = load_device("cpu")
    assert isinstance(cpu, CpuDevice)
    with pytest.raises(TapeoutError, match=match):
        lower_cpu(fused_with(block), cpu, Serving())


def with_experts(b: Builder, x: str) -> str:
    """What only CPU kernels serve so far."""
    h = norm(b, "n1", x)
    route = b.route("route", b.linear("gate", h, 4, ("experts", "hidden")), top_k=2, score="softmax", normalize=True)
    gate, up = (b.expert_linear(f"e.{name}", h, route, 4, 32, ("experts ffn", "hidden")) for name in ("g", "u"))
    y = b.expert_sum("e.down", b.gated("e.act", gate, up, "silu"), route, 4, 64, ("experts hidden", "ffn"))
    return b.add("x1", x, y)


def with_a_limit(b: Builder, x: str) -> str:
    """A clamped gate."""
    h = norm(b, "n1", x)
    gate, up = (b.linear(f"mlp.{name}", h, 64, ("ffn", "hidden")) for name in ("g", "u"))
    return b.add("x1", x, b.linear("mlp.down", b.gated("act", gate, up, "silu", 10.0), 64, ("hidden", "ffn")))


@pytest.mark.parametrize(("block", "op"), [(with_experts, "route: no GPU kernel serves this route"),
                                           (with_a_limit, "act: no GPU kernel serves this gated")])  # fmt: skip
def test_a_gpu_refuses_what_only_cpus_serve(block: Block, op: str) -> None:
    sentence = f"{op} yet; topology.device cpu does, and GPUs serve the dense families without attention sinks"
    with pytest.raises(TapeoutError) as caught:
        lower(block)
    assert str(caught.value) == sentence
