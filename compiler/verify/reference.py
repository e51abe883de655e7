"""The independent reference: transformers on the checkpoint itself, in float32 with eager attention."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tapeout.runtime.errors import TapeoutError

Floats = npt.NDArray[np.float32]
Visit = Callable[[str, Floats], Floats | None]

# Values that no module of transformers returns, by the modules that receive them: the first that exists.
RECEIVED_BY = {
    "self_attn.attention": ("self_attn.o_proj",),
    "self_attn.v_b_proj": ("self_attn.o_proj",),
    "mlp.act": ("mlp.down_proj",),
    "attention_residual": ("pre_feedforward_layernorm", "post_attention_layernorm"),
}


@contextlib.contextmanager
def quick_gguf() -> Generator[None]:
    """Inside, gguf-py reads metadata three times as fast, if it is there: not every string is a memmap of its own."""
    try:
        gguf: Any = importlib.import_module("gguf")
    except ModuleNotFoundError:
        yield
        return
    slow: Any = gguf.GGUFReader

    class Reader(slow):
        @property
        def data(self) -> npt.NDArray[np.uint8]:
            return self._bytes

        @data.setter
        def data(self, value: npt.NDArray[np.uint8]) -> None:
            self._bytes = value.view(np.ndarray)

    gguf.GGUFReader = Reader
    try:
        yield
    finally:
        gguf.GGUFReader = slow


class Reference:
    """A loaded transformers model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.name = f"{type(model).__name__} of transformers {library('transformers').__version__}, float32, eager"

    @classmethod
    def open(cls, path: Path, container: str) -> Reference:
        """From a checkpoint folder or a GGUF.

        Raises TapeoutError for ONNX, which transformers does not read, and when a library of the extra ``verify`` is
        absent, or one that transformers needs for a quantized checkpoint.
        """
        if container == "onnx" and not any(path.glob("*.safetensors")):
            raise TapeoutError(
                f"{path}: transformers does not read ONNX; name a safetensors folder of the same model, "
                "or verify with --witness onnx"
            )
        transformers, torch = library("transformers"), library("torch")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        where, file = (path.parent, {"gguf_file": path.name}) if container == "gguf" else (path, {})
        try:
            with contextlib.redirect_stderr(io.StringIO()), quick_gguf():  # its progress bars cannot be turned off
                model = transformers.AutoModelForCausalLM.from_pretrained(where, **file, **options)
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            raise TapeoutError(
                f"{path}: transformers {transformers.__version__} cannot load this checkpoint as a reference "
                f"({str(error).splitlines()[0]}); verify with --witness onnx needs no transformers"
            ) from error
        return cls((_amended(model, path, options["dtype"]) if file else model).eval())

    def knows(self, op: str) -> bool:
        """Whether a module makes or receives the value."""
        return self._site(op) is not None

    def run(self, ids: Sequence[int], ops: Iterable[str], visit: Visit) -> Floats:
        """As a ``Witness`` does; values are replaced in place."""
        torch = library("torch")
        handles = [self._hook(op, visit) for op in dict.fromkeys(ops)]
        try:
            with torch.no_grad():
                return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()
        finally:
            for handle in handles:
                handle.remove()

    def _site(self, op: str) -> tuple[Any, bool] | None:
        """The module to watch, and whether its input (not its output) is the value."""
        if op in self.modules:
            return self.modules[op], False
        for suffix, readers in RECEIVED_BY.items():
            if op.endswith(f".{suffix}"):
                if op.endswith(".attention") and f"{op.removesuffix('attention')}kv_b_proj" in self.modules:
                    return None  # of latents, which transformers multiplies out before it attends
                names = (op.removesuffix(suffix) + reader for reader in readers)
                return next(((self.modules[name], True) for name in names if name in self.modules), None)
        return None

    def _hook(self, op: str, visit: Visit) -> Any:
        torch = library("torch")

        def see(value: Any) -> None:
            tensor: Any = cast(Any, value)[0] if isinstance(value, tuple) else value
            flat = tensor.flatten(2)[0] if tensor.dim() > 2 else tensor  # [1, positions, ...] or [positions, columns]
            replacement = visit(op, flat.numpy())
            if replacement is not None:
                tensor.copy_(torch.from_numpy(replacement).view(tensor.shape))

        site = self._site(op)
        assert site is not None, op
        module, received = site
        if received:
            return module.register_forward_pre_hook(lambda _module, args: see(args[0]))  # pyright: ignore[reportUnknownLambdaType]
        return module.register_forward_hook(lambda _module, _args, output: see(output))  # pyright: ignore[reportUnknownLambdaType]


def library(name: str) -> Any:
    """A library of the extra ``verify``. Raises TapeoutError when it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TapeoutError(
            f"the reference runs with {name}, which is not installed; pip install 'tapeout[verify]'"
        ) from error


def _amended(model: Any, path: Path, dtype: Any) -> Any:
    """transformers 5.24 drops rope scaling, rope divisors, windows and Gemma's softmax scale of a GGUF: set them.

    Read with gguf-py, so that nothing of Tapeout's own parsing is believed here.
    """
    gguf, torch = library("gguf"), library("torch")
    reader = gguf.GGUFReader(path)
    arch = _field(reader, "general.architecture")
    config: Any = model.config
    kind: Any = model.__class__
    changed = _rope_scaling(config, reader, arch)
    if arch == "gemma3":
        scalar = config.hidden_size / config.num_attention_heads if config.num_hidden_layers == 62 else config.head_dim
        changed |= config.query_pre_attn_scalar != scalar
        config.query_pre_attn_scalar = scalar
    config, kind, windowed = _windowed(config, kind, reader, arch)
    changed |= windowed
    if changed:
        rebuilt: Any = kind._from_config(config, attn_implementation="eager", dtype=dtype)
        rebuilt.load_state_dict(model.state_dict(), strict=False)
        rebuilt.tie_weights()
        model = rebuilt
    divisors = next((t for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    if divisors is not None:
        rotary: Any = model.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq / torch.from_numpy(np.array(divisors.data, np.float32))
    return model


def _rope_scaling(config: Any, reader: Any, arch: str) -> bool:
    kind = _field(reader, f"{arch}.rope.scaling.type") or "none"
    if kind == "none":
        return False
    whole = config.rope_parameters
    rope = whole.get("full_attention", whole)
    rope |= {"rope_type": kind, "factor": float(_field(reader, f"{arch}.rope.scaling.factor"))}
    original = _field(reader, f"{arch}.rope.scaling.original_context_length")
    if original is not None:
        rope["original_max_position_embeddings"] = int(original)
    return True


def _windowed(config: Any, kind: Any, reader: Any, arch: str) -> tuple[Any, Any, bool]:
    """Config and class with the file's window, and whether that changed them; a Llama with a window is a Mistral."""
    window = _field(reader, f"{arch}.attention.sliding_window") or None
    if arch == "llama" and getattr(config, "sliding_window", None) != window:
        kind = library("transformers").MistralForCausalLM
        return kind.config_class(**{**config.to_dict(), "sliding_window": window}), kind, True
    if arch not in ("qwen2", "qwen3") or window is None:
        return config, kind, False
    slides = _field(reader, f"{arch}.attention.sliding_window_pattern")
    if isinstance(slides, int):
        slides = [(layer + 1) % slides for layer in range(config.num_hidden_layers)]
    config.layer_types = ["sliding_attention" if each else "full_attention" for each in slides]
    config.sliding_window = window
    return config, kind, True


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()
