//! Choosing experts by sorting all of them, and running them row by row.

use super::check;
use super::linear::RefLinear;
use super::real::Real;
use super::tensor::RefTensor;
use super::{Reference, rows};
use crate::{Expert, MlpForm, RouteSpec, Score};

/// The experts of every row.
#[derive(Clone, Debug)]
pub struct RefRouting<R> {
    /// Experts that were chosen from.
    experts: usize,
    /// Per row, in ascending order of experts: expert and weight.
    rows: Vec<Vec<(usize, R)>>,
}

impl<R> Default for RefRouting<R> {
    fn default() -> Self {
        RefRouting { experts: 0, rows: Vec::new() }
    }
}

pub(super) fn route<R: Real>(
    spec: &RouteSpec,
    logits: &RefTensor<R>,
    bias: Option<&RefTensor<R>>,
    routing: &mut RefRouting<R>,
) {
    let (rows, experts) = check::matrix("route", "logits", logits);
    spec.check(experts);
    if let Some(bias) = bias {
        check::shape("route", "bias", bias, &[experts]);
    }
    routing.experts = experts;
    routing.rows = (0..rows).map(|i| choose(spec, logits.row(i), bias.map(|b| &b.data[..]))).collect();
}

/// The experts of a row, in ascending order, with their weights.
fn choose<R: Real>(spec: &RouteSpec, logits: &[R], bias: Option<&[R]>) -> Vec<(usize, R)> {
    let scores = scores(spec.score, logits);
    let biased: Vec<R> = match bias {
        Some(bias) => scores.iter().zip(bias).map(|(score, bias)| *score + *bias).collect(),
        None => scores.clone(),
    };
    let size = spec.experts / spec.groups;
    let worth: Vec<R> =
        biased.chunks(size).map(|group| largest_first(group).into_iter().take(2).map(|i| group[i]).sum()).collect();
    let open: Vec<usize> = largest_first(&worth).into_iter().take(spec.top_groups).collect();
    let mut chosen: Vec<usize> =
        largest_first(&biased).into_iter().filter(|expert| open.contains(&(expert / size))).take(spec.top_k).collect();
    chosen.sort_unstable();

    let total: R = chosen.iter().map(|e| scores[*e]).sum();
    let scale = R::from_f64(f64::from(spec.scale));
    let eps = R::from_f64(f64::from(spec.renormalise_eps));
    let weight = |expert: usize| {
        let score = if spec.renormalise { scores[expert] / (total + eps) } else { scores[expert] };
        score * scale
    };
    chosen.into_iter().map(|expert| (expert, weight(expert))).collect()
}

fn scores<R: Real>(score: Score, logits: &[R]) -> Vec<R> {
    match score {
        Score::Sigmoid => logits.iter().map(|x| x.sigmoid()).collect(),
        Score::Softmax => {
            let largest = logits.iter().copied().fold(logits[0], |a, b| if b > a { b } else { a });
            let powers: Vec<R> = logits.iter().map(|x| (*x - largest).exp()).collect();
            let total: R = powers.iter().copied().sum();
            powers.into_iter().map(|x| x / total).collect()
        }
    }
}

/// Indices by value, the largest first; NaN counts as larger than all numbers, and of equals the first comes first.
fn largest_first<R: Real>(values: &[R]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    // A stable sort by a total order: NaN has no other, so all of them are equal.
    order.sort_by(|a, b| {
        let (a, b) = (values[*a], values[*b]);
        b.partial_cmp(&a).unwrap_or_else(|| is_nan(b).cmp(&is_nan(a)))
    });
    order
}

#[allow(clippy::eq_op)]
fn is_nan<R: Real>(x: R) -> bool {
    x != x
}

pub(super) fn experts<R: Real>(
    form: MlpForm,
    experts: &[Expert<Reference<R>>],
    routing: &RefRouting<R>,
    x: &RefTensor<R>,
    acc: &mut RefTensor<R>,
) {
    let (rows, hidden) = check::matrix("experts", "x", x);
    check::shape("experts", "acc", acc, &[rows, hidden]);
    assert_eq!(routing.rows.len(), rows, "experts: {} rows were routed, not {rows}", routing.rows.len());
    assert!(
        rows == 0 || routing.experts == experts.len(),
        "experts: routed among {}, not {}",
        routing.experts,
        experts.len()
    );
    for (index, expert) in experts.iter().enumerate() {
        let ([gate_up, k], [n, inner]) = (expert.gate_up.shape(), expert.down.shape());
        assert!(
            k == hidden && n == hidden && gate_up == form.rows(inner),
            "experts: expert {index} has weights [{gate_up}, {k}] and [{n}, {inner}], rows have {hidden} columns"
        );
    }
    for (i, chosen) in routing.rows.iter().enumerate() {
        for (expert, weight) in chosen {
            let y = mlp(form, &experts[*expert], x.row(i));
            for (acc, y) in acc.row_mut(i).iter_mut().zip(y) {
                *acc += *weight * y;
            }
        }
    }
}

/// `down(inner(gate_up(x)))`.
fn mlp<R: Real>(form: MlpForm, expert: &Expert<Reference<R>>, x: &[R]) -> Vec<R> {
    let apply = |w: &RefLinear<R>, x: &[R]| {
        let mut y = vec![R::ZERO; w.shape()[0]];
        w.product(x, |j, v| y[j] = v);
        y
    };
    let gate_up = apply(&expert.gate_up, x);
    let mut inner = vec![R::ZERO; expert.down.shape()[1]];
    rows::inner_row(form, &gate_up, &mut inner);
    apply(&expert.down, &inner)
}
