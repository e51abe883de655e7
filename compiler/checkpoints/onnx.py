"""ONNX: weights in a model's initializers, in the file or in external data files, beside a config.json.

Message and field numbers are those of onnx.proto; where external data lies: onnx/docs/ExternalData.md. Initializers
bear the names of the Hugging Face model, or, where an exporter transposed the weight of a product and gave it a name
of its own (``onnx::MatMul_123``, ``val_20``), the product's node says the module: in its name or its output's,
``/model/layers.0/mlp/up_proj/MatMul``, or in what torch.onnx notes of every node, the scopes it was in.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tapeout.compiler.checkpoints.base import Checkpoint, FileIdentity, TensorInfo, sorted_tensors
from tapeout.compiler.checkpoints.hub import HubFiles
from tapeout.compiler.checkpoints.protobuf import BYTES, VARINT, Field, ProtobufFile
from tapeout.runtime.errors import TapeoutError

MODEL = "model.onnx"
PRODUCER = "tapeout"
FORMATS = {1: ("f32", 4), 10: ("f16", 2), 16: ("bf16", 2)}
"""TensorProto.DataType of what is read: our format, bytes an element."""
CODES = {2: "UINT8", 3: "INT8", 17: "FLOAT8E4M3FN", 18: "FLOAT8E4M3FNUZ", 19: "FLOAT8E5M2", 20: "FLOAT8E5M2FNUZ",
         21: "UINT4", 22: "INT4", 23: "FLOAT4E2M1", 24: "FLOAT8E8M0", 25: "UINT2", 26: "INT2"}  # fmt: skip
MAX_DIMENSIONS = 8
SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata of a node: a list of modules, from the whole model to the innermost, and the op."""
DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")


@dataclass
class _Initializer:
    """One TensorProto; ``data`` is where its bytes lie in the model file, ``external`` what it says of another file."""

    name: str = ""
    shape: list[int] = field(default_factory=list[int])
    type: int = 0
    data: tuple[int, int] | None = None
    is_external: bool = False
    external: dict[str, str] = field(default_factory=dict[str, str])


@dataclass
class _Node:
    """One NodeProto; ``transposed`` is Gemm's transB, ``scopes`` the modules it was in."""

    op: str = ""
    name: str = ""
    inputs: list[str] = field(default_factory=list[str])
    outputs: list[str] = field(default_factory=list[str])
    scopes: list[str] = field(default_factory=list[str])
    transposed: bool = False


def is_onnx(start: bytes) -> bool:
    """Whether a file that begins so is an ONNX model: a ModelProto starts with its ir_version, then other fields."""
    return len(start) > 2 and start[0] == 0x08 and 0 < start[1] < 0x80 and start[2] != 0


def open_onnx(path: Path) -> Checkpoint:
    """Open an ONNX file beside its config.json, or a folder with model.onnx.

    Raises TapeoutError naming the file, the initializer and the rule, for anything malformed.
    """
    model = path / MODEL if path.is_dir() else path
    folder = model.parent
    hub = HubFiles.beside(folder, "an ONNX checkpoint")
    initializers, nodes = _read(model)
    named = list(_named(nodes, [name for name, each in initializers.items() if _is_weight(model, each)]))
    sources = {source for _, source, _ in named}
    places = {source: _place(model, initializers[source]) for source in sources}
    tensors: dict[str, TensorInfo] = {}
    for name, source, transposed in named:
        if name in tensors:
            raise TapeoutError(f"{model}: two initializers are the weight {name!r}; a weight has exactly one source")
        format, file, offset, size = places[source]
        shape = tuple(initializers[source].shape)
        tensors[name] = TensorInfo(name, shape, format, file, offset, size, transposed)
    files = {model, *hub.paths, *(info.file for info in tensors.values())}
    return Checkpoint(
        container="onnx",
        path=path,
        tensors=sorted_tensors(tensors.values()),
        config=hub.read_config(),
        generation_config=hub.read_generation_config(),
        tokenizer_files=hub.tokenizer,
        unlisted=tuple(sorted(initializers.keys() - sources)),
        files=tuple(FileIdentity.of(each) for each in sorted(files)),
    )


# ---- names ---------------------------------------------------------------------------------------------------------


def _named(nodes: list[_Node], weights: Collection[str]) -> Iterator[tuple[str, str, bool]]:
    """Weights as (their name in the model, initializer, whether it is stored [in, out]).

    Initializers that no name can be found for are constants of the graph. Should one be a weight after all, ingestion
    misses it.
    """
    found: dict[tuple[str, str], bool] = {}
    direct: set[str] = set()
    known = frozenset(weights)
    for node in nodes:
        factor = node.inputs[1] if node.op in ("MatMul", "Gemm") and len(node.inputs) > 1 else ""
        if factor in known:
            direct.add(factor)
            name = factor if DOTTED.fullmatch(factor) else _module(node)
            if name:
                found[name, factor] = not node.transposed
        if node.op == "Identity" and node.inputs[:1] and node.inputs[0] in known:
            # of equal tensors exporters keep one, and give its name to the others
            found.update({(name, node.inputs[0]): False for name in node.outputs if DOTTED.fullmatch(name)})
    found.update({(name, name): False for name in weights if name not in direct and DOTTED.fullmatch(name)})
    return ((name, source, transposed) for (name, source), transposed in found.items())


def _module(node: _Node) -> str | None:
    """The weight of the module whose product this is, from its scopes, or the path in its name or its output's."""
    if len(node.scopes) > 1 and node.scopes[-2]:
        return f"{node.scopes[-2]}.weight"
    for path in (node.name, *node.outputs):
        parts = path.split("/")
        if len(parts) > 2 and not parts[0]:
            return ".".join([*parts[1:-1], "weight"])
    return None


def _is_weight(model: Path, tensor: _Initializer) -> bool:
    """Whether it may be a weight. Refuses codes, which some tool quantized."""
    if tensor.type in CODES and len(tensor.shape) > 1:
        raise TapeoutError(
            f"{model}: initializer {tensor.name!r} is {CODES[tensor.type]} codes; weights are read from FLOAT, FLOAT16 "
            "and BFLOAT16 initializers: export the model unquantized, and quantize it with quantization.default"
        )
    if tensor.type not in FORMATS and tensor.name.endswith((".weight", ".bias")):
        raise TapeoutError(
            f"{model}: initializer {tensor.name!r} is of ONNX type {tensor.type}; "
            "weights are read from FLOAT (1), FLOAT16 (10) and BFLOAT16 (16) initializers"
        )
    return tensor.type in FORMATS


# ---- places --------------------------------------------------------------------------------------------------------


def _place(model: Path, tensor: _Initializer) -> tuple[str, Path, int, int]:
    """Format, file, offset and bytes of an initializer's data."""
    format, size = FORMATS[tensor.type]
    needed = math.prod(tensor.shape) * size
    where = f"{model}: initializer {tensor.name!r}"
    if not tensor.is_external:
        if tensor.data is None and needed:
            raise TapeoutError(f"{where} holds its values as single numbers; they must be raw data, or external data")
        offset, end = tensor.data or (0, 0)
        found = end - offset
        if found != needed:
            raise TapeoutError(f"{where} of shape {tensor.shape} needs {needed} bytes and has {found}; they must agree")
        return format, model, offset, needed
    file = _external_file(model, tensor.external.get("location", ""), where)
    offset = _number(tensor.external, "offset", 0, where)
    found = _number(tensor.external, "length", needed, where)
    if found != needed:
        raise TapeoutError(
            f"{where} of shape {tensor.shape} needs {needed} bytes and its external data says length {found}; "
            "they must agree"
        )
    held = file.stat().st_size
    if offset + needed > held:
        raise TapeoutError(
            f"{where} ends at byte {offset + needed} of {file.name}, which has {held}; "
            "the file is truncated: fetch it again"
        )
    return format, file, offset, needed


def _external_file(model: Path, location: str, where: str) -> Path:
    parts = PurePosixPath(location).parts
    if not parts or location.startswith("/") or "\\" in location or "\0" in location or ".." in parts:
        raise TapeoutError(f"{where} lies in {location!r}; external data must be a file in the folder of the model")
    file = model.parent / location
    with contextlib.suppress(OSError):  # a name longer than the file system's
        if file.is_file():
            return file
    raise TapeoutError(f"{where} lies in {location!r}, which is not in the folder; fetch it, it holds the weights")


def _number(external: Mapping[str, str], key: str, default: int, where: str) -> int:
    text = external.get(key, str(default))
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise TapeoutError(f"{where} has external data of {key} {text[:40]!r}; it must be a whole number of bytes")
    return int(text)


# ---- messages ------------------------------------------------------------------------------------------------------


def _read(model: Path) -> tuple[dict[str, _Initializer], list[_Node]]:
    """The initializers by name, and the nodes that say more of them."""
    try:
        with model.open("rb") as opened:
            size = model.stat().st_size
            file = ProtobufFile(model, opened, size)
            top = [part for part in file.fields(0, size) if part.number in (2, 7)]
            producers = [file.text(part) for part in top if part.number == 2]
            graphs = [part for part in top if part.number == 7]
            if producers == [PRODUCER]:
                raise TapeoutError(
                    f"{model}: was written by export-onnx, whose weights are ready to use and not as the family stores "
                    "them; name the checkpoint that it was made from"
                )
            if len(graphs) != 1:
                raise file.damaged(f"holds {len(graphs)} graphs; a model has exactly one")
            return _graph(file, graphs[0])
    except OSError as error:
        raise TapeoutError(f"{model}: cannot be read ({error.strerror})") from error


def _graph(file: ProtobufFile, graph: Field) -> tuple[dict[str, _Initializer], list[_Node]]:
    initializers: dict[str, _Initializer] = {}
    nodes: list[_Node] = []
    for part in file.parts(graph):
        if part.number == 1:
            node = _node(file, part)
            if node.op in ("MatMul", "Gemm", "Identity"):
                nodes.append(node)
        elif part.number == 5:
            tensor = _initializer(file, part)
            if tensor.name in initializers:
                raise TapeoutError(f"{file.path}: initializer {tensor.name!r} stands twice; each may stand once")
            initializers[tensor.name] = tensor
        elif part.number == 15:
            raise TapeoutError(f"{file.path}: has a sparse initializer; weights are read from dense ones")
    return initializers, nodes


def _node(file: ProtobufFile, message: Field) -> _Node:
    node = _Node()
    for part in file.parts(message):
        match part.number:
            case 1:
                node.inputs.append(file.text(part))
            case 2:
                node.outputs.append(file.text(part))
            case 3:
                node.name = file.text(part)
            case 4:
                node.op = file.text(part)
            case 5 if node.op in ("", "Gemm"):
                node.transposed |= _is_set(file, part, "transB")
            case 9:
                node.scopes.extend(re.findall(r"'([^']*)'", _pair(file, part, SCOPES)[1]))
            case _:
                pass
    return node


def _is_set(file: ProtobufFile, attribute: Field, name: str) -> bool:
    """Whether an AttributeProto is the integer ``name`` and not 0."""
    called, value = "", 0
    for part in file.parts(attribute):
        if part.number == 1:
            called = file.text(part)
        elif part.number == 3 and part.wire == VARINT:
            value = part.value
    return called == name and value != 0


def _initializer(file: ProtobufFile, message: Field) -> _Initializer:
    tensor = _Initializer()
    for part in file.parts(message):
        match part.number:
            case 1:
                tensor.shape.extend(file.numbers(part, MAX_DIMENSIONS))
                _check_shape(file, tensor.shape)
            case 2:
                tensor.type = part.value
            case 4 | 9 if part.wire == BYTES and part.stop > part.start:  # packed floats lie as raw data does
                if tensor.data is not None:
                    raise file.damaged(f"has an initializer with two pieces of data at byte {part.start}")
                tensor.data = part.start, part.stop
            case 8:
                tensor.name = file.text(part)
            case 13:
                key, value = _pair(file, part)
                tensor.external[key] = value
            case 14:
                tensor.is_external = part.value == 1
            case _:
                pass
    return tensor


def _check_shape(file: ProtobufFile, shape: list[int]) -> None:
    if len(shape) > MAX_DIMENSIONS or any(size >= 1 << 63 for size in shape):
        raise TapeoutError(
            f"{file.path}: an initializer has the shape {shape}; "
            f"at most {MAX_DIMENSIONS} dimensions from 0 and below 2^63 are allowed"
        )


def _pair(file: ProtobufFile, message: Field, wanted: str = "") -> tuple[str, str]:
    """Key and value of a StringStringEntryProto; the value only under the key ``wanted``, where one is."""
    parts = {part.number: part for part in file.parts(message)}
    key = file.text(parts[1]) if 1 in parts else ""
    return key, file.text(parts[2]) if 2 in parts and wanted in ("", key) else ""
