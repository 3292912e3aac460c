//! Random inputs of recurrences: every kind of decay and write, from nothing decayed to everything.

use hypic_kernels::ScanShape;
use hypic_state::HostTensor;

use crate::scan_case::Case;
use crate::support::Rng;

/// What decays are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decays {
    None,
    Fixed,
    Head,
    /// With steps between two bounds.
    HeadLimited,
    Channel,
    ChannelSoftplus,
    ChannelBounded,
}

impl Decays {
    pub fn by_channel(self) -> bool {
        matches!(self, Decays::Channel | Decays::ChannelSoftplus | Decays::ChannelBounded)
    }
}

/// What tokens write.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Writes {
    Plain,
    Step,
    Delta,
    /// With beta up to 2.
    DeltaNegative,
}

impl Writes {
    pub fn delta(self) -> bool {
        matches!(self, Writes::Delta | Writes::DeltaNegative)
    }

    /// Largest beta.
    pub fn scale(self) -> f32 {
        if self == Writes::DeltaNegative { 2.0 } else { 1.0 }
    }
}

/// A recurrence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kind {
    pub decays: Decays,
    pub writes: Writes,
}

const fn kind(decays: Decays, writes: Writes) -> Kind {
    Kind { decays, writes }
}

pub const GDN: Kind = kind(Decays::Head, Writes::Delta);
pub const KDA: Kind = kind(Decays::ChannelSoftplus, Writes::Delta);
pub const LIGHTNING: Kind = kind(Decays::Fixed, Writes::Plain);
pub const MAMBA2: Kind = kind(Decays::HeadLimited, Writes::Step);
pub const GLA: Kind = kind(Decays::Channel, Writes::Plain);

/// Every combination that there is.
pub const KINDS: [Kind; 17] = [
    kind(Decays::None, Writes::Plain),
    LIGHTNING,
    kind(Decays::Head, Writes::Plain),
    kind(Decays::Head, Writes::Step),
    MAMBA2,
    GLA,
    kind(Decays::ChannelSoftplus, Writes::Plain),
    kind(Decays::ChannelBounded, Writes::Plain),
    kind(Decays::None, Writes::Delta),
    kind(Decays::Fixed, Writes::Delta),
    GDN,
    kind(Decays::Head, Writes::DeltaNegative),
    kind(Decays::HeadLimited, Writes::Delta),
    kind(Decays::Channel, Writes::DeltaNegative),
    kind(Decays::Channel, Writes::Delta),
    KDA,
    kind(Decays::ChannelBounded, Writes::Delta),
];

/// How strongly states decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Strength {
    /// Nothing at all.
    None,
    /// As in trained models.
    Mild,
    /// Everything within a few tokens.
    Strong,
    /// Every head, channel and token something else, up to exp(-1000).
    Mixed,
    /// Log decays of -20, 0 and -1e-6, at random.
    Extreme,
}

/// How far a token is corrected.
#[derive(Clone, Copy, Debug)]
pub enum Beta {
    Any,
    /// The largest: 1, or 2 where that is allowed.
    Full,
    /// Half of the largest.
    Half,
}

/// How alike the keys are.
#[derive(Clone, Copy, Debug)]
pub enum Keys {
    Any,
    Alike,
    Identical,
}

pub const STRENGTHS: [Strength; 5] =
    [Strength::None, Strength::Mild, Strength::Strong, Strength::Mixed, Strength::Extreme];
pub const BETAS: [Beta; 3] = [Beta::Any, Beta::Full, Beta::Half];
pub const KEYS: [Keys; 3] = [Keys::Any, Keys::Alike, Keys::Identical];
pub const ORDINARY: (Strength, Beta, Keys) = (Strength::Mild, Beta::Any, Keys::Any);

/// Least log decay of bounded gates.
pub const LOWER: f32 = -20.0;

/// Inputs for `rows` rows and `sequences` sequences; no calls yet.
pub fn inputs(
    rng: &mut Rng,
    shape: ScanShape,
    kind: Kind,
    rows: usize,
    sequences: usize,
    (strength, beta, keys): (Strength, Beta, Keys),
) -> Case {
    let ScanShape { key_heads, heads, d_k, d_v } = shape;
    let key_width = key_heads * d_k;
    let q_col = rng.below(4);
    let width = q_col + 2 * key_width + heads * d_v + rng.below(3);
    // Delta rules with long keys diverge.
    let unit = if kind.writes.delta() { rng.chance(0.8) } else { rng.chance(0.3) };
    let key_size = if unit { 1.0 } else { 0.7 / (d_k as f32).sqrt() };
    let mut qkv = rng.tensor(&[rows, width], 1.0).to_f32();
    let common = rng.tensor(&[key_width], 1.0).to_f32();
    for row in qkv.chunks_mut(width) {
        for (k, same) in row[q_col + key_width..q_col + 2 * key_width].iter_mut().zip(&common) {
            *k = key_size
                * match keys {
                    Keys::Any => *k,
                    Keys::Alike => same + 0.1 * *k,
                    Keys::Identical => *same,
                };
        }
    }

    let x_width = if kind.decays.by_channel() { heads * d_k } else { heads };
    let (b_col, behind) = (rng.below(5), rng.below(3));
    let gates_width = b_col + heads + x_width + behind;
    let mut gates = rng.tensor(&[rows, gates_width], 1.0).to_f32();
    for row in gates.chunks_mut(gates_width) {
        for b in &mut row[b_col..b_col + heads] {
            *b = match beta {
                Beta::Any => 2.0 * *b,
                Beta::Full => 12.0 + b.abs(),
                Beta::Half => 0.01 * *b,
            };
        }
        for x in &mut row[b_col + heads..b_col + heads + x_width] {
            *x = gate_input(rng, kind.decays, strength, *x);
        }
    }

    let extreme = matches!(strength, Strength::Extreme);
    let a_log: Vec<f32> = (0..heads).map(|_| a_log(rng, kind.decays, strength)).collect();
    let fixed: Vec<f32> = (0..heads).map(|_| fixed_log(rng, strength)).collect();
    let bias_size = if extreme || strength == Strength::None { 0.0 } else { 0.5 };
    Case {
        shape,
        kind,
        unit,
        q_scale: rng.uniform(0.3, 1.0) as f32,
        qkv: HostTensor::from_f32([rows, width], &qkv),
        q_col,
        gates: HostTensor::from_f32([rows, gates_width], &gates),
        b_col,
        a_log: HostTensor::from_f32([heads], &a_log),
        bias: rng.tensor(&[x_width], bias_size),
        fixed: HostTensor::from_f32([heads], &fixed),
        skip: rng.chance(0.4).then(|| rng.tensor(&[heads], 1.0)),
        states: (0..sequences).map(|_| rng.tensor(&[heads, d_k, d_v], 0.7)).collect(),
        entries: Vec::new(),
        rope: None,
        calls: Vec::new(),
    }
}

/// What a gate makes a log decay of, from a normal number.
fn gate_input(rng: &mut Rng, decays: Decays, strength: Strength, x: f32) -> f32 {
    // softplus and sigmoid of these: 20 and 1, 1e-6, 0.
    let extreme = rng.pick(&[20.0, -13.815_51, -200.0]);
    match (decays, strength) {
        (Decays::Channel, Strength::Extreme) => rng.pick(&[-20.0, 0.0, -1e-6]),
        (Decays::Channel, Strength::None) => 0.0,
        (Decays::Channel, Strength::Mild) => -0.1 * x.abs(),
        (Decays::Channel, Strength::Strong) => -2.0 - 3.0 * x.abs(),
        (Decays::Channel, Strength::Mixed) => -(4.0 * x).min(6.9).exp(),
        (_, Strength::Extreme) => extreme,
        (Decays::ChannelBounded, Strength::None) => -200.0,
        (Decays::ChannelBounded, Strength::Mild) => x - 5.0,
        (Decays::ChannelBounded, Strength::Strong) => x + 1.0,
        (_, Strength::Mixed) => 12.0 * x,
        (_, Strength::None | Strength::Mild | Strength::Strong) => x,
    }
}

fn a_log(rng: &mut Rng, decays: Decays, strength: Strength) -> f32 {
    match (decays, strength) {
        (_, Strength::Extreme) => 0.0,
        (Decays::ChannelBounded, _) => rng.uniform(-0.5, 0.3) as f32,
        (_, Strength::None) => -90.0,
        (_, Strength::Mild) => rng.uniform(-3.5, -0.5) as f32,
        (_, Strength::Strong) => rng.uniform(1.0, 3.0) as f32,
        (_, Strength::Mixed) => rng.uniform(-6.0, 4.0) as f32,
    }
}

fn fixed_log(rng: &mut Rng, strength: Strength) -> f32 {
    match strength {
        Strength::None => 0.0,
        Strength::Mild => -rng.uniform(0.01, 0.5) as f32,
        Strength::Strong => -rng.uniform(2.0, 10.0) as f32,
        Strength::Mixed => -rng.uniform(-8.0, 5.0).exp() as f32,
        Strength::Extreme => rng.pick(&[-20.0, 0.0, -1e-6]),
    }
}
