//! What layers of experts take: how experts are chosen, and their weights.
//!
//! What can go wrong is a choice that cannot be made (more experts than there are, groups of unequal size):
//! [`RouteSpec::check`] says so.

use super::{Activation, Backend};

/// What an MLP does between its projections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MlpForm {
    /// SwiGLU (Shazeer, 2020): `silu(gate) * up`, the first projection's rows being `[gate | up]`.
    SwiGlu,
    /// The same of bounded factors: `min(silu(gate), limit) * clamp(up, -limit, limit)`.
    BoundedSwiGlu {
        /// Above 0.
        limit: f32,
    },
    /// No gate: `activation(up)`.
    Plain(Activation),
}

impl MlpForm {
    /// Whether the first projection has a gate's rows before those of `up`.
    pub fn is_gated(self) -> bool {
        !matches!(self, MlpForm::Plain(_))
    }

    /// Rows of the first projection of an MLP of width `inner`.
    pub fn rows(self, inner: usize) -> usize {
        if self.is_gated() { 2 * inner } else { inner }
    }
}

/// How experts are chosen for a row and weighed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteSpec {
    /// Experts.
    pub experts: usize,
    /// Experts of a row.
    pub top_k: usize,
    /// What makes scores of logits.
    pub score: Score,
    /// Groups of experts (1: none), of equal size, in order.
    pub groups: usize,
    /// Groups that a row may choose from: those with the largest sum of their two best (biased) scores.
    pub top_groups: usize,
    /// The weights of a row's experts are divided by their sum.
    pub renormalise: bool,
    /// Added to that sum.
    pub renormalise_eps: f32,
    /// Factor on the weights.
    pub scale: f32,
}

impl RouteSpec {
    /// Whether rows with `logits` logits can be routed so.
    ///
    /// # Panics
    /// If they cannot; the message says what does not fit.
    pub fn check(&self, logits: usize) {
        let RouteSpec { experts, top_k, groups, top_groups, .. } = *self;
        assert!(logits == experts, "route: {logits} logits for {experts} experts");
        assert!(top_k >= 1 && top_k <= experts, "route: {top_k} of {experts} experts for a row");
        assert!(
            groups >= 1 && experts.is_multiple_of(groups),
            "route: {experts} experts cannot be divided into {groups} groups of equal size"
        );
        assert!(top_groups >= 1 && top_groups <= groups, "route: {top_groups} of {groups} groups for a row");
        let open = experts / groups * top_groups;
        assert!(top_k <= open, "route: {top_k} experts for a row, but {top_groups} groups have only {open}");
    }
}

/// Scores of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
}

/// The weights of one expert, an MLP.
pub struct Expert<B: Backend> {
    /// Rows `[gate | up]`, or `[up]`.
    pub gate_up: B::Linear,
    /// `[hidden, inner]`.
    pub down: B::Linear,
}
