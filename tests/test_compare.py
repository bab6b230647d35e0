"""The comparison rule: what matches, what does not, and what an update keeps."""

import pytest

from harness.compare import compare, merge, turns_false

MATCH = [
    ("x: 0.0000", "x: -0.0000"),
    ("x: 0.123456789", "x: 0.123456781"),
    ("x: 2.384185791015625e-07", "x: 5.1e-07"),
    ("x: nan", "x: nan"),
    ("x: nan", "x: -nan"),
    ("x: -inf", "x: -inf"),
    ("tensor([0., 1.])", "tensor([0., 1.])"),
    ("x: 1.0000e+00", "x: 1.0"),
    ("x: .5", "x: 0.5"),
    ("x: 100.0", "x: 100.005"),
    ("a\r\nb\r\n", "a\nb\n"),
    ("a  \nb\t", "a\nb\n"),
    ("a\n\nb\n", "a\n\nb"),
    ("", ""),
]
DIFFER = [
    ("x: 0.123456789", "x: 0.124456789"),
    ("x: 1e-05", "x: 2e-05"),
    ("x: 100.0", "x: 100.02"),
    ("x: 0.5", "x: -0.5"),
    ("x: 0.5", "x: nan"),
    ("x: nan", "x: 0.5"),
    ("x: 0.5", "x: inf"),
    ("x: inf", "x: -inf"),
    ("x: inf", "x: 1e300"),
    ("x: 1e300", "x: inf"),
    ("x: 3", "x: 4"),
    ("x: 1.0", "x: 1"),
    ("x: 1", "x: 1.0"),
    ("ok? True", "ok? False"),
    ("w0 is 0.5", "w1 is 0.5"),
    ("sm_90", "sm_80"),
    ("version 3.7.1", "version 3.7.2"),
    ("a 0.5", "a 0.5 0.5"),
    ("a 0.5 0.5", "a 0.5"),
    ("a\nb\n", "a\n"),
    ("a\n", "a\nb\n"),
    ("a\n", "a\n\n"),
    ("a b", "a  b"),
    (" a", "a"),
    ("a \0 b", "a 0.5 b"),
    ("a", ""),
    ("", "a"),
]


@pytest.mark.parametrize("want, got", MATCH)
def test_matches(want, got):
    assert compare(want, got) == []


@pytest.mark.parametrize("want, got", DIFFER)
def test_differs(want, got):
    assert compare(want, got) != []


def test_a_missing_line_is_reported_once_and_by_number():
    (difference,) = compare("a\nb\nc\nd\n", "a\nc\nd\n")
    assert (difference.line, difference.want, difference.got) == (2, "b", "")


def test_a_number_says_how_far_off_it_is():
    (difference,) = compare("x: 1.0 y: 2.0\n", "x: 1.0 y: 2.5\n")
    assert difference.why == "2.5 is off by 0.5, allowed 0.0002"


def test_an_update_keeps_matching_lines_byte_for_byte():
    want = "sum 1.00000001 \r\nold\nend 0.5"
    assert merge(want, "sum 1.0\nnew\nend 0.5\nmore\n") == (
        "sum 1.00000001 \r\nnew\nend 0.5\nmore\n"
    )


def test_true_to_false_is_seen_even_in_a_reworded_line():
    assert turns_false(compare("right? True\n", "right? False\n"))
    assert turns_false(compare("right? True\n", "is it right? False\n"))
    assert not turns_false(compare("right? False\n", "right? True\n"))
    assert not turns_false(compare("x: 1.0\n", "x: 2.0\n"))
