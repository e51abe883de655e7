"""What lies beside the weights in a folder as on the Hugging Face hub: the config and the tokenizer's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeout.compiler.checkpoints.base import load_json_object
from tapeout.runtime.errors import TapeoutError

QUANTIZATION = "hf_quant_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True)
class HubFiles:
    """config.json and, where they are there, generation_config.json, what ModelOpt says, and the tokenizer's files."""

    config: Path
    generation: Path | None
    tokenizer: Mapping[str, Path]
    quantization: Path | None = None

    @classmethod
    def beside(cls, folder: Path, what: str) -> HubFiles:
        """Those of a folder that holds ``what``. Raises TapeoutError when there is no config.json."""
        config, generation = folder / "config.json", folder / "generation_config.json"
        if not config.is_file():
            raise TapeoutError(f"{folder}: has no config.json; {what} needs the model's config.json beside it")
        tokenizer = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
        quantization = folder / QUANTIZATION
        found = [path if path.is_file() else None for path in (generation, quantization)]
        return cls(config, found[0], tokenizer, found[1])

    @property
    def paths(self) -> list[Path]:
        """All of them."""
        return [self.config, *self.tokenizer.values(), *(each for each in (self.generation, self.quantization) if each)]

    def read_config(self) -> dict[str, Any]:
        """config.json. Raises TapeoutError when it is not a JSON object."""
        return load_json_object(self.config)

    def read_generation_config(self) -> dict[str, Any]:
        """generation_config.json, or nothing."""
        return load_json_object(self.generation) if self.generation else {}

    def read_quantization(self) -> dict[str, Any]:
        """hf_quant_config.json, which ModelOpt writes, with its quant_method; or nothing."""
        return {"quant_method": "modelopt", **load_json_object(self.quantization)} if self.quantization else {}
