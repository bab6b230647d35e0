"""What the exercises' properties try: named inputs, smallest first, and how each is judged.

The names stand in the exercises in teaching order. A judge looks at one thing only, so that the
first property to fail names the mistake and not its echo.
"""

import torch

from harness.exercise import Case, Property, unwritten, written_outside

INF, NAN = float("inf"), float("nan")


# --- Words ---------------------------------------------------------------------------------------


def short(values, most=6):
    """A few numbers in words."""
    values = torch.as_tensor(values).flatten().tolist()
    words = [f"{v:.5g}" if isinstance(v, float) else str(v) for v in values[:most]]
    return " ".join(words) + (" ..." if len(values) > most else "")


def place(index):
    """[1, 0] for an index into a tensor."""
    return "[" + ", ".join(str(int(i)) for i in index) + "]"


def first(wrong):
    """The first index at which a mask is true."""
    return tuple(wrong.nonzero()[0].tolist())


# --- Judges --------------------------------------------------------------------------------------


def is_written(name="z"):
    """Every element was written, whatever with."""

    def judge(out):
        parts = out if isinstance(out, list) else [out]
        names = name if isinstance(name, list) else [name]
        for one, tensor in zip(names, parts, strict=True):
            left = unwritten(tensor)
            if left.any():
                return (
                    f"{int(left.sum())} of {left.numel()} elements of {one} not written, "
                    f"{one}{place(first(left))} the first",
                    "a value in each",
                )
        return None

    return judge


def is_close(want, name="z", where=None, scale=None):
    """Values to 1e-5: relative to each value, or to the largest |value| if scale is "largest"."""
    want = want.double()

    def judge(out):
        # atol: a GPU may flush values under 2^-126 to 0.
        finite = want[want.isfinite()].abs()
        atol = 1e-5 * float(finite.max()) if scale == "largest" and finite.numel() else 1e-37
        right = torch.isclose(out.double(), want, rtol=1e-5, atol=atol, equal_nan=True)
        wrong = ~right if where is None else ~right & where
        if not wrong.any():
            return None
        index = first(wrong)
        # The row from its start, if the wrong value is among those shown; else from that value.
        start = index[-1] if index[-1] >= 6 else 0
        row, at = index[:-1], (*index[:-1], start)
        label = f"{name}{place(at)}" if start or not row else f"{name}{place(row)}"
        label = name if not row and not start else label
        return tuple(f"{label} = {short(x[row][start:])}" for x in (out, want))

    return judge


def sums_to_one(name="z"):
    """Every row sums to 1."""

    def judge(out):
        sums = out.double().sum(dim=1)
        wrong = ~torch.isclose(sums, torch.ones_like(sums), rtol=1e-5, atol=0)
        if not wrong.any():
            return None
        row = first(wrong)
        return f"{name}{place(row)} sums to {short(sums[row])}", "1"

    return judge


def stays_inside(name="z"):
    """Nothing was written before or after the output."""

    def judge(out):
        count = written_outside(out)
        return (f"{count} elements written outside of {name}", "none") if count else None

    return judge


def both(*judges):
    """The first verdict among judges."""
    return lambda out: next((said for judge in judges if (said := judge(out))), None)


# --- Softmax -------------------------------------------------------------------------------------


def softmax_case(rows, B0=1, B1=4, judge=None, text=None):
    x = torch.tensor(rows, dtype=torch.float32)
    text = text or short(x, 8)
    judge = judge or is_close(torch.softmax(x.double(), dim=1))
    return Case(
        f"x {list(x.shape)} = {text}, B0 = {B0}, B1 = {B1}", (x,), {"B0": B0, "B1": B1}, judge
    )


SOFTMAX = {
    "every element of z is written": Property(
        lambda: [
            softmax_case([[0, 1, 2, 3]], judge=is_written()),
            softmax_case([[0, 1, 2, 3], [3, 2, 1, 0]], judge=is_written()),
            softmax_case([[0, 1, 2, 3, 4, 5, 6, 7]], judge=is_written()),
        ],
        "Which columns of which row does the last loop's tl.store reach?",
        "Program i owns row i (with B0 = 1), which begins at x_ptr + i * T and z_ptr + i * T. The "
        "last loop must visit every block: for start in range(0, T, B1).",
    ),
    "every row sums to 1": Property(
        lambda: [softmax_case([[0, 1, 2, 3]], judge=sums_to_one())],
        "Divide e^(x - row_max) by the sum of the same values over the whole row.",
        "Both the numerator and the sum must subtract the same maximum. A maximum that is not kept "
        "(row_max = new_max) is still -inf at the end, and x - -inf is inf.",
    ),
    "relative error below 1e-5": Property(
        lambda: [softmax_case([[0, 1, 2, 3]])],
        "The sum is right, the values are not: is the function e^x, to 8 digits?",
        "e^x is tl.exp(x), or tl.exp2(1.44269504 * x). A base other than e also gives "
        "rows that sum "
        "to 1.",
    ),
    "two blocks: both count in the sum": Property(
        lambda: [softmax_case([[0] * 8]), softmax_case([[1] * 4 + [0] * 4])],
        "A block's sum is added to what the row had before: +=.",
        "The loop sees one block at a time; row_sum_exp carries what earlier blocks gave.",
    ),
    "the maximum of an early block is kept": Property(
        lambda: [softmax_case([[80, 0, 0, 0, -20, -20, -20, -20]])],
        "row_max is the larger of the old row_max and this block's maximum.",
        "tl.max sees one block. Without tl.maximum(row_max, ...) a later block's smaller maximum "
        "replaces it, and e^(80 + 20) is past float32.",
    ),
    "a maximum that rises rescales the sum": Property(
        lambda: [softmax_case([[0] * 4 + [1] * 4]), softmax_case([[0, 1, 2, 3, 4, 5, 6, 7]])],
        "The old sum is relative to the old maximum: multiply it by e^(old - new).",
        "d_j = d_(j-1) * e^(m_(j-1) - m_j) + e^(x_j - m_j). The factor is at most 1, "
        "and is applied "
        "before row_max = new_max forgets the old maximum.",
    ),
    "T not a multiple of B1: the tail adds nothing": Property(
        lambda: [softmax_case([[-1, -2, -3]]), softmax_case([[-5] * 6])],
        "Mask the load with cols < T, and let the other lanes read what adds nothing: not 0.",
        "e^0 is 1: a lane that reads 0 adds to the sum. e^-inf is 0, and no maximum takes -inf, so "
        'other=float("-inf") is right in every pass. NaN came if a lane past the end was read.',
    ),
    "T not a multiple of B1: nothing is written past z": Property(
        lambda: [softmax_case([[-1, -2, -3]], judge=stays_inside())],
        "Mask the store with cols < T, as the load.",
        "Without the mask the last block's spare lanes overwrite the next row, or what "
        "lies behind.",
    ),
    "several rows per program": Property(
        lambda: [
            softmax_case([[0, 1, 2, 3], [3, 2, 1, 1]], B0=2),
            softmax_case([[0, 1, 2, 3], [3, 2, 1, 1], [1, 1, 2, 2]], B0=2),
        ],
        "Program i owns rows i * B0 to i * B0 + B0 - 1; maximum and sum are per row, axis=1.",
        "rows = tl.program_id(0) * B0 + tl.arange(0, B0)[:, None] and cols[None, :] "
        "give a block of "
        "[B0, B1]; tl.max and tl.sum with axis=1, keep_dims=True give [B0, 1].",
    ),
    "N0 not a multiple of B0: no row past the last is written": Property(
        lambda: [softmax_case([[0, 1, 2, 3]], B0=2, judge=stays_inside())],
        "Mask the store with rows < N0 too.",
        "The last program may own fewer than B0 rows of x; (rows < N0) & (cols < T) "
        "keeps it inside.",
    ),
    "large values": Property(
        lambda: [softmax_case([[1000, 999, 998, 997]])],
        "e^1000 is inf: subtract the row's maximum before e^x.",
        "e^(x - max) / sum e^(x - max) is the same softmax, with every exponent 0 or less.",
    ),
    "very negative values": Property(
        lambda: [
            softmax_case([[-200, -201, -202, -203]]),
            softmax_case([[-200, -201, -202]]),
            softmax_case([[-2e6, -2e6 - 1, -2e6 - 2]], text="-2000000 -2000001 -2000002"),
        ],
        "The maximum starts at -inf, and masked lanes read -inf: nothing finite is "
        '"minus infinity".',
        "A maximum of 0 that the row does not have makes every e^(x - 0) 0 at x = "
        "-200, and 0 / 0 is "
        "NaN. Where does a 0, or a -1e6, take part in the maximum?",
    ),
    "a first block of nothing but -inf": Property(
        lambda: [softmax_case([[-INF] * 4 + [1, 2]])],
        "-inf - -inf is NaN: while the maximum is -inf, subtract 0.",
        'shift = tl.where(new_max == float("-inf"), 0.0, new_max), and subtract shift instead of '
        "new_max: e^(-inf - 0) is 0, which is right for both the old sum and the new values.",
    ),
}


# --- Attention over scalars ----------------------------------------------------------------------


def scalar_case(q, k, v, B0=4, B1=4, judge=None, text=None):
    q, k, v = (torch.tensor(x, dtype=torch.float32) for x in (q, k, v))
    want = torch.softmax(q.double()[:, None] * k.double()[None, :], dim=1) @ v.double()
    shown = ", ".join(f"{n} [{len(x)}] = {short(x, 8)}" for n, x in (("q", q), ("k", k), ("v", v)))
    text = f"{text or shown}; B0 = {B0}, B1 = {B1}"
    return Case(text, (q, k, v), {"B0": B0, "B1": B1}, judge or is_close(want, scale="largest"))


FOUR = [0, 1, 2, 3]
SCALAR = {
    "every element of z is written": Property(
        lambda: [
            scalar_case(FOUR, FOUR, FOUR, judge=is_written()),
            scalar_case(FOUR * 2, FOUR, FOUR, judge=is_written()),
        ],
        "Program i owns the queries i * B0 to i * B0 + B0 - 1, and stores as many results.",
        "rows = tl.program_id(0) * B0 + tl.arange(0, B0); tl.store(z_ptr + rows, z, "
        "mask=rows < N0) "
        "after the loop over the keys.",
    ),
    "v = ones gives 1": Property(
        lambda: [scalar_case(FOUR, FOUR, [1] * 4)],
        "The weights must sum to 1: divide by the sum of the e^(score - maximum), "
        "once, at the end.",
        "exp_sum and z must subtract the same maximum.",
    ),
    "one block of keys: the weighted mean of v": Property(
        lambda: [scalar_case([1], FOUR, FOUR), scalar_case(FOUR, FOUR, FOUR)],
        "z = sum_j softmax_j(q * k_j) * v_j: are the scores q * k, and is v in the sum?",
        "qk is [B0, B1], q[:, None] * k[None, :]; the weights e^(qk - maximum) are summed with v "
        "over axis=1. e^x is tl.exp(x), or tl.exp2(1.44269504 * x).",
    ),
    "two blocks of keys: both count": Property(
        lambda: [scalar_case([1], [0] * 8, FOUR + [4, 5, 6, 7])],
        "Both running sums take a block in addition to what they had.",
        "The loop sees one block at a time; exp_sum and z carry what earlier blocks gave. A "
        "maximum that is not kept (qk_max = new_max) makes the next factor e^(-inf) = 0.",
    ),
    "a maximum that rises rescales both sums": Property(
        lambda: [scalar_case([1], [0] * 4 + [1] * 4, FOUR + [4, 5, 6, 7])],
        "exp_sum and z are relative to the old maximum: multiply both by e^(old - new).",
        "factor = e^(qk_max - new_max), at most 1, before qk_max = new_max. v = ones shows a sum "
        "that was forgotten: it must give 1 for any scores.",
    ),
    "T not a multiple of B1: a key past the end gets no weight": Property(
        lambda: [scalar_case([1], [-1, -2, -3], [1, 1, 1])],
        "A masked k of 0 has the score 0, which is not nothing: set the score to -inf "
        "where cols >= T.",
        'tl.where(cols[None, :] < T, qk, float("-inf")), after the loads are masked with cols < T. '
        "NaN came if a lane past the end was read.",
    ),
    "N0 not a multiple of B0: nothing is written past z": Property(
        lambda: [scalar_case([0, 1, 2], FOUR, FOUR, judge=stays_inside())],
        "Mask the store with rows < N0.",
        "The last program may own fewer than B0 queries.",
    ),
    "large scores": Property(
        lambda: [scalar_case([1], [1000, 999, 998, 997], FOUR)],
        "e^1000 is inf: subtract the running maximum of the scores before e^x.",
        "Every exponent is then 0 or less, and the largest is 0.",
    ),
    "very negative scores": Property(
        lambda: [
            scalar_case([-1], [200, 201, 202, 203], FOUR),
            scalar_case(
                [-2048], [2048, 2048.5, 2049, 2049.5], [1, 2, 3, 4],
                text="q [1] = -2048, k [4] = 2048 2048.5 2049 2049.5, v [4] = 1 2 3 4",
            ),
            scalar_case([-1], [200, 201, 202], [1, 1, 1]),
        ],
        'The maximum starts at -inf: nothing finite, not 0 and not -1e6, is "minus infinity".',
        "A start that is above every score stays the maximum: every weight is then "
        "e^(very negative) "
        "= 0, and 0 / 0 is NaN.",
    ),
    "a first block of keys whose score is -inf": Property(
        lambda: [scalar_case([1], [-INF] * 4 + [1, 2], FOUR + [4, 5])],
        "-inf - -inf is NaN: while the maximum is -inf, subtract 0.",
        'shift = tl.where(new_max == float("-inf"), 0.0, new_max), and subtract shift instead of '
        "new_max in the factor and in the weights.",
    ),
    "no key at all gives 0": Property(
        lambda: [scalar_case([1, 2], [], [], judge=is_close(torch.zeros(2)),
                             text="q [2] = 1 2, k [0], v [0]")],
        "Both sums are 0, and 0 / 0 is NaN: divide by 1 there.",
        "z / tl.where(exp_sum == 0.0, 1.0, exp_sum)",
    ),
}  # fmt: skip


# --- Attention -----------------------------------------------------------------------------------


def attention_reference(q, k, v, causal):
    """Attention in float64; causal: row i sees keys 0..i; without keys the result is 0."""
    scores = q.double() @ k.double().T * q.shape[1] ** -0.5
    if causal:
        future = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=1)
        scores = scores.masked_fill(future, -INF)
    return torch.softmax(scores, dim=-1) @ v.double()


def drawn(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def attention_case(q, k, v, text, causal, judge=None, fill=NAN, where=None):
    shape = f"M = {q.shape[0]}, N = {k.shape[0]}, D = {q.shape[1]}, blocks of 16"
    want = attention_reference(q, k, v, causal)
    judge = judge or is_close(want, "out", where, "largest")
    return Case(f"{shape}; {text}", (q, k, v), {"BLOCK_M": 16, "BLOCK_N": 16}, judge, fill)


def column(values, count=1):
    """A matrix of `count` equal columns."""
    return torch.as_tensor(values, dtype=torch.float32)[:, None].repeat(1, count)


def draws(M, N, D):
    return drawn(M, D, 0), drawn(N, D, 1), drawn(N, D, 2)


def attention_properties(causal):
    """The properties of attention, and with `causal` of attention with a diagonal."""

    def case(q, k, v, text="q, k, v drawn", **options):
        return attention_case(q, k, v, text, causal, **options)

    def ones(M, N, D, **options):
        q, k, _ = draws(M, N, D)
        judge = is_close(torch.ones(M, D), "out")
        return case(q, k, torch.ones(N, D), "q, k drawn, v = 1", judge=judge, **options)

    def leaks():
        q, k, v = draws(16, 16, 16)
        v[-1] = 1e30

        def judge(out):
            wrong = ~(out[:-1].abs() < 1e20)
            index = first(wrong) if wrong.any() else None
            return (
                wrong.any()
                and (f"out{place(index)} = {short(out[index])}", "less than 1e20")
                or None
            )

        return case(q, k, v, "v[15] = 1e30, which row 15 alone may see", judge=judge)

    def first_row():
        q, k, v = draws(16, 16, 16)
        return case(q, k, v, judge=lambda out: is_close(v[:1], "out")(out[:1]))

    def rising():
        j = torch.arange(32.0)
        # Each row of 16 equal numbers has the norm 4, which the scale 1/4 takes back: scores j / 4.
        return case(torch.ones(32, 16), column(j / 16, 16), column(j, 16),
                    "q = 1, k[j] = j / 16, v[j] = j")  # fmt: skip

    def leading_block():
        k = torch.tensor([-INF] * 16 + [1.0, 2])
        seen = torch.arange(18)[:, None] >= (16 if causal else 0)
        return case(torch.ones(18, 1), column(k), column(torch.arange(18.0)),
                    "q = 1, k = 16 x -inf, then 1 2; v[j] = j", where=seen)  # fmt: skip

    def one_column(q, k, text):
        return case(column(q), column(k), column([0, 1, 2, 3]), f"{text}; v[j] = j")

    def transposed():
        q, k, v = (drawn(16, 5, seed).t() for seed in range(3))
        return case(q, k, v, "q, k, v = drawn [16, 5], transposed")

    return {
        "every element of out is written": Property(
            lambda: [
                case(*draws(16, 16, 16), judge=is_written("out")),
                case(*draws(32, 16, 16), judge=is_written("out")),
            ],
            "Program i owns the queries i * BLOCK_M to i * BLOCK_M + BLOCK_M - 1, and stores them.",
            "tl.store(out_ptr + rows[:, None] * stride_om + dims[None, :] * stride_od, "
            "acc, mask=...), "
            "after the loop over the keys.",
        ),
        "keys past the diagonal are ignored": Property(
            lambda: [leaks()],
            "Row i sees keys 0 to i: set the score to -inf where cols > rows, before the maximum.",
            'tl.where(rows[:, None] >= cols[None, :], qk, float("-inf")): rows down, '
            'columns across.',
        ),
        "row 0 sees itself": Property(
            lambda: [first_row()],
            "Row 0 has one key, its own, so out[0] = v[0]: >= on the diagonal, not >.",
            "rows >= cols keeps the diagonal; rows > cols leaves row 0 without a key, and "
            "every other "
            "row without its own.",
        ),
        "v = ones gives ones": Property(
            lambda: [ones(16, 16, 16)],
            "The weights of a row must sum to 1: divide acc by l_i, once, after the loop.",
            "l_i and acc must use the same p = e^(qk - m_new).",
        ),
        "one block: the weighted mean of v": Property(
            lambda: [case(*draws(16, 16, 16))],
            "The scores are q k^T times `scale` = 1 / sqrt(D), in full float32; e, not 2, "
            "is the base.",
            'qk = tl.dot(q, tl.trans(k), input_precision="ieee") * scale; p = tl.exp(qk - '
            '...). On a '
            "GPU tl.dot cuts float32 to TF32 unless it is told not to.",
        ),
        "D narrower than the tile": Property(
            lambda: [case(*draws(16, 16, 8))],
            "Mask dims < D in every load, with other=0.0: a 0 adds nothing to a dot product.",
            "BLOCK_D is 16 or more while D is 8: lanes past D would read the next row.",
        ),
        "N not a multiple of the block: a key past the end gets no weight": Property(
            lambda: [ones(16, 3, 16, fill=0.0)],
            "A masked key of 0 has the score 0, which is not nothing: set it to -inf where "
            "cols >= N.",
            'tl.where(cols[None, :] < N, qk, float("-inf")), before the maximum is taken.',
        ),
        "N not a multiple of the block: NaN behind k and v is not read": Property(
            lambda: [case(*draws(5, 5, 8), "q, k, v drawn, NaN behind their last row")],
            "Mask the loads of k and v with cols < N too: a weight of 0 does not help, 0 * "
            "NaN is NaN.",
            "mask=(cols[:, None] < N) & (dims[None, :] < D), other=0.0, for both k and v.",
        ),
        "M not a multiple of the block: nothing is written past out": Property(
            lambda: [case(*draws(3, 16, 16), judge=stays_inside("out"))],
            "Mask the store with rows < M and dims < D.",
            "The last program may own fewer than BLOCK_M queries, and D may be less than BLOCK_D.",
        ),
        "two blocks of keys: both count": Property(
            lambda: [case(torch.zeros(32, 16), drawn(32, 16, 1), column(torch.arange(32.0), 16),
                          "q = 0, v[j] = j")],
            "l_i and acc take a block in addition to what they had, and the loop ends at "
            "the last key.",
            "With equal scores a row's result is the mean of the v it may see. In a causal "
            "kernel the "
            "last key that program i sees is the last query it owns, (i + 1) * BLOCK_M - 1.",
        ),
        "a maximum that rises rescales l_i and acc": Property(
            lambda: [rising()],
            "Both are relative to the old maximum: multiply both by alpha = e^(m_i - m_new).",
            "l_i * alpha and acc * alpha[:, None], before m_i = m_new. If only one is "
            "rescaled, v = 1 "
            "does not give 1.",
        ),
        "M and N differ: aligned top left": Property(
            lambda: [case(*draws(2, 5, 16)), case(*draws(5, 2, 16)), case(*draws(2, 20, 16))],
            "Row i sees keys 0 to i, and no key past N, whatever M and N are.",
            "No N - M in the mask; and rows past N see all N keys, so cols < N is still needed.",
        ),
        "strides: q, k and v are not contiguous": Property(
            lambda: [
                case(*drawn(4, 48, 0).chunk(3, dim=1), "q, k, v: column thirds of a drawn [4, 48]"),
                transposed(),
            ],
            "Step with the tensor's own strides: stride_qm, stride_qd, stride_kn, ... and "
            "not D and 1.",
            "Element [i, d] of q lies at q_ptr + i * stride_qm + d * stride_qd. Each of the four "
            "tensors has two strides of its own.",
        ),
        "large scores": Property(
            lambda: [
                one_column([1] * 4, [1000, 1001, 1002, 1003], "q = 1, k = 1000 1001 1002 1003")
            ],
            "e^1000 is inf: subtract the running maximum of the scores before e^x.",
            "Every exponent is then 0 or less, and the largest of each row is 0.",
        ),
        "very negative scores": Property(
            lambda: [
                one_column([-1] * 4, [203, 202, 201, 200], "q = -1, k = 203 202 201 200"),
                one_column([-2048] * 4, [2049.5, 2049, 2048.5, 2048],
                           "q = -2048, k = 2049.5 2049 2048.5 2048"),
            ],
            'm_i starts at -inf: nothing finite, not 0 and not -1e6, is "minus infinity".',
            "A start above every score stays the maximum: every p is then e^(very "
            "negative) = 0. The "
            "mask of a score needs -inf for the same reason.",
        ),
        "a first block of keys whose score is -inf": Property(
            lambda: [leading_block()],
            "-inf - -inf is NaN: while a row's maximum is -inf, subtract 0.",
            'shift = tl.where(m_new == float("-inf"), 0.0, m_new), and subtract shift '
            'instead of m_new '
            "in p and in alpha.",
        ),
        "no key at all gives 0": Property(
            lambda: [case(drawn(2, 16, 0), torch.empty(0, 16), torch.empty(0, 16), "no keys",
                          judge=is_close(torch.zeros(2, 16), "out"))],
            "l_i and acc are 0, and 0 / 0 is NaN: divide by 1 there.",
            "acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]",
        ),
    }  # fmt: skip


ATTENTION = attention_properties(causal=False)
CAUSAL_ATTENTION = attention_properties(causal=True)


# --- Gating --------------------------------------------------------------------------------------

GATES = ["w0", "w1", "idx0", "idx1"]


def gating_case(rows, judge, text=None):
    logits = rows if isinstance(rows, torch.Tensor) else torch.tensor(rows, dtype=torch.float32)
    text = text or short(logits, 8)
    return Case(f"logits {list(logits.shape)} = {text}", (logits,), {}, judge)


def are_ids(*wanted):
    """The ids of each token; None where any is right."""

    def judge(out):
        got = torch.stack(out[2:], dim=1).tolist()
        for token, (came, want) in enumerate(zip(got, wanted, strict=True)):
            if any(b is not None and a != b for a, b in zip(came, want, strict=True)):
                words = ["any" if b is None else str(b) for b in want]
                return (
                    f"token {token}: idx0 = {came[0]}, idx1 = {came[1]}",
                    f"idx0 = {words[0]}, idx1 = {words[1]}",
                )
        return None

    return judge


def are_distinct_ids(experts):
    """Two different ids, both of an expert."""

    def judge(out):
        pair = [int(x[0]) for x in out[2:]]
        if pair[0] != pair[1] and all(0 <= i < experts for i in pair):
            return None
        return f"idx0 = {pair[0]}, idx1 = {pair[1]}", f"two different ids from 0 to {experts - 1}"

    return judge


def are_ids_of_experts(experts):
    """Both ids are below E."""

    def judge(out):
        pair = [int(x[0]) for x in out[2:]]
        if all(0 <= i < experts for i in pair):
            return None
        return f"idx0 = {pair[0]}, idx1 = {pair[1]}", f"ids below E = {experts}"

    return judge


def are_weights(*wanted):
    """The weights of each token, to 1e-5."""

    def judge(out):
        return is_close(torch.tensor(wanted), "w0, w1 of token ")(torch.stack(out[:2], dim=1))

    return judge


def weights_sum_to_one(out):
    total = float(out[0][0] + out[1][0])
    if abs(total - 1) < 1e-5:
        return None
    return f"w0 = {short(out[0][0])}, w1 = {short(out[1][0])}, together {total:.5g}", "together 1"


TYPICAL = [[0.1, 0.9, -1, 2]]
GATING = {
    "every element of w0, w1, idx0, idx1 is written": Property(
        lambda: [
            gating_case(TYPICAL, is_written(GATES)),
            gating_case(TYPICAL * 2, is_written(GATES)),
        ],
        "Program i owns token i, and stores two weights and two ids for it.",
        "row = tl.program_id(0); four tl.store, each at its pointer + row.",
    ),
    "idx0 is the expert with the largest logit": Property(
        lambda: [gating_case(TYPICAL, are_ids((3, None)))],
        "tl.argmax(probs, axis=0) gives the index; tl.max gives the value.",
        "The softmax keeps the order, so the largest logit has the largest probability.",
    ),
    "two distinct experts": Property(
        lambda: [gating_case(TYPICAL, are_distinct_ids(4))],
        "Take the winner out of the race before the second tl.argmax.",
        'tl.where(experts == idx0, float("-inf"), probs): without it the same expert wins twice.',
    ),
    "idx1 is the expert with the second largest logit": Property(
        lambda: [gating_case(TYPICAL, are_ids((3, 1)))],
        "The second tl.argmax runs over the same probabilities, without the winner.",
        "Only the winner's lane changes, to -inf; the others keep their probabilities.",
    ),
    "the two weights sum to 1": Property(
        lambda: [gating_case(TYPICAL, weights_sum_to_one)],
        "Renormalise: divide both probabilities by their sum.",
        "The two weights mix two experts' outputs; raw probabilities would shrink the mixture, by "
        "another factor for every token.",
    ),
    "each weight is its expert's share": Property(
        lambda: [gating_case(TYPICAL, are_weights((0.7502601, 0.2497399)))],
        "w0 / w1 = e^(logit of idx0 - logit of idx1); w0 is the larger.",
        "Both come from one softmax over the row, in base e, and each is divided by w0 + w1.",
    ),
    "of equal logits, the lowest index first": Property(
        lambda: [
            gating_case([[0, 0, 0, 0]], are_ids((0, 1))),
            gating_case([[3, 2, 3, 2]], are_ids((0, 2))),
        ],
        "tl.argmax takes the lowest index by default (tie_break_left=True).",
        "The rule makes the choice the same everywhere; torch.topk promises none.",
    ),
    "E not a power of two: ids below E": Property(
        lambda: [gating_case([[-3, -2, -1, -4, -5]], are_ids_of_experts(5))],
        "Lanes past E must lose: mask the load with experts < E and read -inf, not 0.",
        'other=float("-inf"): e^-inf = 0, below every probability but an underflown '
        "one, with which "
        "it ties; the lower index, an expert's, then wins. NaN or another row came if it was read.",
    ),
    "E not a power of two: the right ids": Property(
        lambda: [
            gating_case([[-3, -2, -1, -4, -5]], are_ids((2, 1))),
            gating_case([[-3, -2, -1], [1, 2, 3]], are_ids((2, 1), (2, 1))),
        ],
        "Row i begins stride_m elements after row i - 1; BLOCK_E, a power of two, is "
        "larger than E.",
        "logits_ptr + row * stride_m + experts, masked with experts < E.",
    ),
    "large and very negative logits": Property(
        lambda: [
            gating_case([[200.1, 200.9, 199, 202]], are_weights((0.75026, 0.24974))),
            gating_case([[-199.1, -201, -198]], are_weights((0.75026, 0.24974))),
        ],
        "Subtract the row's maximum before e^x; padding that reads 0 must not be that maximum.",
        "e^200 is inf and e^-200 is 0 in float32; e^(x - max) is neither for the largest.",
    ),
    "a probability that underflows to 0: still two distinct experts": Property(
        lambda: [
            gating_case([[200, -1, 0, -2]], both(are_distinct_ids(4), are_weights((1.0, 0.0))))
        ],
        "Take the winner out with -inf: a probability can be 0, and then 0 ties with it.",
        "e^(-1 - 200) is 0 in float32. A winner that is set to 0 ties with all the others, and, as "
        "the lowest index, wins again.",
    ),
    "strides: rows that are part of wider ones": Property(
        lambda: [
            gating_case(
                torch.tensor([[1.0, 2, 3, 0, 9, 9], [1, 2, 3, 0, 9, 9]])[:, :4],
                are_ids((2, 1), (2, 1)),
                "1 2 3 0, 1 2 3 0, in rows of 6",
            )
        ],
        "Row i begins at i * stride_m, not at i * E.",
        "logits[:, :4] of a wider tensor keeps its stride; only within a row do "
        "experts lie side by side.",
    ),
}
