"""What is known of a case before it is measured: the plain values that a run fills in."""

from __future__ import annotations

from typing import Any

from graphsafe.bench.cases import Case

__all__ = ["blank_result"]


def blank_result(case: Case, provider: str) -> dict[str, Any]:
    """The result of ``provider`` for ``case``: right so far, without a check, a time or a figure."""
    bucket = case.bucket
    return {
        "case": case.as_dict(),
        "key": case.key,
        "series": case.series,
        "label": case.label,
        "provider": provider,
        "status": "ok",
        "reason": None,
        "refusals": {},
        "checks": None,
        "times": {},
        "launches": {},
        "peak_bytes": {},
        "live_bytes": 0,
        "graph": None,
        "floor": None,
        "utilisation": {
            "tokens": case.live_tokens / bucket.tokens,
            "sequences": case.live_sequences / bucket.sequences,
            "slots": case.live_slots / bucket.slots,
            "live_slots": case.live_slots,
            "slots_held": bucket.slots,
        },
    }
