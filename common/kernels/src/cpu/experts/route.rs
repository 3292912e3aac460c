//! Choosing the experts of each row, and listing the rows of each expert.
//!
//! A row is routed alone, by one order of operations, so that its experts and weights have the same bits in any batch.

use crate::cpu::math::{self, per_isa};
use crate::cpu::pool::{Pool, Shared};
use crate::cpu::{CpuTensor, Isa};
use crate::{DeviceTensor, RouteSpec, Score};

/// About how many operations a score and its comparisons cost.
const SCORE_FLOPS: usize = 40;

/// Which rows go to which experts.
#[derive(Default)]
pub struct CpuRouting {
    /// Rows that were routed.
    pub(super) total: usize,
    /// For each expert, where its rows begin in `rows` and `weights`; the end of the last one's.
    pub(super) starts: Vec<usize>,
    /// Rows, by expert; those of an expert ascend.
    pub(super) rows: Vec<u32>,
    /// What each of them weighs its expert with.
    pub(super) weights: Vec<f32>,
    /// `[rows, top_k]`: experts and weights by row.
    chosen: Vec<u32>,
    chosen_weights: Vec<f32>,
}

/// Choose the experts of every row of `logits`.
pub(in crate::cpu) fn route(
    isa: Isa,
    pool: &Pool,
    spec: &RouteSpec,
    logits: &CpuTensor,
    bias: Option<&CpuTensor>,
    routing: &mut CpuRouting,
) {
    assert!(logits.shape().len() == 2, "route: logits {:?} are no matrix", logits.shape());
    let (rows, experts, top_k) = (logits.rows(), logits.cols(), spec.top_k);
    spec.check(experts);
    if let Some(bias) = bias {
        assert_eq!(bias.shape(), [experts], "bias of route");
    }
    assert!(u32::try_from(rows).is_ok(), "route of {rows} rows");
    routing.total = rows;
    routing.chosen.resize(rows * top_k, 0);
    routing.chosen_weights.resize(rows * top_k, 0.0);
    let (chosen, weights) = (Shared::new(&mut routing.chosen), Shared::new(&mut routing.chosen_weights));
    let flops = SCORE_FLOPS * rows * experts;
    let tasks = pool.split(flops).min(rows);
    pool.run(tasks, flops, |task| {
        let mut row_scratch = Scratch::default();
        for row in rows * task / tasks..rows * (task + 1) / tasks {
            let logits = &logits.data()[row * experts..][..experts];
            let at = row * top_k..(row + 1) * top_k;
            // SAFETY: each row belongs to one task.
            let (chosen, weights) = unsafe { (chosen.part(at.clone()), weights.part(at)) };
            choose(isa, spec, logits, bias.map(CpuTensor::data), &mut row_scratch, chosen, weights);
        }
    });
    routing.group(experts, top_k);
}

impl CpuRouting {
    /// List rows by expert.
    fn group(&mut self, experts: usize, top_k: usize) {
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        self.chosen.iter().for_each(|expert| self.starts[*expert as usize + 1] += 1);
        for expert in 0..experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        self.rows.resize(self.chosen.len(), 0);
        self.weights.resize(self.chosen.len(), 0.0);
        let mut next = self.starts.clone();
        for (i, (expert, weight)) in self.chosen.iter().zip(&self.chosen_weights).enumerate() {
            let at = &mut next[*expert as usize];
            (self.rows[*at], self.weights[*at]) = ((i / top_k) as u32, *weight);
            *at += 1;
        }
    }

    /// Experts among which rows were routed.
    pub(super) fn experts(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }
}

/// Buffers for a row at a time.
#[derive(Default)]
struct Scratch {
    scores: Vec<f32>,
    biased: Vec<f32>,
    worth: Vec<f32>,
    groups: Vec<u32>,
    best: Vec<u32>,
}

/// The experts of a row, in ascending order, and their weights.
fn choose(
    isa: Isa,
    spec: &RouteSpec,
    logits: &[f32],
    bias: Option<&[f32]>,
    scratch: &mut Scratch,
    chosen: &mut [u32],
    weights: &mut [f32],
) {
    let Scratch { scores, biased, worth, groups, best } = scratch;
    scores.resize(logits.len(), 0.0);
    match spec.score {
        Score::Softmax => softmax(isa, logits, scores),
        Score::Sigmoid => sigmoids(isa, logits, scores),
    }
    let ranked: &[f32] = match bias {
        Some(bias) => {
            biased.clear();
            biased.extend(scores.iter().zip(bias).map(|(score, bias)| score + bias));
            biased
        }
        None => scores,
    };
    if spec.top_groups < spec.groups {
        let size = spec.experts / spec.groups;
        worth.clear();
        worth.extend(ranked.chunks_exact(size).map(|group| {
            largest(group, 2, |_| true, best);
            best.iter().map(|i| group[*i as usize]).sum::<f32>()
        }));
        largest(worth, spec.top_groups, |_| true, groups);
        largest(ranked, spec.top_k, |expert| groups.contains(&(expert / size as u32)), best);
    } else {
        largest(ranked, spec.top_k, |_| true, best);
    }
    best.sort_unstable();
    chosen.copy_from_slice(best);
    let mut total = 0.0;
    for (weight, expert) in weights.iter_mut().zip(best.iter()) {
        *weight = scores[*expert as usize];
        total += *weight;
    }
    for weight in weights {
        let share = if spec.renormalise { *weight / (total + spec.renormalise_eps) } else { *weight };
        *weight = share * spec.scale;
    }
}

per_isa! {
    fn sigmoids(logits: &[f32], scores: &mut [f32]) {
        logits.iter().zip(scores).for_each(|(x, score)| *score = math::sigmoid(*x));
    }
}

per_isa! {
    fn softmax(logits: &[f32], scores: &mut [f32]) {
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
        logits.iter().zip(scores.iter_mut()).for_each(|(x, score)| *score = math::exp(*x - top));
        // In f64, which hides the order of the sum.
        let total: f64 = scores.iter().map(|score| f64::from(*score)).sum();
        let total = total as f32;
        scores.iter_mut().for_each(|score| *score /= total);
    }
}

/// Indices of the `count` largest of the open `values`, the largest first; NaN counts as larger than all numbers, and of
/// equals the first comes first.
fn largest(values: &[f32], count: usize, open: impl Fn(u32) -> bool, into: &mut Vec<u32>) {
    into.clear();
    for (i, value) in (0u32..).zip(values) {
        if !open(i) {
            continue;
        }
        if into.len() == count {
            if !above(*value, values[into[count - 1] as usize]) {
                continue;
            }
            into.pop();
        }
        let at = into.partition_point(|other| !above(*value, values[*other as usize]));
        into.insert(at, i);
    }
}

fn above(x: f32, y: f32) -> bool {
    x > y || x.is_nan() && !y.is_nan()
}
