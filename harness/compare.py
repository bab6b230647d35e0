"""The one rule by which output is compared, and what an update may change under it."""

import difflib
import math
import re
from typing import NamedTuple

# Lines match one to one. A number with a point or an exponent may differ by ABSOLUTE + RELATIVE
# times the wanted value: backends round differently. All else, integers included, is text and must
# be the same, but for white space at the end of a line.

ABSOLUTE, RELATIVE = 1e-6, 1e-4
NUMBER = re.compile(
    r"(?<![\w.])[-+]?"  # not inside a word: the 1 of top1 and the 90 of sm_90 are text
    r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|nan|inf)"
    r"(?![\w.])"
)


class Difference(NamedTuple):
    """Lines that do not match: line number in the expected text, the lines, what is wrong."""

    line: int
    want: str
    got: str
    why: str


def split_lines(text):
    """The lines of a text, less white space at their ends and the end of the last line."""
    lines = [line.rstrip() for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def blocks(want_lines, got_lines):
    """Align two lists of lines by their text, every number read as 0.0, as difflib's opcodes."""
    want_text, got_text = (
        [NUMBER.sub("0.0", line) for line in lines] for lines in (want_lines, got_lines)
    )
    return difflib.SequenceMatcher(None, want_text, got_text, autojunk=False).get_opcodes()


def number_errors(want, got):
    """What is wrong with the numbers of a line whose other text is as wanted; [] if nothing."""
    errors = []
    for w, g in zip(NUMBER.findall(want), NUMBER.findall(got), strict=True):
        allowed = ABSOLUTE + RELATIVE * abs(float(w))
        off = abs(float(g) - float(w))
        if not (math.isfinite(float(w)) and math.isfinite(float(g))):
            if float(w) != float(g) and not (math.isnan(float(w)) and math.isnan(float(g))):
                errors.append(f"{g} is not {w}")
        elif off > allowed:
            errors.append(f"{g} is off by {off:.2g}, allowed {allowed:.2g}")
    return errors


def compare(want, got):
    """The Differences between two texts under the comparison rule; [] if they match."""
    want_lines, got_lines = split_lines(want), split_lines(got)
    found = []
    for kind, w0, w1, g0, g1 in blocks(want_lines, got_lines):
        for i in range(max(w1 - w0, g1 - g0)):
            w = want_lines[w0 + i] if w0 + i < w1 else ""
            g = got_lines[g0 + i] if g0 + i < g1 else ""
            if kind == "equal":
                errors = number_errors(w, g)
                if errors:
                    found.append(Difference(w0 + i + 1, w, g, "; ".join(errors)))
            elif w0 + i >= w1:
                found.append(Difference(w1 + 1, "", g, "line too many"))
            elif g0 + i >= g1:
                found.append(Difference(w0 + i + 1, w, "", "line missing"))
            else:
                found.append(Difference(w0 + i + 1, w, g, "text differs"))
    return found


def merge(want, got):
    """The new expected text: lines of `want` that match stay byte for byte, the rest is `got`'s."""
    kept = [line + "\n" for line in want.removesuffix("\n").split("\n")]
    want_lines, got_lines = split_lines(want), split_lines(got)
    merged = []
    for kind, w0, _, g0, g1 in blocks(want_lines, got_lines):
        for i in range(g1 - g0):
            line = got_lines[g0 + i]
            keep = kind == "equal" and not number_errors(want_lines[w0 + i], line)
            merged.append(kept[w0 + i] if keep else line + "\n")
    return "".join(merged)


def turns_false(differences):
    """Whether some line says False where the expected one says True."""

    def count(word, side):
        return sum(len(re.findall(rf"\b{word}\b", getattr(d, side))) for d in differences)

    return count("True", "got") < count("True", "want") and (
        count("False", "got") > count("False", "want")
    )
