//! Lightning attention: a fixed decay per head and layer (Qin et al., Lightning Attention-2, 2024). Publishers differ
//! in how the decay depends on the layer, and a wrong one gives a model that is only slightly worse.

use hypic_kernels::{Activation, ScanShape};

use super::recurrent::recurrent;
use crate::spec::{DecaySpec, NormSpec, ProjectionSpec, RecurrentSpec, RowSource, RowsSpec, WriteSpec};

/// ALiBi's slopes (Press et al., 2022): `2^(-8 (h + 1) / heads)` if the number of heads is a power of two; otherwise
/// those of the next smaller power p, then every second one of the list for 2p.
pub fn slopes(heads: usize) -> Vec<f64> {
    let list = |n: usize| (1..=n).map(move |h| (-8.0 * h as f64 / n as f64).exp2());
    if heads.is_power_of_two() {
        return list(heads).collect();
    }
    let below = heads.next_power_of_two() / 2;
    list(below).chain(list(2 * below).step_by(2)).take(heads).collect()
}

/// The factor on the slopes of layer `layer` of `layers`, where the decay weakens by `1 / span` from layer to layer
/// and layer `first` has the whole (a little more, so that the last layer decays too).
pub fn layer_factor(layer: usize, first: usize, layers: usize, span: f64) -> f64 {
    const LEAST: f64 = 1e-5;
    // There is nothing to weaken over.
    if layers == 1 {
        return 1.0 + LEAST;
    }
    1.0 - (layer as f64 - first as f64) / span + LEAST
}

/// A layer whose slopes are multiplied by `factor`. As it comes from here it has neither activation, norms of q and k
/// nor rotation, and q is not scaled; a sigmoid gate follows the norm.
pub fn lightning(
    heads: usize,
    width: usize,
    factor: f64,
    channels: RowsSpec,
    gate: RowSource,
    norm: NormSpec,
    out: RowSource,
) -> RecurrentSpec {
    let shape = ScanShape { key_heads: heads, heads, d_k: width, d_v: width };
    let log = slopes(heads).into_iter().map(|slope| -slope * factor).collect();
    let decay = DecaySpec::Fixed { log, stored: None };
    let gate = ProjectionSpec::Direct(vec![gate]);
    RecurrentSpec {
        gate_activation: Activation::Sigmoid,
        ..recurrent(shape, channels, decay, WriteSpec::Plain, gate, norm, out)
    }
}
