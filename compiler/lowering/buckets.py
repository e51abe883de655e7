"""The closed set of launch lists: prefill chunks, decode batches, and how many rows get logits at once."""

from __future__ import annotations

from tapeout.compiler.spec import Serving

SMALL_PREFILL = 32
HEAD_ROWS = 16


def cpu_buckets(serving: Serving, context: int) -> tuple[tuple[str, int], ...]:
    """(phase, rows) of every CPU list: kernels work on the live rows, so few lists do."""
    chunk = min(serving.prefill_chunk, context)
    prefill = sorted({min(SMALL_PREFILL, chunk), chunk})
    head = sorted({1, max(HEAD_ROWS, serving.max_sequences)})
    return _listed(prefill, decode_rows(serving), head)


def cuda_buckets(serving: Serving, context: int) -> tuple[tuple[str, int], ...]:
    """(phase, rows) of every GPU list: a list's grids are fixed, so prefill chunks come in steps of four."""
    chunk = min(serving.prefill_chunk, context)
    prefill = [chunk]
    while prefill[-1] > SMALL_PREFILL:
        prefill.append(max(prefill[-1] // 4, min(SMALL_PREFILL, chunk)))
    return _listed(sorted(prefill), decode_rows(serving), (1, HEAD_ROWS))


def decode_rows(serving: Serving) -> tuple[int, ...]:
    """Batch sizes of the decode lists: those of the spec, or powers of two up to max_sequences."""
    if serving.decode_buckets is not None:
        return serving.decode_buckets
    sizes = [1]
    while sizes[-1] < serving.max_sequences:
        sizes.append(min(2 * sizes[-1], serving.max_sequences))
    return tuple(sizes)


def _listed(
    prefill: list[int], decode: tuple[int, ...], head: list[int] | tuple[int, ...]
) -> tuple[tuple[str, int], ...]:
    phases = (("prefill", prefill), ("decode", decode), ("head", head))
    return tuple((phase, rows) for phase, sizes in phases for rows in sizes)
