"""Cases and presets: plain data that names itself, and lengths that are always the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import SMALL, small

from graphsafe.bench.cases import LAYOUTS, OPERATORS, SIX_SWITCHES, Case, read_cases
from graphsafe.bench.presets import PRESETS, preset
from graphsafe.errors import ArgumentError


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_json_and_has_no_case_twice(name: str) -> None:
    cases = preset(name)
    assert len({case.key for case in cases}) == len(cases)
    for case in cases:
        again = Case.from_dict(json.loads(json.dumps(case.as_dict())))
        assert again.key == case.key
        assert again.lengths() == case.lengths()
        assert sum(case.lengths()) == case.live_tokens <= case.tokens
        assert len(case.lengths()) == case.live_sequences <= case.sequences
        assert min(case.lengths()) >= 1
        assert case.live_slots <= case.bucket.slots


def test_presets_cover_what_they_promise() -> None:
    assert {c.operator for c in preset("quick")} >= set(OPERATORS) - {"kda-step"}
    rfc = [c for c in preset("rfc") if c.operator == "kda"]
    assert {c.fill for c in rfc} == {0.1, 0.25, 0.5, 1.0}
    assert {(c.tokens, c.sequences) for c in rfc} == {(4096, 32)}
    heads = preset("heads")
    assert {c.value_heads for c in heads if c.operator == "gdn"} == {32, 16, 8, 4}
    assert {c.tokens for c in preset("lengths")} == {2**n for n in range(8, 16)}
    ascendc = [c for c in preset("ascendc") if c.group == "ascendc" and c.operator == "kda"]
    assert {c.heads for c in ascendc} == {96, 48, 24, 12, 64, 32, 16, 8}
    assert all(len(c.options) == 6 and c.tokens == 8192 and c.key_dim == c.value_dim == 128 for c in ascendc)
    assert {c.label.split(", ")[2] for c in ascendc} == {"six switches"}
    switches = [c for c in preset("ascendc") if c.group == "ascendc: switches" and c.operator == "kda"]
    assert {name for c in switches for name in c.options} == {*SIX_SWITCHES, "allow_neg_eigval"}
    assert len({c.label for c in switches}) == len(switches)  # a row says which switches are on


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"no preset 'rcf'; there are quick, peers, rfc"):
        preset("rcf")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_batches_of_a_case_have_two_layouts(layout: str) -> None:
    case = small(tokens=1000, sequences=7, fill=1.0, layout=layout)
    first, second = case.lengths(0), case.lengths(1)
    assert first != second
    assert sum(first) == sum(second) == 1000
    assert case.lengths(0) == first


def test_short_tails_are_one_token_into_a_chunk() -> None:
    lengths = small(tokens=2048, sequences=16, fill=1.0, layout="short-tail").lengths()
    assert {n % 64 for n in lengths[:-1]} == {1}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"operator": "gla"}, "operator='gla'"),
        ({"dtype": "float8"}, "dtype='float8'"),
        ({"fill": 0}, "fill=0"),
        ({"heads": 0}, "heads=0"),
        ({"tokens": 0}, "tokens=0"),
        ({"direction": "step"}, "direction='step'"),
        ({"operator": "tables", "direction": "forward+backward"}, "tables"),
        ({"tokens": 4, "sequences": 40, "fill": 1.0}, "cannot be 40 sequences"),
    ],
)
def test_a_wrong_case_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        small(**changes)
    assert named in str(raised.value)


def test_a_key_leaves_out_what_does_not_matter() -> None:
    assert small(group="a").key == small(group="b").key
    assert small(width=64).key == small(width=128).key
    assert small(heads=2, value_heads=2).key != small().key
    assert Case("tables", 64, dtype="float32").key == Case("tables", 64, dtype="float16").key
    assert small(sequences=1, layout="even").key == small(sequences=1).key
    assert small(layout="even").key != small().key


def test_a_label_tells_two_layouts_apart() -> None:
    assert {small(layout=layout).label for layout in ("even", "random", "short-tail")} == {
        "gdn 128x2 50%, 1/1x16, plain, fwd",
        "gdn 128x2 50% even, 1/1x16, plain, fwd",
        "gdn 128x2 50% short-tail, 1/1x16, plain, fwd",
    }
    listed = {case.key: case.label for name in PRESETS for case in preset(name)}
    assert len(set(listed.values())) == len(listed)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([SMALL, {"operator": "tables", "tokens": 64}]))
    cases = read_cases(path)
    assert [c.operator for c in cases] == ["gdn", "tables"]
    assert {c.group for c in cases} == {"mine"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no list of cases"),
        ("[3]", "a case is a JSON object"),
        ('[{"operator": "gdn"}]', "needs tokens"),
        ('[{"operator": "gdn", "tokens": 64, "token": 1}]', "a case has no token"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ArgumentError) as raised:
        read_cases(path)
    assert named in str(raised.value)
