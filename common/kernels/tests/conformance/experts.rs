//! Routing by hand-made expectations and by its definition, and what the chosen experts add to rows.

use std::ops::Range;

use hypic_kernels::{Activation, Backend, Expert, MlpForm, RouteSpec, Score};
use hypic_state::{DType, HostTensor};

use crate::support::{Rng, close, cpu_thread_pairs, reference, same_bits, slice_rows, values, within};

const SOFTMAX: RouteSpec = RouteSpec {
    experts: 4,
    top_k: 2,
    score: Score::Softmax,
    groups: 1,
    top_groups: 1,
    renormalise: false,
    renormalise_eps: 0.0,
    scale: 1.0,
};
const SIGMOID: RouteSpec = RouteSpec { score: Score::Sigmoid, ..SOFTMAX };

/// The weight of every expert for every row: expert e adds it, times silu(1), to column e.
fn weights<B: Backend>(b: &B, spec: &RouteSpec, logits: &HostTensor, bias: Option<&HostTensor>) -> Vec<f64> {
    let (rows, count) = (logits.shape()[0], spec.experts);
    let first = |rows: usize, at: usize, across: usize| {
        let mut values = vec![0.0; rows * across];
        values.iter_mut().skip(at).step_by(across).for_each(|x| *x = 1.0);
        HostTensor::from_f32([rows, across], &values)
    };
    let experts: Vec<Expert<B>> = (0..count)
        .map(|e| {
            let mut down = vec![0.0; count];
            down[e] = 1.0;
            Expert {
                gate_up: b.pack(&[first(2, 0, count)], DType::F32),
                down: b.pack(&[HostTensor::from_f32([count, 1], &down)], DType::F32),
            }
        })
        .collect();
    let mut routing = b.routing();
    b.route(spec, &b.upload(logits), bias.map(|t| b.upload(t)).as_ref(), &mut routing);
    let mut acc = b.zeros(&[rows, count]);
    b.experts(MlpForm::SwiGlu, &experts, &routing, &b.upload(&first(rows, 0, count)), &mut acc);
    let silu_of_one = 1.0 / (1.0 + (-1f64).exp());
    values(b, &acc).into_iter().map(|x| x / silu_of_one).collect()
}

/// Logits whose sigmoids are `scores`.
fn logits_of(scores: &[f64]) -> HostTensor {
    let logits: Vec<f32> = scores.iter().map(|p| (p / (1.0 - p)).ln() as f32).collect();
    HostTensor::from_f32([1, scores.len()], &logits)
}

fn expect<B: Backend>(
    b: &B,
    case: &str,
    spec: &RouteSpec,
    logits: &HostTensor,
    bias: Option<&[f32]>,
    want: &[(usize, f64)],
) {
    let bias = bias.map(|bias| HostTensor::from_f32([bias.len()], bias));
    let mut all = vec![0.0; spec.experts];
    want.iter().for_each(|(expert, weight)| all[*expert] = *weight);
    within(&format!("{} route: {case}", b.kernel_set()), &weights(b, spec, logits, bias.as_ref()), &all, 1e-6);
}

/// Softmax routers: the chosen experts' share of all experts, or of the chosen ones.
pub fn softmax_routes_are_as_published<B: Backend>(b: &B) {
    let logits = HostTensor::from_f32([1, 4], &[1f32, 2.0, 3.0, 4.0].map(f32::ln));
    expect(b, "softmax", &SOFTMAX, &logits, None, &[(2, 0.3), (3, 0.4)]);
    let renormalised = RouteSpec { renormalise: true, ..SOFTMAX };
    expect(b, "softmax, renormalised", &renormalised, &logits, None, &[(2, 3.0 / 7.0), (3, 4.0 / 7.0)]);
    let scaled = RouteSpec { scale: 2.5, ..renormalised };
    expect(b, "softmax, scaled", &scaled, &logits, None, &[(2, 7.5 / 7.0), (3, 10.0 / 7.0)]);
    let with_eps = RouteSpec { renormalise_eps: 0.3, ..renormalised };
    expect(b, "softmax, eps", &with_eps, &logits, None, &[(2, 0.3), (3, 0.4)]);
    let all = RouteSpec { top_k: 4, ..renormalised };
    expect(b, "softmax, all", &all, &logits, None, &[(0, 0.1), (1, 0.2), (2, 0.3), (3, 0.4)]);
    expect(b, "softmax, one", &RouteSpec { top_k: 1, ..renormalised }, &logits, None, &[(3, 1.0)]);
    // Far from zero, where the exponential alone would overflow.
    let far = HostTensor::from_f32([1, 4], &[500.0, 500.0, -500.0, 0.0]);
    expect(b, "softmax, far logits", &SOFTMAX, &far, None, &[(0, 0.5), (1, 0.5)]);
}

/// Sigmoid routers: chosen by biased scores, weighed by unbiased ones; groups by their two best.
pub fn sigmoid_routes_are_as_published<B: Backend>(b: &B) {
    let logits = logits_of(&[0.2, 0.5, 0.8, 0.6]);
    expect(b, "sigmoid", &SIGMOID, &logits, None, &[(2, 0.8), (3, 0.6)]);
    let bias = [0.5, 0.0, -0.4, 0.0];
    expect(b, "sigmoid, bias", &SIGMOID, &logits, Some(&bias), &[(0, 0.2), (3, 0.6)]);
    let published = RouteSpec { renormalise: true, renormalise_eps: 1e-20, scale: 2.5, ..SIGMOID };
    expect(b, "sigmoid, bias, scaled", &published, &logits, Some(&bias), &[(0, 0.625), (3, 1.875)]);

    // Sums of the two best: 1.0, 1.1, 0.85, 1.05. The best expert of all is not in a chosen group.
    let grouped = RouteSpec { experts: 8, top_k: 3, groups: 4, top_groups: 2, ..SIGMOID };
    let logits = logits_of(&[0.9, 0.1, 0.6, 0.5, 0.8, 0.05, 0.4, 0.65]);
    expect(b, "groups of two", &grouped, &logits, None, &[(2, 0.6), (3, 0.5), (7, 0.65)]);
    // The bias lifts the third group, to 1.35, above the second.
    let bias = [0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.1, 0.1];
    expect(b, "biased groups", &grouped, &logits, Some(&bias), &[(4, 0.8), (6, 0.4), (7, 0.65)]);
    // Two best of four, 1.3 against 1.0, though the sums of all four are 1.5 and 2.0.
    let halves = RouteSpec { groups: 2, top_groups: 1, top_k: 2, ..grouped };
    let logits = logits_of(&[0.7, 0.6, 0.1, 0.1, 0.5, 0.5, 0.5, 0.5]);
    expect(b, "groups of four", &halves, &logits, None, &[(0, 0.7), (1, 0.6)]);
    // Biased scores below zero still win over experts of closed groups.
    let bias = [-1.0; 8];
    expect(b, "negative scores", &halves, &logits, Some(&bias), &[(0, 0.7), (1, 0.6)]);
    // Groups of one expert have no second.
    let single = RouteSpec { groups: 8, top_groups: 3, top_k: 2, ..grouped };
    expect(b, "groups of one", &single, &logits, None, &[(0, 0.7), (1, 0.6)]);
}

/// Of equal scores the lower index wins, among experts and among groups.
pub fn ties_go_to_the_lower_index<B: Backend>(b: &B) {
    let zeros = HostTensor::from_f32([1, 8], &[0.0; 8]);
    for spec in [SOFTMAX, SIGMOID] {
        let spec = RouteSpec { experts: 8, top_k: 3, ..spec };
        let score = if spec.score == Score::Softmax { 0.125 } else { 0.5 };
        expect(b, "all equal", &spec, &zeros, None, &[(0, score), (1, score), (2, score)]);
        let grouped = RouteSpec { groups: 4, top_groups: 2, ..spec };
        expect(b, "equal groups", &grouped, &zeros, None, &[(0, score), (1, score), (2, score)]);
    }
    let some = HostTensor::from_f32([1, 8], &[0.0, 1.0, 0.0, 1.0, 2.0, 1.0, 1.0, 0.0]);
    let want = [(1, 0.731_058_578_6), (3, 0.731_058_578_6), (4, 0.880_797_078)];
    expect(b, "some equal", &RouteSpec { experts: 8, top_k: 3, ..SIGMOID }, &some, None, &want);
}

/// NaN ends in NaN, in its own row alone.
pub fn nan_logits_are_told<B: Backend>(b: &B) {
    for score in [Score::Softmax, Score::Sigmoid] {
        for (groups, top_groups) in [(1, 1), (2, 1), (4, 3)] {
            let spec = RouteSpec { experts: 8, top_k: 2, groups, top_groups, score, renormalise: true, ..SOFTMAX };
            let good = [0.1f32, 0.2, 0.3, 2.0, 0.5, 1.0, -3.0, 0.0];
            for nans in [0..8, 5..6, 0..1, 2..7] {
                let mut bad = good;
                bad[nans].fill(f32::NAN);
                let logits = HostTensor::from_f32([3, 8], [good, bad, good].as_flattened());
                let got = weights(b, &spec, &logits, None);
                let alone = weights(b, &spec, &HostTensor::from_f32([1, 8], &good), None);
                same_bits("rows beside NaN", &got[..8], &alone);
                same_bits("rows beside NaN", &got[16..], &alone);
                assert!(got[8..16].iter().any(|x| x.is_nan()), "{} hides NaN: {spec:?}", b.kernel_set());
            }
        }
    }
}

/// The weights of a row by definition; `None` if a choice hangs on less than f32 tells.
fn defined(spec: &RouteSpec, logits: &[f64], bias: Option<&[f64]>) -> Option<Vec<f64>> {
    let powers: f64 = logits.iter().map(|x| x.exp()).sum();
    let scores: Vec<f64> = match spec.score {
        Score::Softmax => logits.iter().map(|x| x.exp() / powers).collect(),
        Score::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
    };
    let biased: Vec<f64> = scores.iter().enumerate().map(|(e, s)| s + bias.map_or(0.0, |bias| bias[e])).collect();
    let worth: Vec<f64> = biased
        .chunks(spec.experts / spec.groups)
        .map(|group| {
            let mut group = group.to_vec();
            group.sort_by(|a, b| b.total_cmp(a));
            group.iter().take(2).sum()
        })
        .collect();
    // Whether it is one of the `count` largest that are `open`: few are larger.
    let is_chosen = |values: &[f64], open: &[bool], count: usize, i: usize| {
        open[i] && (0..values.len()).filter(|j| open[*j] && values[*j] > values[i]).count() < count
    };
    let is_close = |values: &[f64]| {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted.windows(2).any(|pair| pair[1] - pair[0] < 1e-5)
    };
    if is_close(&biased) || is_close(&worth) {
        return None;
    }
    let all_groups = vec![true; spec.groups];
    let open: Vec<bool> = (0..spec.experts)
        .map(|e| is_chosen(&worth, &all_groups, spec.top_groups, e / (spec.experts / spec.groups)))
        .collect();
    let mut weights: Vec<f64> =
        (0..spec.experts).map(|e| if is_chosen(&biased, &open, spec.top_k, e) { scores[e] } else { 0.0 }).collect();
    let total: f64 = weights.iter().sum();
    let share = if spec.renormalise { total + f64::from(spec.renormalise_eps) } else { 1.0 };
    weights.iter_mut().for_each(|w| *w *= f64::from(spec.scale) / share);
    Some(weights)
}

fn random_spec(rng: &mut Rng) -> RouteSpec {
    let (groups, size) = (rng.pick(&[1, 1, 2, 4]), rng.pick(&[1, 2, 5, 8]));
    let top_groups = rng.between(1, groups);
    RouteSpec {
        experts: groups * size,
        top_k: rng.between(1, (top_groups * size).min(6)),
        score: rng.pick(&[Score::Softmax, Score::Sigmoid]),
        groups,
        top_groups,
        renormalise: rng.chance(0.5),
        renormalise_eps: rng.pick(&[0.0, 1e-20]),
        scale: rng.pick(&[1.0, 2.5]),
    }
}

/// Logits, and a bias or none, for which the choice is no close call.
fn random_logits(rng: &mut Rng, spec: &RouteSpec, rows: usize) -> (HostTensor, Option<HostTensor>, Vec<f64>) {
    let bias = rng.chance(0.5).then(|| rng.tensor(&[spec.experts], 0.3));
    let wide = bias.as_ref().map(HostTensor::to_f64);
    let (mut logits, mut want) = (Vec::new(), Vec::new());
    while logits.len() < rows * spec.experts {
        let row = rng.tensor(&[spec.experts], 1.0);
        if let Some(weights) = defined(spec, &row.to_f64(), wide.as_deref()) {
            logits.extend(row.to_f32());
            want.extend(weights);
        }
    }
    (HostTensor::from_f32([rows, spec.experts], &logits), bias, want)
}

pub fn routes_match<B: Backend>(b: &B) {
    for seed in 0..80 {
        for rows in [0, 1, 7, 40] {
            let mut rng = Rng::new(6000 + seed);
            let spec = random_spec(&mut rng);
            let (logits, bias, want) = random_logits(&mut rng, &spec, rows);
            let label = format!("{} route seed={seed} rows={rows} {spec:?}", b.kernel_set());
            within(&label, &weights(b, &spec, &logits, bias.as_ref()), &want, 5e-6);
        }
    }
}

struct Case {
    spec: RouteSpec,
    form: MlpForm,
    logits: HostTensor,
    bias: Option<HostTensor>,
    gate_up: Vec<HostTensor>,
    down: Vec<HostTensor>,
    x: HostTensor,
    acc: HostTensor,
}

impl Case {
    fn new(rng: &mut Rng, spec: RouteSpec, hidden: usize, inner: usize, rows: usize) -> Self {
        let (logits, bias, _) = random_logits(rng, &spec, rows);
        let bounded = MlpForm::BoundedSwiGlu { limit: 0.4 };
        let form = rng.pick(&[MlpForm::SwiGlu, bounded, MlpForm::Plain(Activation::SquaredRelu)]);
        let mut each = |n, k: usize| (0..spec.experts).map(|_| rng.tensor(&[n, k], (k as f64).powf(-0.5))).collect();
        Case {
            gate_up: each(form.rows(inner), hidden),
            down: each(hidden, inner),
            x: rng.tensor(&[rows, hidden], 1.0),
            acc: rng.tensor(&[rows, hidden], 0.1),
            spec,
            form,
            logits,
            bias,
        }
    }

    fn run<B: Backend>(&self, b: &B, dtype: DType, rows: Range<usize>) -> Vec<f64> {
        let pack = |w: &HostTensor| b.pack(std::slice::from_ref(w), dtype);
        let weights = self.gate_up.iter().zip(&self.down);
        let experts: Vec<Expert<B>> =
            weights.map(|(gate_up, down)| Expert { gate_up: pack(gate_up), down: pack(down) }).collect();
        let upload = |t: &HostTensor| b.upload(&slice_rows(t, rows.clone()));
        let mut routing = b.routing();
        // A routing is reused: what an earlier pass left must not show.
        b.route(&self.spec, &b.upload(&self.logits), None, &mut routing);
        b.route(&self.spec, &upload(&self.logits), self.bias.as_ref().map(|t| b.upload(t)).as_ref(), &mut routing);
        let mut acc = upload(&self.acc);
        b.experts(self.form, &experts, &routing, &upload(&self.x), &mut acc);
        values(b, &acc)
    }
}

/// Sizes that are no multiples of anything, and some that are; the last has rows for several tiles of one expert.
const SIZES: [(usize, usize, usize); 7] =
    [(1, 1, 1), (3, 2, 5), (16, 7, 40), (33, 45, 20), (70, 33, 13), (64, 64, 9), (40, 31, 150)];

pub fn experts_match<B: Backend>(b: &B) {
    let r = reference();
    for (seed, (hidden, inner, rows)) in SIZES.into_iter().enumerate() {
        for rows in [0, 1, rows] {
            let mut rng = Rng::new(6100 + seed as u64);
            let spec = random_spec(&mut rng);
            let case = Case::new(&mut rng, spec, hidden, inner, rows);
            // What goes into `down` is rounded to bf16, and may fall on the other side of a rounding edge.
            for (dtype, tolerance) in [(DType::F32, 5e-6), (DType::Bf16, 4e-3)] {
                let label =
                    format!("{} experts {dtype} [{rows}, {hidden}] {inner} {:?} {spec:?}", b.kernel_set(), case.form);
                close(&label, &case.run(b, dtype, 0..rows), &case.run(&r, dtype, 0..rows), tolerance);
            }
        }
    }
}

/// A row's result does not depend on the rows beside it.
pub fn expert_rows_are_independent<B: Backend>(b: &B) {
    for (seed, (hidden, inner, _)) in SIZES.into_iter().enumerate() {
        let mut rng = Rng::new(6200 + seed as u64);
        let (spec, rows) = (random_spec(&mut rng), 45);
        let case = Case::new(&mut rng, spec, hidden, inner, rows);
        for dtype in [DType::F32, DType::Bf16] {
            let whole = case.run(b, dtype, 0..rows);
            for part in [0..1, 1..2, 44..45, 3..20, 20..45] {
                let label = format!("{} experts {dtype} {hidden} {inner} {spec:?} {part:?}", b.kernel_set());
                same_bits(&label, &case.run(b, dtype, part.clone()), &whole[part.start * hidden..part.end * hidden]);
            }
        }
    }
}

pub fn threads_agree() {
    for (one, many) in cpu_thread_pairs() {
        for dtype in [DType::F32, DType::Bf16] {
            for rows in [1, 60] {
                let mut rng = Rng::new(6300);
                let spec = RouteSpec { experts: 12, top_k: 4, ..SIGMOID };
                let case = Case::new(&mut rng, spec, 290, 130, rows);
                let label = format!("{} threads experts {dtype} rows={rows}", one.kernel_set());
                same_bits(&label, &case.run(&many, dtype, 0..rows), &case.run(&one, dtype, 0..rows));
            }
        }
    }
}
