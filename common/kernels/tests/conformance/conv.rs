//! Causal convolution with history.

use std::ops::Range;

use hypic_kernels::{Backend, Cols, ConvFold, ConvStep, DeviceTensor};
use hypic_state::HostTensor;

use crate::support::{Rng, close, cpu_thread_pairs, dirty, reference, same_bits, values};

const TOLERANCE: f64 = 3e-6;

#[derive(Clone, Debug)]
enum Do {
    Rows(Range<usize>),
    Jump(usize),
    Save,
}

struct Case {
    x: HostTensor,
    col: usize,
    weight: HostTensor,
    bias: Option<HostTensor>,
    windows: Vec<HostTensor>,
    tails: Vec<HostTensor>,
    /// Per call, per sequence.
    calls: Vec<Vec<Vec<Do>>>,
}

/// Per sequence the outputs of its rows, and the windows left and saved.
struct Outcome {
    outs: Vec<Vec<f64>>,
    windows: Vec<Vec<f64>>,
    saves: Vec<Vec<f64>>,
}

fn run<B: Backend>(b: &B, case: &Case) -> Outcome {
    let (x, weight) = (b.upload(&case.x), b.upload(&case.weight));
    let bias = case.bias.as_ref().map(|t| b.upload(t));
    let tails: Vec<_> = case.tails.iter().map(|t| b.upload(t)).collect();
    let mut windows: Vec<_> = case.windows.iter().map(|t| b.upload(t)).collect();
    let channels = case.weight.shape()[0];
    let mut outs = vec![Vec::new(); windows.len()];
    let mut saved = vec![Vec::new(); windows.len()];
    for call in &case.calls {
        let count = |steps: &Vec<Do>| steps.iter().filter(|s| matches!(s, Do::Save)).count();
        let mut saves: Vec<Vec<_>> = call.iter().map(|s| (0..count(s)).map(|_| dirty(b)).collect()).collect();
        let mut folds = Vec::new();
        for ((steps, window), saves) in call.iter().zip(&mut windows).zip(&mut saves) {
            let mut saves = saves.iter_mut();
            let step = |step: &Do| match step {
                Do::Rows(rows) => ConvStep::Rows(rows.clone()),
                Do::Jump(tail) => ConvStep::Jump(&tails[*tail]),
                Do::Save => ConvStep::Save(saves.next().expect("one tensor per save")),
            };
            folds.push(ConvFold { window, steps: steps.iter().map(step).collect() });
        }
        let mut out = dirty(b);
        b.conv(Cols::new(&x, case.col), &weight, bias.as_ref(), &mut folds, &mut out);
        drop(folds);
        assert_eq!(out.shape(), [x.rows(), channels]);
        let out = values(b, &out);
        for (seq, steps) in call.iter().enumerate() {
            for step in steps {
                if let Do::Rows(rows) = step {
                    outs[seq].extend_from_slice(&out[rows.start * channels..rows.end * channels]);
                }
            }
            saved[seq].extend(saves[seq].iter().flat_map(|t| values(b, t)));
        }
    }
    Outcome { outs, windows: windows.iter().map(|t| values(b, t)).collect(), saves: saved }
}

fn base(rng: &mut Rng, channels: usize, kernel: usize, rows: usize, sequences: usize) -> Case {
    let (col, behind) = (rng.below(6), rng.below(4));
    let window = [kernel - 1, channels];
    Case {
        x: rng.tensor(&[rows, col + channels + behind], 1.0),
        col,
        weight: rng.tensor(&[channels, kernel], 0.6),
        bias: rng.chance(0.5).then(|| rng.tensor(&[channels], 0.5)),
        windows: (0..sequences).map(|_| rng.tensor(&window, 1.0)).collect(),
        tails: (0..3).map(|_| rng.tensor(&window, 1.0)).collect(),
        calls: Vec::new(),
    }
}

/// Runs of 0 to a few rows with jumps and saves between, over several sequences in one or two calls.
pub fn conv_matches<B: Backend>(b: &B) {
    let r = reference();
    for seed in 0..60 {
        let mut rng = Rng::new(1000 + seed);
        let (channels, kernel) = (rng.pick(&[1, 5, 16, 37, 96]), rng.pick(&[1, 2, 4, 4, 4]));
        let (sequences, rows) = (rng.between(1, 3), rng.between(0, 90));
        let mut case = base(&mut rng, channels, kernel, rows, sequences);
        let mut next = 0;
        let halfway = rng.between(0, rows);
        for end in [halfway, rows] {
            let mut call = vec![Vec::new(); sequences];
            while next < end {
                let seq = rng.below(sequences);
                let step = match rng.below(5) {
                    0 => Do::Jump(rng.below(3)),
                    1 => Do::Save,
                    2 => Do::Rows(next..next),
                    _ => Do::Rows(next..end.min(next + rng.pick(&[1, 1, 2, 3, 5, 40]))),
                };
                if let Do::Rows(rows) = &step {
                    next = rows.end;
                }
                call[seq].push(step);
            }
            case.calls.push(call);
        }
        let label = format!("{} conv seed={seed} channels={channels} kernel={kernel} {:?}", b.kernel_set(), case.calls);
        let (got, want) = (run(b, &case), run(&r, &case));
        for seq in 0..sequences {
            close(&format!("{label} out of {seq}"), &got.outs[seq], &want.outs[seq], TOLERANCE);
            same_bits(&format!("{label} window of {seq}"), &got.windows[seq], &want.windows[seq]);
            same_bits(&format!("{label} saves of {seq}"), &got.saves[seq], &want.saves[seq]);
        }
    }
}

/// One run, or cut in two at any row, in one call or in two, beside another sequence or alone: the same bits.
pub fn conv_is_cut_anywhere<B: Backend>(b: &B) {
    for seed in 0..12 {
        let mut rng = Rng::new(1100 + seed);
        let (channels, kernel) = (rng.pick(&[3, 16, 41]), rng.pick(&[2, 4]));
        let rows = 70;
        let mut case = base(&mut rng, channels, kernel, rows, 2);
        case.calls = vec![vec![vec![Do::Rows(0..rows)], vec![]]];
        let want = run(b, &case);
        let cut = rng.between(0, rows);
        let (first, second) = (Do::Rows(0..cut), Do::Rows(cut..rows));
        let ways = [
            vec![vec![vec![first.clone(), second.clone()], vec![]]],
            vec![vec![vec![first.clone()], vec![second.clone()]], vec![vec![second.clone()], vec![]]],
        ];
        for (way, calls) in ways.into_iter().enumerate() {
            case.calls = calls;
            let got = run(b, &case);
            let label = format!("{} conv seed={seed} cut at {cut}, way {way}", b.kernel_set());
            same_bits(&label, &got.outs[0], &want.outs[0]);
            same_bits(&label, &got.windows[0], &want.windows[0]);
        }
    }
}

pub fn threads_agree() {
    for (one, many) in cpu_thread_pairs() {
        let mut rng = Rng::new(1200);
        let mut case = base(&mut rng, 200, 4, 500, 2);
        case.calls = vec![vec![vec![Do::Rows(0..130), Do::Jump(1), Do::Rows(130..257)], vec![Do::Rows(257..500)]]];
        let (got, want) = (run(&many, &case), run(&one, &case));
        for seq in 0..2 {
            same_bits(&format!("{} threads conv", one.kernel_set()), &got.outs[seq], &want.outs[seq]);
        }
    }
}
