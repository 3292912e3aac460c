//! Transition operators: what a stretch of tokens does to a recurrent state.

use std::fmt;
use std::str::FromStr;

/// Heads whose operator has at most this share of the identity's Frobenius norm store none: what is
/// left of the earlier state is below float32's resolution.
pub const DECAYED: f64 = 1e-8;

/// How a jump over a body changes the running state S.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ComposeRule {
    /// `S <- T S + S_body`: what an ordinary pass over the body would do, had its inputs been those
    /// of the isolated prefill.
    #[default]
    Transition,
    /// `S <- S_body`: keep only the last body (LinearKV).
    Last,
    /// `S <- S + S_body`: the naive baseline.
    Add,
}

impl ComposeRule {
    /// All rules, with the names that users write.
    pub const NAMES: [(&'static str, ComposeRule); 3] =
        [("transition", ComposeRule::Transition), ("last", ComposeRule::Last), ("add", ComposeRule::Add)];
}

impl fmt::Display for ComposeRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, _) = Self::NAMES.iter().find(|(_, r)| r == self).expect("every rule has a name");
        f.write_str(name)
    }
}

impl FromStr for ComposeRule {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let found = Self::NAMES.iter().find(|(name, _)| *name == s);
        found.map(|(_, r)| *r).ok_or_else(|| format!("unknown compose rule '{s}': use transition, last or add"))
    }
}

/// The product of all token transitions of a stretch, per head, in the smallest form its family has.
/// It acts on a state `[d_k, d_v]` from the left.
#[derive(Clone, Debug, PartialEq)]
pub enum Transition<T> {
    /// `[heads]`: a multiple of the identity.
    Scalar(T),
    /// `[heads, d_k]`: a diagonal.
    Diagonal(T),
    /// A matrix per head, some of them omitted.
    Dense(Dense<T>),
}

/// Dense operators of the heads that have not decayed.
#[derive(Clone, Debug, PartialEq)]
pub struct Dense<T> {
    /// Number of heads of the layer.
    pub heads: usize,
    /// Ascending indices of the heads that have an operator; the others' is zero.
    pub kept: Vec<u32>,
    /// `[kept, d_k, d_k]`.
    pub blocks: T,
}

impl<T> Transition<T> {
    /// The tensor with the numbers.
    pub fn tensor(&self) -> &T {
        match self {
            Transition::Scalar(t) | Transition::Diagonal(t) => t,
            Transition::Dense(d) => &d.blocks,
        }
    }

    /// The same operator with its numbers converted.
    pub fn map<U>(&self, f: impl FnOnce(&T) -> U) -> Transition<U> {
        match self {
            Transition::Scalar(t) => Transition::Scalar(f(t)),
            Transition::Diagonal(t) => Transition::Diagonal(f(t)),
            Transition::Dense(d) => {
                Transition::Dense(Dense { heads: d.heads, kept: d.kept.clone(), blocks: f(&d.blocks) })
            }
        }
    }
}
