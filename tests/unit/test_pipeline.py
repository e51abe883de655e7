"""The pass infrastructure: order from signatures, verifiers, refusals, and reuse by input digest."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tapeout.compiler.pipeline import Pipeline, digest
from tapeout.passes import PIPELINE
from tapeout.runtime import TapeoutError


@dataclass(frozen=True)
class Source:
    value: int


@dataclass(frozen=True)
class Options:
    scale: int


@dataclass(frozen=True)
class Doubled:
    value: int

    def check(self) -> None:
        assert self.value < 1000, "too large"


@dataclass(frozen=True)
class Scaled:
    value: int


def double(source: Source) -> Doubled:
    return Doubled(2 * source.value)


def scale(doubled: Doubled, options: Options) -> Scaled:
    return Scaled(doubled.value * options.scale)


def again(source: Source) -> Doubled:
    return Doubled(source.value)


def backwards(scaled: Scaled) -> Source:
    return Source(scaled.value)


def untyped(source) -> Doubled:  # type: ignore[no-untyped-def]
    return Doubled(source.value)


def test_order_follows_the_signatures_not_the_list() -> None:
    pipeline = Pipeline(scale, double)
    assert [info.name for info in pipeline.passes] == ["double", "scale"]
    assert pipeline.run(Source(3), Options(5)).get(Scaled) == Scaled(30)
    assert pipeline.draw() == "double  Source -> Doubled\nscale   Doubled, Options -> Scaled"


def test_two_writers_a_cycle_and_missing_annotations_are_refused() -> None:
    with pytest.raises(ValueError, match="double and again both write Doubled"):
        Pipeline(double, again)
    with pytest.raises(ValueError, match="the passes form a cycle"):
        Pipeline(double, scale, backwards)
    with pytest.raises(ValueError, match="untyped must annotate every parameter"):
        Pipeline(untyped)


def test_a_missing_input_names_the_pass_and_the_type() -> None:
    with pytest.raises(ValueError, match="pass scale reads Options, which no pass writes"):
        Pipeline(double, scale).run(Source(1))


def test_a_failed_verifier_names_the_pass() -> None:
    with pytest.raises(TapeoutError, match="pass double made an invalid Doubled: too large"):
        Pipeline(double).run(Source(600))


def test_unchanged_inputs_reuse_results() -> None:
    pipeline, memo = Pipeline(double, scale), dict[str, object]()
    assert pipeline.run(Source(1), Options(2), memo=memo).reused == ()
    second = pipeline.run(Source(1), Options(3), memo=memo)
    assert second.reused == ("double",)
    assert second.get(Scaled) == Scaled(6)
    assert pipeline.run(Source(2), Options(3), memo=memo).reused == ()
    assert pipeline.run(Source(1), Options(2), memo=memo).reused == ("double", "scale")


def test_digest_tells_types_and_values_apart() -> None:
    assert digest(Source(1)) == digest(Source(1))
    assert len({digest(Source(1)), digest(Source(2)), digest(Options(1))}) == 3


def test_the_real_pipeline_reads_in_the_designed_order() -> None:
    assert [info.name for info in PIPELINE.passes] == [
        "ingest",
        "assign_formats",
        "partition",
        "fuse_weights",
        "plan_communication",
        "select_kernels",
        "plan_memory",
        "plan_graphs",
    ]
