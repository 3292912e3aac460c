//! Rotary embedding: cosines and sines by distance, and the rotation of head vectors.
//!
//! Angles are computed in f64 from exact integer positions. The table covers the distances that were asked
//! for and grows up to a bound; angles beyond it, and those of a stretched embedding, are computed when they are used.

use std::sync::{Arc, PoisonError, RwLock};

use super::{Isa, math};
use crate::{Positions, RopeSpec};

/// Positions of the smallest table.
const TABLE_START: usize = 1 << 10;
/// Positions of the largest table: 64 MiB for 64 pairs.
const TABLE_END: usize = 1 << 17;

/// A rotary embedding with its table.
pub struct CpuRope {
    spec: RopeSpec,
    table: RwLock<Arc<Vec<f32>>>,
}

impl CpuRope {
    pub(super) fn new(spec: &RopeSpec) -> Self {
        CpuRope { spec: spec.clone(), table: RwLock::default() }
    }

    /// What it was made of.
    pub(super) fn spec(&self) -> &RopeSpec {
        &self.spec
    }

    /// Dimensions of a head that the rotation needs to be there.
    pub(super) fn needs(&self) -> usize {
        self.spec.offset + 2 * self.spec.inv_freq.len()
    }

    /// What turns vectors by these positions.
    pub(super) fn turner_for(&self, positions: Positions<'_>) -> Turner<'_> {
        self.turner(positions.at.iter().map(|p| p.unsigned_abs()).max().unwrap_or(0), positions.ntk_alpha)
    }

    /// What turns vectors, stretched by `ntk_alpha`; quick for distances up to `farthest` either way if that is 1.
    pub(super) fn turner(&self, farthest: u64, ntk_alpha: f64) -> Turner<'_> {
        let spec = &self.spec;
        if ntk_alpha != 1.0 {
            return Turner { spec, stretched: Some(self.spec.ntk(ntk_alpha).inv_freq), table: Arc::default() };
        }
        let pairs = self.spec.inv_freq.len();
        let want = usize::try_from(farthest).unwrap_or(usize::MAX).saturating_add(1).min(TABLE_END);
        // A poisoned lock still guards a whole table: it is replaced at once.
        let table = Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner));
        if table.len() >= want * 2 * pairs {
            return Turner { spec, stretched: None, table };
        }
        let mut slot = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let have = slot.len() / (2 * pairs);
        if have < want {
            let mut grown = slot.to_vec();
            let positions = want.next_power_of_two().max(TABLE_START);
            grown.resize(positions * 2 * pairs, 0.0);
            for position in have..positions {
                let at = position * 2 * pairs;
                let angles = self.spec.inv_freq.iter().map(|freq| position as f64 * freq);
                write(angles, self.spec.scale, &mut grown[at..at + 2 * pairs]);
            }
            *slot = Arc::new(grown);
        }
        Turner { spec, stretched: None, table: Arc::clone(&slot) }
    }
}

/// The cosines of all pairs, then the sines, times the factor.
fn write(angles: impl Iterator<Item = f64>, scale: f64, to: &mut [f32]) {
    let (cos, sin) = to.split_at_mut(to.len() / 2);
    for ((angle, cos), sin) in angles.zip(cos).zip(sin) {
        let (s, c) = angle.sin_cos();
        *cos = (c * scale) as f32;
        *sin = (s * scale) as f32;
    }
}

/// Turns vectors.
pub(super) struct Turner<'a> {
    spec: &'a RopeSpec,
    /// Frequencies at the own position, if they are others.
    stretched: Option<Vec<f64>>,
    table: Arc<Vec<f32>>,
}

impl Turner<'_> {
    /// Turn each of `heads`, `width` numbers long, to `position` as seen from `origin`, which is never stretched.
    pub fn turn(&self, isa: Isa, position: i64, origin: i64, width: usize, heads: &mut [f32]) {
        let RopeSpec { offset, inv_freq, interleaved, scale } = self.spec;
        let per_position = 2 * inv_freq.len();
        let distance = (position - origin).unsigned_abs();
        // Turning back is turning by the other sign of the sines.
        let (mut computed, mut sign) = (Vec::new(), if position < origin { -1.0 } else { 1.0 });
        let known = usize::try_from(distance).ok().filter(|d| *d < TABLE_END).and_then(|d| {
            let at = d * per_position;
            self.table.get(at..at + per_position)
        });
        let angles = match (&self.stretched, known) {
            (None, Some(row)) => row,
            (None, None) => {
                computed.resize(per_position, 0.0);
                write(inv_freq.iter().map(|freq| distance as f64 * freq), *scale, &mut computed);
                &computed[..]
            }
            (Some(stretched), _) => {
                sign = 1.0;
                computed.resize(per_position, 0.0);
                let (position, origin) = (position as f64, origin as f64);
                let angles = stretched.iter().zip(inv_freq).map(|(own, freq)| position * own - origin * freq);
                write(angles, *scale, &mut computed);
                &computed[..]
            }
        };
        let (cos, sin) = angles.split_at(inv_freq.len());
        for head in heads.chunks_exact_mut(width) {
            let rotated = &mut head[*offset..offset + per_position];
            if *interleaved {
                turn_neighbours(isa, rotated, cos, sin, sign);
            } else {
                turn_halves(isa, rotated, cos, sin, sign);
            }
        }
    }
}

math::per_isa! {
    /// Pairs `(i, i + n)`.
    fn turn_halves(x: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
        let (left, right) = x.split_at_mut(cos.len());
        for (((x, y), cos), sin) in left.iter_mut().zip(right).zip(cos).zip(sin) {
            let sin = sign * sin;
            (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
        }
    }
}

math::per_isa! {
    /// Pairs `(2i, 2i + 1)`.
    fn turn_neighbours(x: &mut [f32], cos: &[f32], sin: &[f32], sign: f32) {
        for ((pair, cos), sin) in x.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
            let sin = sign * sin;
            *pair = [pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(interleaved: bool, scale: f64) -> RopeSpec {
        let inv_freq = (0..5).map(|i| 10_000f64.powf(-f64::from(i) / 5.0)).collect();
        RopeSpec { offset: 3, inv_freq, interleaved, scale }
    }

    #[test]
    fn rotation_is_exact_at_any_distance() {
        for interleaved in [false, true] {
            let spec = spec(interleaved, 1.25);
            let rope = CpuRope::new(&spec);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                for position in [0, 1, -1, 77, -1023, 1024, -5000, 131_071, 131_072, -3_000_000, 1 << 40] {
                    let before: Vec<f32> = (0..32).map(|i| (i as f32 * 0.7).sin()).collect();
                    let mut got = before.clone();
                    rope.turner(100, 1.0).turn(isa, position, 0, 16, &mut got);
                    for head in 0..2 {
                        let (x, y) = (&before[head * 16..], &got[head * 16..]);
                        let mut want: Vec<f64> = x[..16].iter().map(|x| f64::from(*x)).collect();
                        for (i, freq) in spec.inv_freq.iter().enumerate() {
                            let (a, b) = if interleaved { (3 + 2 * i, 4 + 2 * i) } else { (3 + i, 8 + i) };
                            let (sin, cos) = (position as f64 * freq).sin_cos();
                            let (u, v) = (f64::from(x[a]), f64::from(x[b]));
                            want[a] = 1.25 * (u * cos - v * sin);
                            want[b] = 1.25 * (v * cos + u * sin);
                        }
                        for (got, want) in y.iter().zip(&want) {
                            assert!((f64::from(*got) - want).abs() < 3e-7, "{position}: {got} is not {want}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_table_changes_no_bit() {
        let spec = spec(false, 1.0);
        let (small, large) = (CpuRope::new(&spec), CpuRope::new(&spec));
        for position in [0i64, 900, -1500, 40_000] {
            let (mut x, mut y) = (vec![0.3; 13], vec![0.3; 13]);
            small.turner(0, 1.0).turn(Isa::best(), position, 0, 13, &mut x);
            large.turner(position.unsigned_abs(), 1.0).turn(Isa::best(), position, 0, 13, &mut y);
            assert_eq!(x, y);
        }
    }
}
