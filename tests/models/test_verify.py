"""`verify` on the real models: whole artifacts pass over 512 positions and more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapeout.compiler.driver import compile_spec
from tapeout.compiler.spec import Model, Serving, Spec
from tapeout.compiler.verify import verify_artifact

pytestmark = pytest.mark.models


@pytest.mark.parametrize(("name", "positions"), [("smollm2_gguf", 512), ("gemma3_gguf", 544)])
def test_whole_artifact_passes(name: str, positions: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source: Path = request.getfixturevalue(name)
    spec = Spec(model=Model(source=str(source)), serving=Serving(max_context=1024))
    compile_spec(spec, tmp_path / "artifact", cache=False)
    report = verify_artifact(tmp_path / "artifact", source=source, positions=positions)
    assert report.ok, report.text()
    assert report.logits.kl_mean < 1e-2
    assert report.logits.sure > positions // 4
