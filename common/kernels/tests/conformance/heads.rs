//! Ops on heads that lie beside each other: copies, linear layers of their own, rotations.

use std::ops::Range;

use hypic_kernels::{Backend, HeadCols, Positions, RopeSpec};
use hypic_state::{DType, HostTensor};

use crate::attention_case::rope_spec;
use crate::support::{Rng, close, cpu_thread_pairs, reference, same_bits, slice_rows, values};

const ROWS: [usize; 5] = [0, 1, 2, 13, 65];
const TOLERANCE: f64 = 5e-6;

/// Heads of `width` columns in a matrix of some columns more.
fn layout(rng: &mut Rng, heads: usize, width: usize) -> (HeadCols, usize) {
    let at = HeadCols { col: rng.below(6), stride: width + rng.below(5) };
    (at, at.col + heads * at.stride + rng.between(1, 4))
}

/// Whether column `c` belongs to a head.
fn is_within(at: HeadCols, heads: usize, width: usize, c: usize) -> bool {
    c >= at.col && (c - at.col) / at.stride < heads && (c - at.col) % at.stride < width
}

pub fn copies_match<B: Backend>(b: &B) {
    for seed in 0..20 {
        for rows in ROWS {
            let mut rng = Rng::new(5000 + seed);
            let (heads, width) = (rng.between(0, 5), rng.pick(&[1, 3, 16, 33]));
            let ((at_from, cols_from), (at_to, cols_to)) =
                (layout(&mut rng, heads, width), layout(&mut rng, heads, width));
            let (from, before) = (rng.tensor(&[rows, cols_from], 1.0), rng.tensor(&[rows, cols_to], 1.0));
            let mut to = b.upload(&before);
            b.copy_heads(&b.upload(&from), at_from, heads, width, &mut to, at_to);
            let mut want = before.to_f64();
            let from = from.to_f64();
            for (row, want) in want.chunks_mut(cols_to).enumerate() {
                for h in 0..heads {
                    let head = &from[row * cols_from + at_from.col + h * at_from.stride..][..width];
                    want[at_to.col + h * at_to.stride..][..width].copy_from_slice(head);
                }
            }
            let label = format!("{} copy_heads seed={seed} rows={rows} {heads} of {width}", b.kernel_set());
            same_bits(&label, &values(b, &to), &want);
        }
    }
}

struct Heads {
    weights: Vec<HostTensor>,
    at_x: HeadCols,
    at_out: HeadCols,
    x: HostTensor,
    out: HostTensor,
}

impl Heads {
    fn new(rng: &mut Rng, heads: usize, n: usize, k: usize, rows: usize) -> Self {
        let ((at_x, cols_x), (at_out, cols_out)) = (layout(rng, heads, k), layout(rng, heads, n));
        Heads {
            weights: (0..heads).map(|_| rng.tensor(&[n, k], 0.3)).collect(),
            at_x,
            at_out,
            x: rng.tensor(&[rows, cols_x], 1.0),
            out: rng.tensor(&[rows, cols_out], 1.0),
        }
    }

    fn run<B: Backend>(&self, b: &B, dtype: DType, rows: Range<usize>) -> Vec<f64> {
        let ws: Vec<_> = self.weights.iter().map(|w| b.pack(std::slice::from_ref(w), dtype)).collect();
        let mut out = b.upload(&slice_rows(&self.out, rows.clone()));
        b.head_linear(&ws, &b.upload(&slice_rows(&self.x, rows)), self.at_x, &mut out, self.at_out);
        values(b, &out)
    }
}

/// Sizes with no multiple of anything, and one as latent attention has it.
const SIZES: [(usize, usize, usize); 6] = [(1, 1, 1), (3, 5, 2), (2, 33, 17), (4, 40, 31), (5, 16, 64), (8, 128, 48)];

pub fn head_linear_matches<B: Backend>(b: &B) {
    let r = reference();
    for (seed, (heads, n, k)) in SIZES.into_iter().enumerate() {
        for dtype in [DType::F32, DType::Bf16] {
            for rows in ROWS {
                let case = Heads::new(&mut Rng::new(5100 + seed as u64), heads, n, k, rows);
                let label = format!("{} head_linear {dtype} {heads}x[{n}, {k}] rows={rows}", b.kernel_set());
                let (got, want) = (case.run(b, dtype, 0..rows), case.run(&r, dtype, 0..rows));
                close(&label, &got, &want, TOLERANCE);
                let cols = case.out.shape()[1];
                for (i, (got, before)) in got.iter().zip(case.out.to_f64()).enumerate() {
                    let inside = is_within(case.at_out, heads, n, i % cols);
                    assert!(inside || *got == before, "{label}: column {} is not the op's", i % cols);
                }
            }
        }
    }
}

fn rotated<B: Backend>(
    b: &B,
    x: &HostTensor,
    col: usize,
    heads: usize,
    d: usize,
    positions: &[Positions<'_>],
    spec: &RopeSpec,
) -> Vec<f64> {
    let mut x = b.upload(x);
    b.rotate(&mut x, col, heads, d, positions, &b.rope(spec));
    values(b, &x)
}

/// Rows cut into three sequences, one of them stretched.
fn three(positions: &[i64]) -> [Positions<'_>; 3] {
    let (first, rest) = positions.split_at(positions.len() / 3);
    let (second, third) = rest.split_at(rest.len() / 2);
    [Positions::plain(first), Positions { at: second, ntk_alpha: 2.75 }, Positions::plain(third)]
}

/// A stretched embedding is the one of a larger base: `base * alpha^(d / (d - 2))`.
pub fn stretched_rotations_have_a_larger_base<B: Backend>(b: &B) {
    for (pairs, alpha) in [(1, 3f64), (2, 1.5), (8, 3.0), (32, 40.0)] {
        let mut rng = Rng::new(5250 + pairs as u64);
        let (rows, width) = (9, 2 * pairs);
        let of_base = |base: f64| RopeSpec {
            offset: 0,
            inv_freq: (0..pairs).map(|i| base.powf(-2.0 * i as f64 / width as f64)).collect(),
            interleaved: pairs == 8,
            scale: 1.5,
        };
        let larger = if pairs == 1 { 1e4 } else { 1e4 * alpha.powf(width as f64 / (width as f64 - 2.0)) };
        let x = rng.tensor(&[rows, 2 * width], 1.0);
        let at: Vec<i64> = (0..rows).map(|_| rng.below(6000) as i64).collect();
        let stretched = [Positions { at: &at, ntk_alpha: alpha }];
        let got = rotated(b, &x, 0, 2, width, &stretched, &of_base(1e4));
        let want = rotated(b, &x, 0, 2, width, &[Positions::plain(&at)], &of_base(larger));
        // The frequencies are the same but for their last bits, which grow with the distance.
        close(&format!("{} rotate stretched {alpha}", b.kernel_set()), &got, &want, 1e-6);
        assert!(pairs == 1 || got != rotated(b, &x, 0, 2, width, &[Positions::plain(&at)], &of_base(1e4)));
    }
}

pub fn rotations_match<B: Backend>(b: &B) {
    let r = reference();
    for seed in 0..40 {
        for rows in ROWS {
            let mut rng = Rng::new(5200 + seed);
            let (heads, d) = (rng.between(0, 4), rng.pick(&[2, 7, 16, 64]));
            let (col, behind) = (rng.below(7), rng.below(4));
            let Some(spec) = rope_spec(&mut rng, d) else { continue };
            let x = rng.tensor(&[rows, col + heads * d + behind], 1.0);
            // Far positions take a large table.
            let farthest = if seed % 10 == 0 { 300_000 } else { 3000 };
            let positions: Vec<i64> = (0..rows).map(|_| rng.below(farthest) as i64 - 1000).collect();
            let label = format!("{} rotate seed={seed} rows={rows} {heads} of {d} at {col} {spec:?}", b.kernel_set());
            let positions = three(&positions);
            let got = rotated(b, &x, col, heads, d, &positions, &spec);
            close(&label, &got, &rotated(&r, &x, col, heads, d, &positions, &spec), TOLERANCE);
            let cols = x.shape()[1];
            let turns = spec.offset..spec.offset + 2 * spec.inv_freq.len();
            for (i, (got, x)) in got.iter().zip(x.to_f64()).enumerate() {
                let at = HeadCols { col: col + turns.start, stride: d };
                let inside = is_within(at, heads, turns.len(), i % cols);
                assert!(inside || *got == x, "{label}: column {} does not turn", i % cols);
            }
        }
    }
}

/// Known angles: a quarter turn in each of the two orders of pairs.
pub fn quarter_turns_are_as_written<B: Backend>(b: &B) {
    let x = HostTensor::from_f32([1, 6], &[9.0, 1.0, 2.0, 3.0, 4.0, 9.0]);
    for (interleaved, want) in [(false, [9.0, -3.0, -4.0, 1.0, 2.0, 9.0]), (true, [9.0, -2.0, 1.0, -4.0, 3.0, 9.0])] {
        let quarter = std::f64::consts::FRAC_PI_2;
        let spec = RopeSpec { offset: 1, inv_freq: vec![quarter, 5.0 * quarter], interleaved, scale: 2.0 };
        let got = rotated(b, &x, 0, 1, 6, &[Positions::plain(&[1])], &spec);
        let scaled: Vec<f64> = want.iter().map(|x| if *x == 9.0 { *x } else { 2.0 * x }).collect();
        close(&format!("{} quarter turn {interleaved}", b.kernel_set()), &got, &scaled, 1e-6);
    }
}

/// A row's result does not depend on the rows beside it.
pub fn head_rows_are_independent<B: Backend>(b: &B) {
    for (seed, (heads, n, k)) in SIZES.into_iter().enumerate() {
        let mut rng = Rng::new(5300 + seed as u64);
        let rows = 71;
        let case = Heads::new(&mut rng, heads, n, k, rows);
        let positions: Vec<i64> = (0..rows).map(|_| rng.below(9000) as i64).collect();
        let spec = RopeSpec { offset: 0, inv_freq: vec![0.3; k / 2], interleaved: seed % 2 == 0, scale: 1.0 };
        let turn = |rows: Range<usize>| {
            let at = case.at_x.col;
            rotated(b, &slice_rows(&case.x, rows.clone()), at, 1, k, &[Positions::plain(&positions[rows])], &spec)
        };
        let same = |op: &str, part: Vec<f64>, whole: &[f64], rows: Range<usize>| {
            let width = whole.len() / 71;
            let label = format!("{} {op} {heads}x[{n}, {k}] rows {rows:?}", b.kernel_set());
            same_bits(&label, &part, &whole[rows.start * width..rows.end * width]);
        };
        let turned = turn(0..rows);
        for dtype in [DType::F32, DType::Bf16] {
            let whole = case.run(b, dtype, 0..rows);
            for part in [0..1, 5..6, 3..20, 30..71] {
                same("head_linear", case.run(b, dtype, part.clone()), &whole, part.clone());
                same("rotate", turn(part.clone()), &turned, part);
            }
        }
    }
}

pub fn threads_agree() {
    for (one, many) in cpu_thread_pairs() {
        for dtype in [DType::F32, DType::Bf16] {
            for (heads, n, k, rows) in [(8, 128, 96, 100), (1, 300, 100, 400)] {
                let case = Heads::new(&mut Rng::new(5400), heads, n, k, rows);
                let label = format!("{} threads head_linear {dtype} {heads}x[{n}, {k}]", one.kernel_set());
                same_bits(&label, &case.run(&many, dtype, 0..rows), &case.run(&one, dtype, 0..rows));
            }
        }
    }
}
